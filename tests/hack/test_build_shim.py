"""The relay's build: the same bytes wherever it is made, for both architectures."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import until

ROOT = Path(__file__).parents[2]
MACHINES = {"amd64": "Advanced Micro Devices X86-64", "arm64": "AArch64"}


def build(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / "hack/build-shim", *arguments],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """What the build needs of a checkout, in another place."""
    for folder in ("cni/shim", "hack"):
        (tmp_path / folder).mkdir(parents=True)
    for path in [*(ROOT / "cni/shim").iterdir(), ROOT / "hack/build-shim", ROOT / "hack/progress"]:
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    return tmp_path


@pytest.mark.parametrize("architecture", MACHINES)
def test_two_places_make_the_same_program(elsewhere: Path, architecture: str) -> None:
    here, there = build(ROOT, architecture), build(elsewhere, architecture)
    assert (here.returncode, there.returncode) == (0, 0), here.stderr + there.stderr
    program = Path("build/shim", architecture, "nodefabric-cni")
    assert (elsewhere / program).read_bytes() == (ROOT / program).read_bytes()
    header = subprocess.run(["readelf", "-h", ROOT / program], capture_output=True, text=True, check=True).stdout
    assert MACHINES[architecture] in header


@pytest.mark.parametrize("architecture", MACHINES)
def test_the_program_needs_no_interpreter_and_may_stand_anywhere_in_memory(architecture: str) -> None:
    assert build(ROOT, architecture).returncode == 0
    program = ROOT / "build/shim" / architecture / "nodefabric-cni"
    told = subprocess.run(["readelf", "-hlWd", program], capture_output=True, text=True, check=True).stdout
    assert re.search(r"^ +Type: +DYN ", told, re.MULTILINE)
    flags = dict(re.findall(r"^  (\w+) +0x.* 0x\w+ ([R ][W ][E ]) \w+$", told, re.MULTILINE))
    assert "INTERP" not in flags
    assert flags["GNU_STACK"] == "RW "
    assert flags["GNU_RELRO"] == "R  "
    assert re.search(r"\(FLAGS_1\) .*\bNOW\b.*\bPIE\b", told)  # nothing is left to be resolved, and so writable, later


def test_what_was_relocated_at_the_start_is_read_only_while_it_runs() -> None:
    assert build(ROOT, "native").returncode == 0
    program = ROOT / "build/shim/native/nodefabric-cni"
    with subprocess.Popen(
        [program], env={"CNI_COMMAND": "ADD"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as relay:
        # The program's own parts, in order: headers and constants, code, what was relocated, variables.
        until(lambda: mapped(relay.pid, program) == ["r--p", "r-xp", "r--p", "rw-p"])
        relay.communicate(b"")


def mapped(pid: int, program: Path) -> list[str]:
    """List the rights of what a process has mapped of its program, by address."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return [line[1] for line in lines if line[-1] == str(program.resolve())]
