"""What doctor says of kernel, rdma-core and ACS where adapters have Data Direct functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agent.hardware import recorded
from agent.hardware.sysfs.scan import scan
from agent.model.device import Snapshot
from agent.report.doctor import checks_hardware
from agent.report.doctor.collect import acs_control, data_direct
from agent.report.doctor.facts import Facts, Severity, shared_ports

TOWARDS_FUNCTION, TOWARDS_GPU = 0b0011001, 0b0010101
KERNELS_OWN = 0b0011101
"""What Linux sets by itself: everything goes up."""


def config_space(control: int | None) -> bytes:
    """A configuration space with the AER capability, and behind it ACS."""
    space = bytearray(4096)
    space[0x100:0x104] = (0x148 << 20 | 2 << 16 | 0x0001).to_bytes(4, "little")
    if control is not None:
        space[0x148:0x14C] = (1 << 16 | 0x000D).to_bytes(4, "little")
        space[0x14E:0x150] = control.to_bytes(2, "little")
    return bytes(space)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A GB300 host on which all is well."""
    recorded.unpack(recorded.load(recorded.find("gb300-4gpu")), tmp_path)
    (tmp_path / "proc/sys/kernel").mkdir(parents=True, exist_ok=True)
    (tmp_path / "proc/sys/kernel/osrelease").write_text("6.8.0-64k\n")
    library(tmp_path, b"\x7fELF mlx5dv_get_data_direct_sysfs_path\0")
    for port in shared_ports(scan(tmp_path)):
        function = tmp_path / "sys/bus/pci/devices" / port.address
        (function / "config").write_bytes(config_space(port.rule.on))
    return tmp_path


def library(root: Path, content: bytes) -> None:
    path = root / "usr/lib/aarch64-linux-gnu/libmlx5.so.1"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def found(root: Path, change: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot) -> list[tuple[Severity, str]]:
    snapshot = change(driven(scan(root)))
    findings = checks_hardware.data_direct(Facts(snapshot, data_direct=data_direct(root, snapshot)))
    return [(f.severity, f"{f.text} | {f.remedy}") for f in findings]


def driven(snapshot: Snapshot, driver: str | None = "mlx5_ib") -> Snapshot:
    devices = (replace(d, driver=driver) if d.device == 0x2100 else d for d in snapshot.devices)
    return replace(snapshot, devices=tuple(devices))


def test_a_function_and_its_gpu_meet_at_the_switch_of_the_adapter(root: Path) -> None:
    ports = shared_ports(scan(root))
    assert len(ports) == 8
    assert {port.rule.words for port in ports} == {"xx110x1", "xx101x1"}
    assert {port.rule.on for port in ports} == {TOWARDS_FUNCTION, TOWARDS_GPU}


def test_a_sound_host_is_fine(root: Path) -> None:
    ((severity, text),) = found(root)
    assert severity is Severity.FINE
    assert text.startswith("4 functions; kernel, libmlx5 and ACS")


def test_a_host_without_such_functions_is_not_looked_at(tmp_path: Path) -> None:
    recorded.unpack(recorded.load(recorded.find("h100-8gpu")), tmp_path)
    assert found(tmp_path) == []


def test_a_kernel_that_does_not_drive_the_functions_is_told(root: Path) -> None:
    ((severity, text),) = found(root, lambda snapshot: driven(snapshot, None))
    assert severity is Severity.WARNING
    assert text.startswith("0008:")
    assert " have no kernel driver: GPUs' traffic then goes over the processor" in text
    assert "(6.8.0-64k) is too old: take Linux 6.12" in text


def test_an_old_library_is_told_and_a_missing_one_is_unseen(root: Path) -> None:
    library(root, b"\x7fELF mlx5dv_open_device\0")
    ((severity, text),) = found(root)
    assert (severity, "rdma-core 54" in text) == (Severity.WARNING, True)
    assert text.startswith("/usr/lib/aarch64-linux-gnu/libmlx5.so.1 does not know Data Direct")
    (root / "usr/lib/aarch64-linux-gnu/libmlx5.so.1").unlink()
    ((severity, _),) = found(root)
    assert severity is Severity.UNSEEN


@pytest.mark.parametrize(
    ("towards_gpu", "control", "severity", "says"),
    [
        (True, KERNELS_OWN, Severity.WARNING, "redirects completions"),
        (False, KERNELS_OWN, Severity.WARNING, "redirects requests"),
        (True, 0, Severity.NOTE, "(0000000, not xx101x1)"),
        (False, 0, Severity.NOTE, "(0000000, not xx110x1)"),
        (True, TOWARDS_GPU | 0b1100010, None, ""),
        (False, None, Severity.UNSEEN, "cannot be read"),
    ],
)
def test_settings_of_the_shared_switch_are_compared_with_those_that_traffic_needs(
    root: Path, towards_gpu: bool, control: int | None, severity: Severity | None, says: str
) -> None:
    port = next(p for p in shared_ports(scan(root)) if (p.rule.on == TOWARDS_GPU) is towards_gpu)
    (root / "sys/bus/pci/devices" / port.address / "config").write_bytes(config_space(control))
    ((seen, text),) = found(root)
    assert seen is (severity or Severity.FINE)
    assert says in text
    if severity in (Severity.WARNING, Severity.NOTE):
        assert port.address in text
        assert "pci=config_acs=" in text
        assert f"{port.rule.words}@{port.address}" in text


def test_ports_of_another_switch_are_left_alone(root: Path) -> None:
    for port in shared_ports(scan(root)):
        (root / "sys/bus/pci/devices" / port.address / "device").write_text("0xc030\n")
        (root / "sys/bus/pci/devices" / port.address / "config").write_bytes(config_space(KERNELS_OWN))
    assert [severity for severity, _ in found(root)] == [Severity.FINE]


@pytest.mark.parametrize(
    ("config", "control"),
    [
        (config_space(KERNELS_OWN), KERNELS_OWN),
        (config_space(None), None),
        (config_space(KERNELS_OWN)[:64], None),  # all that others than root may read
        (config_space(KERNELS_OWN)[:0x14A], None),
        (b"\xff" * 4096, None),
        ((0x100 << 20 | 1).to_bytes(4, "little").rjust(0x104, b"\0") + bytes(64), None),
        (b"", None),
    ],
)
def test_the_register_is_found_behind_other_capabilities(config: bytes, control: int | None) -> None:
    assert acs_control(config) == control
