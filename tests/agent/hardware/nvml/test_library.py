"""The real pynvml, in a process of its own, over a small library in place of the driver's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.hardware.nvml.gpu_facts import kernel_address
from tests.nvml.fake import (
    GPU_IS_LOST,
    RESET_REQUIRED,
    SWITCH,
    UNKNOWN,
    VERSION_MISMATCH,
    FakeDriver,
    FakeGpu,
    FakeMig,
    environment,
)
from tests.nvml.peer import Peer, peer

A = FakeGpu("GPU-aaaa", bus="00000000:1B:00.0")
B = FakeGpu("GPU-bbbb", bus="00000000:3D:00.0", minor=1)
C = FakeGpu("GPU-cccc", bus="00000000:4E:00.0", minor=2)


@pytest.fixture
def driver(tmp_path: Path) -> FakeDriver:
    return FakeDriver(tmp_path / "driver").write()


@pytest.fixture
def nvml(nvml_library: Path, driver: FakeDriver) -> Iterator[Peer]:
    with peer("nvml", environment(nvml_library, driver)) as started:
        yield started


def read(nvml: Peer, **options: Any) -> dict[str, dict[str, Any]]:
    return {gpu["uuid"]: gpu for gpu in nvml.ask("read", **options)["gpus"]}


def ailments(nvml: Peer, **options: Any) -> dict[str, list[str]]:
    return {uuid: gpu["ailments"] for uuid, gpu in read(nvml, **options).items()}


def test_gpus_are_read_with_addresses_in_the_kernels_spelling(nvml: Peer, driver: FakeDriver) -> None:
    driver.show(A, B)
    answer = nvml.ask("read")
    assert answer["gpus"][0] == {
        "uuid": "GPU-aaaa",
        "index": 0,
        "minor": 0,
        "pci_address": "0000:1b:00.0",
        "name": "NVIDIA H100 80GB HBM3",
        "memory_bytes": 85520809984,
        "nvlinks": [],
        "fabric_clique": "",
        "mig_mode": False,
        "mig_devices": [],
        "ailments": [],
        "enumeration": 0,
        "names": [],
    }
    assert (answer["gpus"][1]["index"], answer["gpus"][1]["pci_address"]) == (1, "0000:3d:00.0")
    assert (answer["problems"], answer["unavailable"]) == ([], "")


def test_no_library_is_normal_and_loads_nothing(tmp_path: Path, driver: FakeDriver) -> None:
    with peer("nvml", environment(tmp_path / "library", driver)) as nvml:
        answer = nvml.ask("read")
    assert (answer["gpus"], answer["problems"], answer["loaded"]) == ([], [], False)
    assert "libnvidia-ml.so.1 is not on this node" in answer["unavailable"]


def test_a_replaced_driver_is_told_with_its_remedy_and_the_gpus_stay_as_they_were(
    nvml: Peer, driver: FakeDriver
) -> None:
    driver.show(A, B)
    before = nvml.ask("read")["gpus"]
    driver.show(A, B, init=VERSION_MISMATCH).fail(DeviceGetCount=VERSION_MISMATCH)
    answer = nvml.ask("read")
    assert answer["gpus"] == before
    assert "restart the agent's pod" in answer["problems"][0]["text"]
    driver.fail()
    driver.show(A, B)
    assert nvml.ask("read")["problems"] == []


def test_a_lost_gpu_hides_no_other_stays_as_lost_and_returns_anew(nvml: Peer, driver: FakeDriver) -> None:
    driver.show(A, B)
    assert ailments(nvml) == {"GPU-aaaa": [], "GPU-bbbb": []}
    driver.change("GPU-aaaa", error=GPU_IS_LOST)
    answer = nvml.ask("read")
    assert {g["uuid"]: g["ailments"] for g in answer["gpus"]} == {"GPU-aaaa": ["GpuLost"], "GPU-bbbb": []}
    assert [p["path"] for p in answer["problems"]] == ["nvml/gpu0"]
    driver.change("GPU-aaaa", error=0)
    found = read(nvml)
    assert [(g["ailments"], g["enumeration"]) for g in found.values()] == [([], 1), ([], 0)]


def test_a_gpu_that_is_listed_no_more_is_lost_and_one_in_its_place_replaces_it(nvml: Peer, driver: FakeDriver) -> None:
    driver.show(A, B)
    nvml.ask("read")
    driver.show(B)
    nvml.ask("read")  # the library was opened before
    assert ailments(nvml) == {"GPU-aaaa": ["GpuLost"], "GPU-bbbb": []}
    driver.show(FakeGpu("GPU-new", bus=A.bus), B)
    nvml.ask("close")
    assert ailments(nvml) == {"GPU-new": [], "GPU-bbbb": []}


def test_who_is_lost_is_told_from_who_cannot_be_read_though_their_numbers_have_changed(
    nvml: Peer, driver: FakeDriver
) -> None:
    driver.show(A, B, C)
    read(nvml)
    nvml.ask("close")
    driver.show(B, C).change("GPU-bbbb", error=UNKNOWN)
    assert ailments(nvml) == {"GPU-aaaa": ["GpuLost"], "GPU-bbbb": [], "GPU-cccc": []}


def test_a_gpu_that_is_new_and_cannot_be_read_does_not_open_the_library_again_and_again(
    nvml: Peer, driver: FakeDriver
) -> None:
    driver.show(A, B).fail(DeviceGetTotalEccErrors=UNKNOWN)
    assert nvml.ask("read", slow=True)["session"] == 0  # an old view of the library may be why
    opened = nvml.ask("read", slow=False)["session"]
    assert opened
    assert nvml.ask("read", slow=False)["session"] == opened
    driver.fail()
    assert ailments(nvml) == {"GPU-aaaa": [], "GPU-bbbb": []}


def test_a_gpu_that_the_library_hides_does_not_open_it_again_and_again(nvml: Peer, driver: FakeDriver) -> None:
    driver.show(A)
    both = ["0000:1b:00.0", "0000:3d:00.0"]
    assert nvml.ask("read", slow=True, expected=both)["session"] == 0
    opened = nvml.ask("read", slow=True, expected=both)["session"]
    assert opened
    assert nvml.ask("read", slow=True, expected=both)["session"] == opened
    assert nvml.ask("read", slow=True, expected=both, bound=["0000:3d:00.0"])["session"] == 0


def test_a_gpu_that_must_be_reset_says_so(nvml: Peer, driver: FakeDriver) -> None:
    driver.show(A, B)
    nvml.ask("read")
    driver.change("GPU-aaaa", error=RESET_REQUIRED)
    driver.change("GPU-bbbb", recovery=1)
    assert ailments(nvml) == {"GPU-aaaa": ["ResetRequired"], "GPU-bbbb": ["ResetRequired"]}
    driver.show(A, B)
    assert {u: (g["ailments"], g["enumeration"]) for u, g in read(nvml).items()} == {
        "GPU-aaaa": ([], 1),
        "GPU-bbbb": ([], 1),
    }


def test_a_driver_bound_anew_and_counters_that_fell_show_a_reset(nvml: Peer, driver: FakeDriver) -> None:
    driver.show(FakeGpu("GPU-aaaa", ecc=2), B)
    assert [g["enumeration"] for g in read(nvml).values()] == [0, 0]
    driver.show(FakeGpu("GPU-aaaa", ecc=0), B)
    assert [g["enumeration"] for g in read(nvml, bound=["0000:3d:00.0"]).values()] == [1, 1]


def test_a_gpu_bound_anew_is_found_anew_by_the_first_reading_that_succeeds(nvml: Peer, driver: FakeDriver) -> None:
    driver.show(A, B)
    assert [g["enumeration"] for g in read(nvml).values()] == [0, 0]
    driver.change("GPU-aaaa", error=UNKNOWN)
    read(nvml, bound=["0000:1b:00.0"])  # it takes its time after a reset
    nvml.ask("close")
    driver.show(A, B, init=UNKNOWN)
    read(nvml, bound=["0000:3d:00.0"])
    driver.show(A, B)
    assert [[g["enumeration"] for g in read(nvml).values()] for _ in range(2)] == [[1, 1], [1, 1]]


def test_memory_errors_are_told_by_what_the_gpu_can_do_about_them(nvml: Peer, driver: FakeDriver) -> None:
    driver.show(
        FakeGpu("GPU-contains", ecc=3),
        FakeGpu("GPU-cannot", bus=B.bus, ecc=3, rows="-"),
        FakeGpu("GPU-retires", bus=C.bus, rows="-pending"),
        FakeGpu("GPU-pending", bus="00000000:5E:00.0", rows="1,0"),
        FakeGpu("GPU-failed", bus="00000000:6E:00.0", rows="0,1", corrupt=True),
    )
    assert ailments(nvml) == {
        "GPU-contains": [],
        "GPU-cannot": ["EccUncorrectable"],
        "GPU-retires": ["PageRetirementPending"],
        "GPU-pending": ["RowRemapPending"],
        "GPU-failed": ["RowRemapFailed", "InforomCorrupted"],
    }


def test_a_gpu_that_has_slices_and_so_tells_of_no_rows_has_the_ailments_that_it_had(
    nvml: Peer, driver: FakeDriver
) -> None:
    driver.show(
        FakeGpu("GPU-aaaa", ecc=3, rows="1,1", mig=()), FakeGpu("GPU-bbbb", bus=B.bus, mig=(FakeMig("MIG-2", 7),))
    )
    assert ailments(nvml) == {"GPU-aaaa": ["RowRemapFailed", "RowRemapPending"], "GPU-bbbb": []}
    driver.change("GPU-aaaa", mig=(FakeMig("MIG-1", 7),)).change("GPU-bbbb", ecc=1)  # which it can contain
    found = read(nvml)
    assert {uuid: gpu["ailments"] for uuid, gpu in found.items()} == {
        "GPU-aaaa": ["RowRemapFailed", "RowRemapPending"],
        "GPU-bbbb": [],
    }
    assert [gpu["enumeration"] for gpu in found.values()] == [0, 0]
    driver.change("GPU-aaaa", mig=None, rows="0,1")
    assert [(g["ailments"], g["enumeration"]) for g in read(nvml).values()] == [(["RowRemapFailed"], 1), ([], 0)]


def test_a_reset_ends_what_waits_for_one_though_slices_were_made_before_the_next_reading(
    nvml: Peer, driver: FakeDriver
) -> None:
    driver.show(FakeGpu("GPU-aaaa", rows="1,1", mig=()))
    assert ailments(nvml) == {"GPU-aaaa": ["RowRemapFailed", "RowRemapPending"]}
    driver.change("GPU-aaaa", rows="0,1", mig=(FakeMig("MIG-1", 7),))
    found = read(nvml, bound=["0000:1b:00.0"])["GPU-aaaa"]
    assert (found["ailments"], found["enumeration"]) == (["RowRemapFailed"], 1)
    assert ailments(nvml) == {"GPU-aaaa": ["RowRemapFailed"]}


def test_one_hot_moment_is_no_ailment_and_lasting_heat_is(nvml: Peer, driver: FakeDriver) -> None:
    driver.show(FakeGpu("GPU-aaaa", hot=True))
    seen = [ailments(nvml, slow=False)["GPU-aaaa"] for _ in range(3)]
    driver.change("GPU-aaaa", hot=False)
    assert [*seen, ailments(nvml)["GPU-aaaa"]] == [[], [], ["ThermalSlowdown"], []]


def test_slices_are_listed_with_their_profiles(nvml: Peer, driver: FakeDriver) -> None:
    small = FakeMig("MIG-1", gpu_instance=7)
    unnamed = FakeMig("MIG-2", 2, megabytes=40448, of_gpu=3, of_compute=2, name="NVIDIA H100 80GB HBM3")
    driver.show(FakeGpu("GPU-aaaa", mig=(small, unnamed)), FakeGpu("GPU-bbbb", bus=B.bus, mig=()), C)
    found = read(nvml)
    assert [
        (m["uuid"], m["profile"], m["gpu_instance"], m["compute_instance"]) for m in found["GPU-aaaa"]["mig_devices"]
    ] == [("MIG-2", "2c.3g.40gb", 2, 0), ("MIG-1", "1g.10gb", 7, 0)]
    assert [g["mig_mode"] for g in found.values()] == [True, True, False]
    assert found["GPU-aaaa"]["mig_devices"][1]["memory_bytes"] == 9728 << 20


def test_links_are_counted_directly_and_through_switches(nvml: Peer, driver: FakeDriver) -> None:
    driver.show(
        FakeGpu("GPU-aaaa", A.bus, links=(B.bus, B.bus, C.bus)),
        FakeGpu("GPU-bbbb", B.bus, links=(A.bus, A.bus)),
        FakeGpu("GPU-cccc", C.bus, links=(A.bus,)),
    )
    assert {u: g["nvlinks"] for u, g in read(nvml).items()} == {
        "GPU-aaaa": [["GPU-bbbb", 2], ["GPU-cccc", 1]],
        "GPU-bbbb": [["GPU-aaaa", 2]],
        "GPU-cccc": [["GPU-aaaa", 1]],
    }
    driver.show(
        FakeGpu("GPU-aaaa", A.bus, links=(SWITCH,) * 18),
        FakeGpu("GPU-bbbb", B.bus, links=(SWITCH,) * 18),
        FakeGpu("GPU-cccc", C.bus, links=(SWITCH,) * 17),
    )
    nvml.ask("close")
    assert {u: g["nvlinks"] for u, g in read(nvml).items()} == {
        "GPU-aaaa": [["GPU-bbbb", 18], ["GPU-cccc", 17]],
        "GPU-bbbb": [["GPU-aaaa", 18], ["GPU-cccc", 17]],
        "GPU-cccc": [["GPU-aaaa", 17], ["GPU-bbbb", 17]],
    }


def test_a_fabric_is_named_once_it_is_joined(nvml: Peer, driver: FakeDriver) -> None:
    cluster, completed, in_progress = "0123456789abcdef0123456789abcdef", 3, 2
    driver.show(
        FakeGpu("GPU-aaaa", A.bus, fabric=(completed, cluster, 5), links=(SWITCH,)),
        FakeGpu("GPU-bbbb", B.bus, fabric=(completed, cluster, 6), links=(SWITCH,)),
        FakeGpu("GPU-cccc", C.bus, fabric=(in_progress, cluster, 5)),
        FakeGpu("GPU-dddd", "00000000:5E:00.0", fabric=(completed, "0" * 32, 0)),
    )
    found = read(nvml)
    assert {u: g["fabric_clique"] for u, g in found.items()} == {
        "GPU-aaaa": "01234567-89ab-cdef-0123-456789abcdef.5",
        "GPU-bbbb": "01234567-89ab-cdef-0123-456789abcdef.6",
        "GPU-cccc": "",
        "GPU-dddd": "",
    }
    assert found["GPU-aaaa"]["nvlinks"] == []  # another clique, whatever switch


def test_a_quick_reading_keeps_what_seldom_changes(nvml: Peer, driver: FakeDriver) -> None:
    driver.show(FakeGpu("GPU-aaaa", A.bus, links=(SWITCH,)), FakeGpu("GPU-bbbb", B.bus, links=(SWITCH,)))
    nvml.ask("read")
    driver.fail(DeviceGetNvLinkState=UNKNOWN, DeviceGetGpuFabricInfoV=UNKNOWN, DeviceValidateInforom=UNKNOWN)
    answer = nvml.ask("read", slow=False)
    assert answer["problems"] == []
    assert [g["nvlinks"] for g in answer["gpus"]] == [[["GPU-bbbb", 1]], [["GPU-aaaa", 1]]]


def test_what_a_gpu_does_not_support_is_unknown_not_an_error(nvml: Peer, driver: FakeDriver) -> None:
    driver.show(FakeGpu("GPU-cccc", "00000009:01:00.0", minor=-1, memory=0, rows="-", recovery=-1, name="Integrated"))
    driver.fail(**dict.fromkeys(("DeviceGetTotalEccErrors", "DeviceGetMigMode", "DeviceValidateInforom"), 3))
    answer = nvml.ask("read")
    assert [(g["minor"], g["memory_bytes"], g["pci_address"]) for g in answer["gpus"]] == [(None, 0, "0009:01:00.0")]
    assert answer["problems"] == []


@pytest.mark.parametrize(
    ("nvml_spelling", "kernel"),
    [("00000000:1B:00.0", "0000:1b:00.0"), ("0000:af:00.0", "0000:af:00.0"), ("00010000:E1:00.0", "10000:e1:00.0")],
)
def test_addresses_are_spelled_as_the_kernel_does(nvml_spelling: str, kernel: str) -> None:
    assert kernel_address(nvml_spelling) == kernel
