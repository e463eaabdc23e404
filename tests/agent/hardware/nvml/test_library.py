"""The real pynvml, in a process of its own, over a small library in place of the driver's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.hardware.nvml.gpu_facts import kernel_address
from tests.nvml.fake import (
    SUCCESS,
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
PLAIN = {"A": A, "B": B, "C": C}
READINGS = yaml.safe_load(Path(__file__).with_name("readings.yaml").read_text())
FACTS = {"ailments", "enumeration", "fabric_clique", "nvlinks"}


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


def gpu(shown: str | dict[str, Any]) -> FakeGpu:
    return PLAIN[shown] if isinstance(shown, str) else FakeGpu(**facts(shown))


def facts(shown: dict[str, Any]) -> dict[str, Any]:
    slices = shown.get("mig")
    return shown | {"mig": tuple(FakeMig(**each) for each in slices) if slices is not None else None}


@pytest.mark.parametrize("steps", READINGS.values(), ids=READINGS)
def test_what_the_driver_shows_is_read(nvml: Peer, driver: FakeDriver, steps: list[dict[str, Any]]) -> None:
    for step in steps:
        if "show" in step:
            driver.show(*map(gpu, step["show"]), init=step.get("init", SUCCESS))
        for uuid, changed in step.get("change", {}).items():
            driver.change(uuid, **(facts(changed) if "mig" in changed else changed))
        driver.fail(**step.get("fail", {}))
        if "close" in step:
            nvml.ask("close")
        answer = nvml.ask("read", **step.get("read", {}))
        for fact in FACTS & step.keys():
            assert {each["uuid"]: each[fact] for each in answer["gpus"]} == step[fact], (step, fact)
        if "problems" in step:
            assert [problem["path"] for problem in answer["problems"]] == step["problems"]


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
