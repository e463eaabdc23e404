"""What a program may take, and that nothing of it is left, wherever its processes went."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from cni.call_limits import NoTurn, NotWanted
from cni.ipam import program
from cni.ipam.program import (
    AGENT_BYTES,
    EXPECTED_BYTES,
    NO_LIMIT,
    YOUNG_SECONDS,
    Bounds,
    OutOfBounds,
    Room,
    memory_limit,
)
from tests.cni.desk import lives
from tests.waiting import until

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {"PATH": os.defpath}
MIB = 1 << 20
CHART_LIMIT = 256 * MIB
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


def noted(folder: Path) -> list[int]:
    file = folder / "pids"
    return [int(word) for word in file.read_text().split()] if file.exists() else []


@pytest.mark.parametrize("ends", [True, False])
def test_a_daemon_of_another_session_and_parent_is_killed_with_its_program(
    script: Write, tmp_path: Path, ends: bool
) -> None:
    daemon = f"(setsid sh -c 'echo $$ >{tmp_path}/pids; exec sleep 1000' >&- 2>&- &)"
    start = f"{daemon}; while [ ! -s {tmp_path}/pids ]; do sleep 0.01; done"
    if ends:
        done = program.run(script(f"{start}\necho done"), b"", ENVIRONMENT, 30.0)
        assert (done.status, done.stdout, done.left) == (0, b"done\n", 1)
    else:
        with pytest.raises(OutOfBounds, match="did not end within 3 s"):
            program.run(script(f"{start}\nsleep 1000"), b"", ENVIRONMENT, 3.0)
    (number,) = noted(tmp_path)
    until(lambda: not lives(number))


def test_a_child_with_another_environment_and_session_is_counted_and_ended(script: Write, tmp_path: Path) -> None:
    file = script(
        f"""
        setsid env -i /bin/sh -c 'echo $$ >{tmp_path}/pids; exec sleep 1000' &
        while [ ! -s {tmp_path}/pids ]; do sleep 0.01; done
        sleep 0.5
        """
    )
    assert program.run(file, b"", ENVIRONMENT, 30.0).left == 1
    daemon = int((tmp_path / "pids").read_text())
    until(lambda: not lives(daemon))
    file = script("for _ in $(seq 60); do env -i /bin/sleep 20 & done; sleep 20")
    with pytest.raises(program.OutOfBounds, match="processes at once"):
        program.run(file, b"", ENVIRONMENT, 30.0)


def test_other_programs_and_their_children_are_left_alone(script: Write, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as bystander:
        program.run(script(f"setsid sleep 1000 & echo $! >{tmp_path}/pids"), b"", ENVIRONMENT, 30.0)
        assert bystander.poll() is None
        bystander.kill()


FORKS = """
import os, sys, time
for number in range(300):
    if os.fork() == 0:
        os.setsid()
        with open(f"{os.path.dirname(os.path.abspath(sys.argv[0]))}/pids", "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(60)
    time.sleep(0.002)
"""
CALLS_ITSELF = """
n=${DEPTH:-0}; echo $$ >>$(dirname $0)/pids; [ $n -ge 300 ] && exec sleep 100
DEPTH=$((n + 1)) setsid --wait $0
"""
TAKES = """
import os, sys, time
if "four" in sys.argv[0]:
    os.fork(), os.fork()
taken = []
for _ in range(400):
    taken.append(b"x" * (1 << 20))
    time.sleep(0.002)
"""


@pytest.mark.parametrize(
    ("text", "interpreter", "wrong"),
    [
        pytest.param(FORKS, sys.executable, r"ran \d+ processes at once, and 32 are allowed", id="forks"),
        pytest.param(CALLS_ITSELF, "/bin/sh", r"ran \d+ processes at once, and 32 are allowed", id="calls itself"),
        pytest.param(TAKES, sys.executable, r"took \d+ MiB of memory, more than there is", id="eats memory"),
        pytest.param(TAKES + "# four", sys.executable, r"took \d+ MiB of memory", id="eats memory in four processes"),
    ],
)
def test_a_program_that_takes_too_much_is_killed_with_all_that_it_started(
    script: Write, tmp_path: Path, text: str, interpreter: str, wrong: str
) -> None:
    """Those of many processes stop by themselves at 300."""
    with pytest.raises(OutOfBounds, match=wrong):
        program.run(script(text, interpreter), b"", ENVIRONMENT, 60.0)
    assert len(noted(tmp_path)) < 300
    until(lambda: not any(map(lives, noted(tmp_path))))


def test_the_kernel_refuses_what_is_taken_between_two_looks(script: Write) -> None:
    done = program.run(script("x = bytearray(600 << 20)", sys.executable), b"", ENVIRONMENT, 60.0)
    assert done.status != 0
    assert b"MemoryError" in done.stderr


def test_a_program_is_the_first_to_go_where_memory_runs_out(script: Write) -> None:
    file = script("sleep 0.2; cat /proc/self/oom_score_adj")
    assert program.run(file, b"", ENVIRONMENT, 30.0).stdout == b"1000\n"


def test_a_program_is_killed_when_it_may_not_take_what_it_has_or_nobody_waits_any_more(script: Write) -> None:
    asked: list[int] = []

    def allows(taken: int) -> bool:
        asked.append(taken)
        return len(asked) < 3

    with pytest.raises(OutOfBounds):
        program.run(script("sleep 1000"), b"", ENVIRONMENT, 30.0, Bounds(allows=allows))
    assert len(asked) == 3
    assert all(0 < taken < 10 * MIB for taken in asked)
    with pytest.raises(NotWanted):
        program.run(script("sleep 1000"), b"", ENVIRONMENT, 30.0, Bounds(is_wanted=lambda: False))


REAPS = """
import ctypes, os, sys
from pathlib import Path
from cni.ipam import program
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: as the first process of a container
done = program.run(Path(sys.argv[1]), b"", {"PATH": os.defpath}, 30.0)
print(done.left, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
"""


def test_the_first_process_of_a_container_keeps_no_dead_ones(script: Write) -> None:
    file = script("sleep 0 & sleep 1000 & setsid sleep 1000 & sleep 0.1")
    command = [sys.executable, "-c", REAPS, str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "2 []\n"


# ------------------------------------------------------------ the memory of all programs


def container(folder: Path, cgroup: str, **limits: str) -> Path:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(cgroup)
    for name, text in limits.items():
        path = folder / "sys/fs/cgroup" / name.replace("_", "/") / "memory.max"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected"),
    [
        pytest.param("0::/\n", {"": f"{CHART_LIMIT}\n"}, CHART_LIMIT, id="container"),
        pytest.param("0::/kubepods/x\n", {"": f"{CHART_LIMIT}\n"}, CHART_LIMIT, id="container with the host's path"),
        pytest.param("0::/system/nodefabric\n", {"system_nodefabric": "5\n"}, 5, id="service"),
        pytest.param("0::/\n", {"": "max\n"}, NO_LIMIT, id="no limit"),
        pytest.param("4:memory:/x\n", {}, NO_LIMIT, id="cgroup v1"),
    ],
)
def test_the_limit_of_the_own_control_group_is_read(
    tmp_path: Path, cgroup: str, limits: dict[str, str], expected: int
) -> None:
    assert memory_limit(container(tmp_path, cgroup, **limits)) == expected


def test_as_many_begin_at_once_as_fit_beside_the_agent_and_one_in_any_case(tmp_path: Path) -> None:
    """Four of 45 MiB came to 247 of 256 MiB with the agent."""
    for limit, fit in ((CHART_LIMIT, 3), (AGENT_BYTES, 1)):
        room = Room.of_container(container(tmp_path / str(fit), "0::/\n", **{"": f"{limit}\n"}))
        with ExitStack() as stack:
            for _ in range(fit):
                stack.enter_context(room.place(0))
            with pytest.raises(NoTurn, match="raise the agent's limit"):
                stack.enter_context(room.place(0.01))
        with room.place(0):
            pass


@pytest.mark.parametrize("how", ["another ends", "those at work take little"])
def test_a_program_that_waits_for_room_begins_when(how: str) -> None:
    """Else a few that wait for a lock would keep every other network's from its work."""
    now, begun = [0.0], threading.Event()
    room = Room(2 * EXPECTED_BYTES, clock=lambda: now[0])

    def next_one() -> None:
        with room.place(30):
            begun.set()

    with room.place(0) as first, ExitStack() as second:
        allows = second.enter_context(room.place(0))
        thread = threading.Thread(target=next_one)
        thread.start()
        assert not begun.wait(0.1)
        if how == "another ends":
            second.close()
        else:
            now[0] = YOUNG_SECONDS
            assert first(4 * MIB)
            assert allows(4 * MIB)
        thread.join()
    assert begun.is_set()


def test_one_may_take_more_than_most_where_nobody_else_needs_it() -> None:
    room = Room(3 * EXPECTED_BYTES)
    with room.place(0) as first:
        assert first(2 * EXPECTED_BYTES)
        assert not first(3 * EXPECTED_BYTES + 1)
        assert first(2 * EXPECTED_BYTES)
        with room.place(0) as second:
            assert second(EXPECTED_BYTES)
            assert not second(EXPECTED_BYTES + 1)
