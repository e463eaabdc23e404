"""Programs that run at once have the memory that the container's limit leaves beside the agent."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from cni.ipam.program import AGENT_BYTES, EXPECTED_BYTES, YOUNG_SECONDS, Room, memory_limit
from cni.turns import NoPlace
from tests.waiting import until

MIB = 1 << 20
CHART_LIMIT = 256 * MIB


def made(folder: Path, cgroup: str, **files: str) -> Path:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = folder / "sys/fs/cgroup" / name.replace("__", "/").replace("memory_", "memory.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_the_limit_of_a_container_is_read(tmp_path: Path) -> None:
    assert memory_limit(made(tmp_path, "0::/\n", memory_max=f"{CHART_LIMIT}\n")) == CHART_LIMIT


def test_the_limit_of_an_older_container_is_read_though_it_has_the_hosts_path(tmp_path: Path) -> None:
    cgroup = "5:cpu:/kubepods/x\n4:memory:/kubepods/x\n0::/\n"
    folder = made(tmp_path, cgroup, memory__memory_limit_in_bytes=f"{CHART_LIMIT}\n")
    assert memory_limit(folder) == CHART_LIMIT


def test_the_limit_of_a_service_is_that_of_its_own_group(tmp_path: Path) -> None:
    cgroup = "0::/system.slice/nodefabric.service\n"
    folder = made(tmp_path, cgroup)
    own = folder / "sys/fs/cgroup/system.slice/nodefabric.service"
    own.mkdir(parents=True)
    (own / "memory.max").write_text(f"{CHART_LIMIT}\n")
    assert memory_limit(folder) == CHART_LIMIT


@pytest.mark.parametrize("text", ["max\n", "9223372036854771712\n"])
def test_no_limit_is_none(tmp_path: Path, text: str) -> None:
    assert memory_limit(made(tmp_path, "0::/\n", memory_max=text)) is None


def test_where_nothing_can_be_read_there_is_no_limit(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None


def test_as_many_begin_at_once_as_fit_beside_the_agent(tmp_path: Path) -> None:
    """Four of 45 MiB came to 247 of 256 MiB with the agent."""
    room = Room.of_container(made(tmp_path, "0::/\n", memory_max=f"{CHART_LIMIT}\n"))
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(room.place(0))
        with pytest.raises(NoPlace, match="raise the agent's limit"):
            stack.enter_context(room.place(0.01))
    with room.place(0):
        pass


def test_one_finds_room_beside_an_agent_with_a_low_limit(tmp_path: Path) -> None:
    room = Room.of_container(made(tmp_path, "0::/\n", memory_max=f"{AGENT_BYTES}\n"))
    with room.place(0), pytest.raises(NoPlace), room.place(0):
        pass


def test_who_waits_begins_when_another_ends() -> None:
    room = Room(EXPECTED_BYTES)
    begun = threading.Event()

    def next_one() -> None:
        with room.place(30):
            begun.set()

    with room.place(0):
        thread = threading.Thread(target=next_one)
        thread.start()
        assert not begun.wait(0.1)
    thread.join()
    assert begun.is_set()


def test_those_that_hang_are_counted_as_what_they_take() -> None:
    """Else a few that wait for a lock would keep every other network's from its work."""
    now = [0.0]
    room = Room(3 * EXPECTED_BYTES, clock=lambda: now[0])
    with ExitStack() as stack:
        places = [stack.enter_context(room.place(0)) for _ in range(3)]
        now[0] = YOUNG_SECONDS
        begun = threading.Event()

        def next_one() -> None:
            with room.place(30):
                begun.set()

        thread = threading.Thread(target=next_one)
        thread.start()
        assert all(place.allows(4 * MIB) for place in places)
        until(begun.is_set)
        thread.join()


def test_two_that_wait_for_the_api_server_leave_room_for_another_networks() -> None:
    now = [0.0]
    room = Room(CHART_LIMIT - AGENT_BYTES, clock=lambda: now[0])
    with room.place(0) as first, room.place(0) as second:
        now[0] = YOUNG_SECONDS
        assert first.allows(45 * MIB)
        assert second.allows(45 * MIB)
        with room.place(0):
            pass


def test_one_may_take_more_than_most_where_nobody_else_needs_it() -> None:
    room = Room(3 * EXPECTED_BYTES)
    with room.place(0) as first:
        assert first.allows(2 * EXPECTED_BYTES)
        assert not first.allows(3 * EXPECTED_BYTES + 1)
        assert first.allows(2 * EXPECTED_BYTES)
        with room.place(0) as second:
            assert second.allows(EXPECTED_BYTES)
            assert not second.allows(EXPECTED_BYTES + 1)


def test_without_a_limit_each_is_bounded_alone() -> None:
    room = Room()
    with ExitStack() as stack:
        places = [stack.enter_context(room.place(0)) for _ in range(50)]
        assert all(place.allows(150 * MIB) for place in places)
        assert not places[0].allows(200 * MIB)
