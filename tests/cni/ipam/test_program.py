"""What a program may take, and that nothing of it is left, wherever its processes went."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from cni.ipam import processes, program
from cni.ipam.program import Around, OutOfBounds, OutOfTime
from tests.waiting import until

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {"PATH": os.defpath}
Write = Callable[..., Path]


@pytest.fixture
def script(tmp_path: Path) -> Write:
    """Write a program."""

    def write(text: str, interpreter: str = "/bin/sh") -> Path:
        file = tmp_path / "program"
        file.write_text(f"#!{interpreter}\n{textwrap.dedent(text)}")
        file.chmod(0o755)
        return file

    return write


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


def noted(file: Path) -> list[int]:
    return [int(word) for word in file.read_text().split()] if file.exists() else []


DAEMON = """
import os, time
for _ in range(2):
    if os.fork():
        os._exit(0)
    os.setsid()
os.closerange(0, 100)
with open(os.environ["NOTES"], "a") as file:
    file.write(f"{os.getpid()}\\n")
while True:
    time.sleep(1)
"""


def daemonising(folder: Path) -> str:
    """Start a daemon, and wait until it has noted its number."""
    notes = folder / "pids"
    return f"NOTES={notes} {sys.executable} -c '{DAEMON}'; while [ ! -s {notes} ]; do sleep 0.01; done\n"


def test_a_daemon_of_another_session_and_parent_is_killed_after_its_program(script: Write, tmp_path: Path) -> None:
    file = script(daemonising(tmp_path) + "echo done")
    done = program.run(file, b"", ENVIRONMENT, 30.0)
    assert (done.status, done.stdout, done.left) == (0, b"done\n", 1)
    (daemon,) = noted(tmp_path / "pids")
    until(lambda: not lives(daemon))


def test_a_daemon_is_killed_when_its_program_hangs(script: Write, tmp_path: Path) -> None:
    file = script(daemonising(tmp_path) + "sleep 1000")
    with pytest.raises(OutOfTime):
        program.run(file, b"", ENVIRONMENT, 3.0)
    (daemon,) = noted(tmp_path / "pids")
    until(lambda: not lives(daemon))


def test_who_forgets_its_environment_is_found_by_where_it_was_seen_before(script: Write, tmp_path: Path) -> None:
    file = script(
        f"""
        setsid env -i /bin/sh -c 'echo $$ >{tmp_path}/pids; exec sleep 1000' &
        while [ ! -s {tmp_path}/pids ]; do sleep 0.01; done
        sleep 0.5
        """
    )
    assert program.run(file, b"", ENVIRONMENT, 30.0).left == 1
    (daemon,) = noted(tmp_path / "pids")
    until(lambda: not lives(daemon))


def test_other_programs_and_their_children_are_left_alone(script: Write, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as bystander:
        program.run(script(f"setsid sleep 1000 & echo $! >{tmp_path}/pids"), b"", ENVIRONMENT, 30.0)
        assert bystander.poll() is None
        bystander.kill()


def test_a_program_that_forks_without_end_is_killed_with_all_of_it(script: Write, tmp_path: Path) -> None:
    """Nobody waits for anybody, in sessions of their own. It stops by itself after 300 processes."""
    file = script(
        """
        import os, sys, time
        place = os.path.dirname(os.path.abspath(sys.argv[0]))
        for number in range(300):
            if os.fork() == 0:
                os.setsid()
                with open(f"{place}/pids", "a") as file:
                    file.write(f"{os.getpid()}\\n")
                time.sleep(60)
            time.sleep(0.002)
        """,
        sys.executable,
    )
    with pytest.raises(OutOfBounds, match=r"ran \d+ processes at once, and 32 are allowed"):
        program.run(file, b"", ENVIRONMENT, 60.0)
    pids = noted(tmp_path / "pids")
    assert len(pids) < 300
    until(lambda: not any(map(lives, pids)))


TAKES = """
import time
taken = []
for _ in range({megabytes}):
    taken.append(b"x" * (1 << 20))
    time.sleep({pause})
print("done")
"""


def test_a_program_that_takes_too_much_memory_is_killed(script: Write) -> None:
    with pytest.raises(OutOfBounds, match=r"took \d+ MiB of memory, more than there is for it"):
        program.run(script(TAKES.format(megabytes=400, pause=0.002), sys.executable), b"", ENVIRONMENT, 60.0)


def test_what_its_processes_take_is_counted_together(script: Write, tmp_path: Path) -> None:
    (tmp_path / "one").write_text(TAKES.format(megabytes=60, pause=0) + "time.sleep(60)")
    line = f"{sys.executable} {tmp_path}/one &\n"
    with pytest.raises(OutOfBounds, match="MiB of memory"):
        program.run(script(line * 4 + "wait"), b"", ENVIRONMENT, 60.0)


def test_the_kernel_refuses_what_is_taken_between_two_looks(script: Write) -> None:
    done = program.run(script("x = bytearray(600 << 20)", sys.executable), b"", ENVIRONMENT, 60.0)
    assert done.status != 0
    assert b"MemoryError" in done.stderr


def test_a_program_is_the_first_to_go_where_memory_runs_out(script: Write) -> None:
    file = script("sleep 0.2; cat /proc/self/oom_score_adj")
    assert program.run(file, b"", ENVIRONMENT, 30.0).stdout == b"1000\n"


def test_who_runs_a_program_says_what_it_may_take(script: Write) -> None:
    asked: list[int] = []

    def allows(taken: int) -> bool:
        asked.append(taken)
        return len(asked) < 3

    with pytest.raises(OutOfBounds):
        program.run(script("sleep 1000"), b"", ENVIRONMENT, 30.0, Around(allows=allows))
    assert len(asked) == 3
    assert all(0 < taken < 10 << 20 for taken in asked)


REAPS = """
import ctypes, os, sys
from pathlib import Path
from cni.ipam import program
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: as the first process of a container
done = program.run(Path(sys.argv[1]), b"", {"PATH": os.defpath}, 30.0)
print(done.left, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
"""


def test_the_first_process_of_a_container_keeps_no_dead_ones(script: Write, tmp_path: Path) -> None:
    file = script("sleep 0 & sleep 1000 & setsid sleep 1000 & sleep 0.1")
    command = [sys.executable, "-c", REAPS, str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "2 []\n"


def test_programs_that_outlived_who_started_them_are_found_by_their_mark(script: Write, tmp_path: Path) -> None:
    file = script(f"setsid sleep 1000 & echo $! >{tmp_path}/pids; echo $$ >>{tmp_path}/pids; sleep 1000")
    marks = {mark: {**ENVIRONMENT, processes.VARIABLE: f"{mark}:1"} for mark in ("ours", "ours-not")}
    with (
        subprocess.Popen([file], env=marks["ours"]) as mine,
        subprocess.Popen(["sleep", "9"], env=marks["ours-not"]) as o,
    ):
        until(lambda: len(noted(tmp_path / "pids")) == 2)
        assert processes.end_marked("ours:") >= 2
        assert mine.wait(30) != 0
        assert o.poll() is None
        o.kill()
    until(lambda: not any(map(lives, noted(tmp_path / "pids"))))
