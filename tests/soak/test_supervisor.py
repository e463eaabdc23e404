"""The run of all parts: its report is true whatever becomes of a part, or of the run itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.soak import supervisor
from tests.waiting import until

TELL = """
import json, os, signal, subprocess, sys, time
def tell(figures, problems=(), is_over=True):
    path = sys.argv[sys.argv.index("--figures") + 1]
    with open(path + ".new", "w") as file:
        json.dump({"figures": figures, "problems": list(problems), "is_over": is_over}, file)
    os.rename(path + ".new", path)
"""


def part(script: str) -> Sequence[str]:
    return [sys.executable, "-c", TELL + textwrap.dedent(script)]


def written(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "reports/soak.json").read_text())
    return {key: value for key, value in found.items() if not key.endswith("_seconds")}


def run(folder: Path, **parts: Sequence[str]) -> int:
    return supervisor.run(folder / "reports/soak.json", parts, {"seed": 7})


def test_figures_of_all_parts_are_in_the_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one, two = part("print('at it', flush=True); tell({'a': 1})"), part("tell({'b': 2})")
    assert run(tmp_path, one=one, two=two) == 0
    assert written(tmp_path) == {"seed": 7, "a": 1, "b": 2, "unfinished": [], "problems": []}
    shown = capfd.readouterr().out
    assert "at it\n" in shown
    assert [path.name for path in (tmp_path / "reports").iterdir()] == ["soak.json"]


@pytest.mark.parametrize(
    ("script", "status"),
    [("sys.exit(3)", "3"), ("os.kill(os.getpid(), signal.SIGKILL)", "-9"), ("raise ValueError('a bug')", "1")],
)
def test_a_part_that_breaks_is_told_with_what_it_had_found_and_the_others_run(
    tmp_path: Path, script: str, status: str
) -> None:
    broken = part(f"tell({{'a': 5}}, ['something'], is_over=False)\n{script}")
    assert run(tmp_path, broken=broken, other=part("tell({'b': 2})")) == 1
    found = written(tmp_path)
    assert (found["a"], found["b"], found["unfinished"]) == (5, 2, ["broken"])
    assert found["problems"] == ["something", f"broken ended with status {status} before it was over"]


def test_what_a_part_finds_wrong_is_wrong(tmp_path: Path) -> None:
    assert run(tmp_path, one=part("tell({'a': 1}, ['lost']); sys.exit(1)")) == 1
    assert written(tmp_path) == {"seed": 7, "a": 1, "unfinished": [], "problems": ["lost"]}


def test_what_a_part_leaves_running_is_ended_and_not_waited_for(tmp_path: Path) -> None:
    left = part("tell({'pid': subprocess.Popen(['sleep', '600']).pid})")
    assert run(tmp_path, one=left) == 0
    pid = written(tmp_path)["pid"]

    def is_dead() -> bool:
        try:
            return "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]
        except OSError:  # gone, perhaps just now
            return True

    until(is_dead)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_from_outside_says_what_it_had_found(tmp_path: Path, number: signal.Signals) -> None:
    long = part("tell({'a': 3}, is_over=False); time.sleep(600)")
    parts = {"long": long, "never": part("tell({})")}

    def end() -> None:
        until((tmp_path / "reports/.soak.json.long").exists)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    threading.Thread(target=end).start()
    assert run(tmp_path, **parts) == 1
    found = written(tmp_path)
    assert (found["a"], found["unfinished"]) == (3, ["long", "never"])
    assert f"ended by {number.name}: long, never did not come to an end" in found["problems"]
    assert signal.getsignal(number) == before


def test_the_report_says_from_the_beginning_what_is_still_to_come(tmp_path: Path) -> None:
    script = part(f"tell({{'then': json.load(open({str(tmp_path / 'reports/soak.json')!r}))['unfinished']}})")
    assert run(tmp_path, one=script, two=part("tell({})")) == 0
    assert written(tmp_path)["then"] == ["one", "two"]


def test_the_real_parts_understand_how_they_are_called_and_nothing_tried_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.soak", "--report", str(tmp_path / "soak.json"), "--only", "crash"]
    done = subprocess.run([*command, "--scenario", "no such"], check=False, capture_output=True, text=True)
    found = json.loads((tmp_path / "soak.json").read_text())
    assert (done.returncode, found["crash_points"], found["unfinished"]) == (1, 0, [])
    assert found["problems"] == ["there is no fault point to try"]
