"""The monitor and the real pynvml over the fake library: events, hangs, and that nobody waits."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent.hardware.machine import with_newest_gpus
from agent.hardware.nvml.library import Nvml, Reading
from agent.hardware.nvml.monitor import GpuMonitor, Times
from agent.model.change import GPUS, Change
from agent.model.device import Gpu
from tests.node import change, node
from tests.nvml.fake import DRIVER_NOT_LOADED, GPU_IS_LOST, UNKNOWN, FakeDriver, FakeGpu, FakeMig, environment
from tests.nvml.peer import DEADLINE, Peer, peer

A = FakeGpu("GPU-aaaa", bus="00000000:1B:00.0")
GPU = Gpu("GPU-a", 0, 0, "0000:1b:00.0", "H100", 1)
B = FakeGpu("GPU-bbbb", bus="00000000:3D:00.0", minor=1)


@pytest.fixture
def driver(tmp_path: Path) -> FakeDriver:
    return FakeDriver(tmp_path / "driver").write()


@pytest.fixture
def monitor(nvml_library: Path, driver: FakeDriver) -> Iterator[Peer]:
    with peer("monitor", environment(nvml_library, driver)) as started:
        yield started


@pytest.fixture
def impatient(nvml_library: Path, driver: FakeDriver) -> Iterator[Peer]:
    """A monitor that says soon that the driver hangs, as a busy machine may make it seem."""
    with peer("impatient", environment(nvml_library, driver)) as started:
        yield started


def ailments(reading: Any) -> dict[str, list[str]]:
    return {gpu["uuid"]: gpu["ailments"] for gpu in reading["gpus"]}


def told(monitor: Peer, driver: FakeDriver, uuid: str, xid: int, *instance: int) -> Any:
    """Send an error until it is told of: the driver keeps none for those who begin to listen later."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        driver.xid(uuid, xid, *instance)
        with contextlib.suppress(queue.Empty):
            while True:
                kind, value = monitor.said.get(timeout=0.2)
                if kind == "event" and value["xid"] == xid:
                    return value
    raise AssertionError(f"nobody told of XID {xid}")


def test_a_driver_whose_events_fail_is_listened_to_again(monitor: Peer, driver: FakeDriver) -> None:
    driver.show(A, B)
    monitor.ask("latest")
    driver.fail(EventSetWait=GPU_IS_LOST)
    answer = monitor.until("latest", lambda r: r["watching"] == 0 and r["unheard"])
    assert answer["unheard"] == ["errors (XIDs) of GPUs are not told: GPU is lost"]
    driver.fail()
    monitor.until("latest", lambda r: not r["unheard"])
    assert told(monitor, driver, "GPU-bbbb", 79)["gpu_uuid"] == "GPU-bbbb"


def test_a_gpu_whose_errors_cannot_be_watched_is_named_until_they_can(monitor: Peer, driver: FakeDriver) -> None:
    driver.fail(DeviceRegisterEvents=UNKNOWN)
    driver.show(A)
    monitor.ask("latest")
    answer = monitor.until("latest", lambda r: r["unheard"])
    assert answer["unheard"] == ["errors (XIDs) of GPU-aaaa are not told: Unknown Error"]
    driver.fail()
    monitor.until("latest", lambda r: not r["unheard"] and r["watching"] == 1)


def test_a_node_without_the_library_has_no_thread_for_it(tmp_path: Path, driver: FakeDriver) -> None:
    with peer("monitor", environment(tmp_path / "nowhere", driver)) as monitor:
        answer = monitor.ask("latest")
        assert (answer["gpus"], answer["problems"], answer["threads"]) == ([], [], 1)


def test_an_error_in_a_slice_names_the_slice_and_one_of_the_gpu_does_not(monitor: Peer, driver: FakeDriver) -> None:
    driver.show(FakeGpu("GPU-aaaa", mig=(FakeMig("MIG-7", 7), FakeMig("MIG-8", 8))), B)
    monitor.ask("latest")
    assert told(monitor, driver, "GPU-aaaa", 48, 8, 0)["mig_uuid"] == "MIG-8"
    event = told(monitor, driver, "GPU-aaaa", 62, 9, 0)
    assert (event["gpu_uuid"], event["mig_uuid"]) == ("GPU-aaaa", "")


def test_an_error_whose_gpu_cannot_be_told_names_none(monitor: Peer, driver: FakeDriver) -> None:
    driver.show(A, B)
    monitor.ask("latest")
    event = told(monitor, driver, "GPU-unheard-of", 79)
    assert (event["gpu_uuid"], event["mig_uuid"]) == ("", "")
    assert ailments(monitor.ask("latest")) == {"GPU-aaaa": [], "GPU-bbbb": []}


def test_a_gpu_that_is_lost_is_found_and_comes_back_with_events(monitor: Peer, driver: FakeDriver) -> None:
    driver.show(A, B)
    monitor.ask("latest")
    driver.change("GPU-aaaa", error=GPU_IS_LOST)
    monitor.until("latest", lambda r: ailments(r)["GPU-aaaa"] == ["GpuLost"])
    monitor.hear("changed")
    driver.change("GPU-aaaa", error=0)
    monitor.until("latest", lambda r: ailments(r)["GPU-aaaa"] == [] and r["gpus"][0]["enumeration"] == 1)
    assert told(monitor, driver, "GPU-aaaa", 48)["enumeration"] == 1


def test_the_other_gpus_are_watched_while_one_is_lost(nvml_library: Path, driver: FakeDriver) -> None:
    driver.show(A, B)
    with peer("patient", environment(nvml_library, driver)) as monitor:
        monitor.ask("latest")
        driver.change("GPU-aaaa", error=GPU_IS_LOST)
        monitor.ask("pci", action="change", address="0000:1b:00.0")  # so that the library is opened anew
        monitor.until("latest", lambda r: r["session"] == 2)
        assert told(monitor, driver, "GPU-bbbb", 48)["gpu_uuid"] == "GPU-bbbb"


@pytest.mark.parametrize("call", ["DeviceGetCount", "DeviceGetUUID", "DeviceGetFieldValues"])
def test_a_driver_that_hangs_keeps_nobody_waiting_and_the_gpus_as_they_were(
    impatient: Peer, driver: FakeDriver, call: str
) -> None:
    driver.show(A, B)
    impatient.ask("latest")
    driver.hang(call)
    answer = impatient.until("latest", lambda r: r["problems"])
    assert ailments(answer) == {"GPU-aaaa": [], "GPU-bbbb": []}
    assert "does not answer; the GPUs are shown as they were last seen" in answer["problems"][0]["text"]
    impatient.hear("changed", "hangs")
    driver.hang()
    assert impatient.until("latest", lambda r: not r["problems"])["threads"] == answer["threads"]


def test_the_end_comes_though_the_driver_hangs(nvml_library: Path, driver: FakeDriver) -> None:
    driver.show(A)
    with peer("impatient", environment(nvml_library, driver)) as monitor:
        monitor.ask("latest")
        driver.hang("DeviceGetCount", "EventSetWait", "Shutdown")
        monitor.until("latest", lambda r: r["problems"])


def test_a_driver_that_is_loaded_and_bound_is_found_at_once(monitor: Peer, driver: FakeDriver) -> None:
    driver.show(init=DRIVER_NOT_LOADED)
    assert "is not loaded" in monitor.ask("latest")["unavailable"]
    driver.show(A)
    monitor.ask("pci", action="bind", address="0000:1b:00.0")
    assert monitor.until("latest", lambda r: r["gpus"])["gpus"][0]["uuid"] == "GPU-aaaa"


def test_a_gpu_that_is_bound_after_others_is_found_and_watched(monitor: Peer, driver: FakeDriver) -> None:
    driver.show(A)
    monitor.ask("latest")
    told(monitor, driver, "GPU-aaaa", 13)
    driver.show(A, B)  # the library was opened before
    monitor.ask("pci", action="bind", address="0000:3d:00.0")
    monitor.ask("expect", addresses=["0000:1b:00.0", "0000:3d:00.0"])
    monitor.until("latest", lambda r: ailments(r) == {"GPU-aaaa": [], "GPU-bbbb": []})
    assert told(monitor, driver, "GPU-bbbb", 79)["gpu_uuid"] == "GPU-bbbb"


def test_a_pause_lets_go_of_the_driver_and_finds_the_named_gpus_anew(monitor: Peer, driver: FakeDriver) -> None:
    driver.show(A, B)
    monitor.ask("latest")
    told(monitor, driver, "GPU-aaaa", 13)
    assert monitor.ask("pause", seconds=600, addresses=["0000:3d:00.0"]) is True
    answer = monitor.ask("latest")
    assert answer["session"] == 0
    assert list(ailments(answer)) == ["GPU-aaaa", "GPU-bbbb"]
    assert "is let go for a reset" in answer["problems"][0]["text"]
    driver.show(FakeGpu("GPU-new", A.bus), B)  # seen only by a library that nobody had open
    assert monitor.ask("pause", seconds=0, addresses=[]) is True
    answer = monitor.until("latest", lambda r: r["gpus"][0]["uuid"] == "GPU-new")
    assert [(g["uuid"], g["enumeration"]) for g in answer["gpus"]] == [("GPU-new", 0), ("GPU-bbbb", 1)]
    assert told(monitor, driver, "GPU-new", 79)["gpu_uuid"] == "GPU-new"


def test_a_pause_ends_by_itself(monitor: Peer, driver: FakeDriver) -> None:
    driver.show(A)
    monitor.ask("latest")
    monitor.ask("pause", seconds=0.2, addresses=["0000:1b:00.0"])
    assert monitor.until("latest", lambda r: r["gpus"][0]["enumeration"] == 1)["problems"] == []


def test_a_driver_that_hangs_cannot_be_let_go_and_that_is_said(impatient: Peer, driver: FakeDriver) -> None:
    driver.show(A)
    impatient.ask("latest")
    driver.hang("DeviceGetCount")
    impatient.until("latest", lambda r: r["problems"])
    assert impatient.ask("pause", seconds=600, addresses=[]) is False
    driver.hang()
    impatient.until("latest", lambda r: r["session"] == 0)


class Surprising(Nvml):
    """A reader that fails in ways nobody foresaw."""

    reads = 0

    def read(self, *, slow: bool = True, bound: Sequence[str] = (), expected: Collection[str] = ()) -> Reading:
        self.reads += 1
        if self.reads == 2:
            raise TypeError("surprise")
        return Reading((GPU,))

    def close(self) -> None:
        pass


class Attentive(Surprising):
    """A reader that keeps what it is told."""

    def read(self, *, slow: bool = True, bound: Sequence[str] = (), expected: Collection[str] = ()) -> Reading:
        self.expected = set(expected)
        return Reading()


def test_a_scan_tells_where_the_kernel_has_gpus_with_their_driver() -> None:
    reader, snapshot = Attentive(), change(node(rails=3), "0000:24:00.0", driver="vfio-pci")
    with contextlib.closing(GpuMonitor(Times(first=10), reader=reader, is_installed=lambda: True)) as monitor:
        with_newest_gpus(snapshot, monitor)
        assert reader.expected == {"0000:14:00.0", "0000:34:00.0"}


def test_an_error_that_nobody_foresaw_ends_nothing() -> None:
    reader = Surprising()
    monitor = GpuMonitor(Times(quick=3600, apart=0.01, first=10), reader=reader, is_installed=lambda: True)
    changes = queue.Queue[str]()

    def note(what: str, change: Change) -> None:
        assert change == GPUS
        changes.put(what)

    monitor.follow(on_change=note)
    try:
        assert monitor.latest() == Reading((GPU,))
        changes.get(timeout=DEADLINE)
        monitor.disturbed()
        changes.get(timeout=DEADLINE)
        answer = monitor.latest()
        assert answer.gpus == (GPU,)
        assert "TypeError: surprise" in answer.problems[0].text
        monitor.disturbed()
        changes.get(timeout=DEADLINE)
        assert monitor.latest() == Reading((GPU,))
    finally:
        monitor.close()
