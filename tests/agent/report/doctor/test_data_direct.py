"""What doctor says of kernel, rdma-core and ACS where adapters have Data Direct functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agent.model.device import Snapshot
from agent.report.doctor import checks_hardware
from agent.report.doctor.collect import acs_control, data_direct
from agent.report.doctor.facts import Facts, Port, Severity, shared_ports

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


Snapshots = Callable[[str], Snapshot]


class Host:
    """A GB300 host on which all is well."""

    def __init__(self, root: Path, snapshot: Snapshot) -> None:
        self.root, self.snapshot, self.ports = root, snapshot, shared_ports(snapshot)
        (root / "proc/sys/kernel").mkdir(parents=True)
        (root / "proc/sys/kernel/osrelease").write_text("6.8.0-64k\n")
        self.library = root / "usr/lib/aarch64-linux-gnu/libmlx5.so.1"
        self.library.parent.mkdir(parents=True)
        self.library.write_bytes(b"\x7fELF mlx5dv_get_data_direct_sysfs_path\0")
        for port in self.ports:
            self.function(port).mkdir(parents=True)
            for name, content in (
                ("vendor", b"0x15b3\n"),
                ("device", b"0x197c\n"),
                ("config", config_space(port.rule.on)),
            ):
                (self.function(port) / name).write_bytes(content)

    def function(self, port: Port) -> Path:
        return self.root / "sys/bus/pci/devices" / port.address

    def found(self, driver: str | None = "mlx5_ib") -> list[tuple[Severity, str]]:
        """List what is found while the functions have a driver."""
        devices = (replace(d, driver=driver) if d.device == 0x2100 else d for d in self.snapshot.devices)
        snapshot = replace(self.snapshot, devices=tuple(devices))
        findings = checks_hardware.data_direct(Facts(snapshot, data_direct=data_direct(self.root, snapshot)))
        return [(f.severity, f"{f.text} | {f.remedy}") for f in findings]


@pytest.fixture
def host(tmp_path: Path, node_snapshot: Snapshots) -> Host:
    return Host(tmp_path, node_snapshot("gb300-4gpu"))


def test_a_sound_host_is_fine_by_the_ports_at_which_functions_and_gpus_meet(host: Host) -> None:
    assert (len(host.ports), {port.rule.words for port in host.ports}) == (8, {"xx110x1", "xx101x1"})
    assert {port.rule.on for port in host.ports} == {TOWARDS_FUNCTION, TOWARDS_GPU}
    ((severity, text),) = host.found()
    assert severity is Severity.FINE
    assert text.startswith("4 functions; kernel, libmlx5 and ACS")


def test_a_host_without_such_functions_is_not_looked_at(tmp_path: Path, node_snapshot: Snapshots) -> None:
    assert Host(tmp_path, node_snapshot("h100-8gpu")).found() == []


def test_a_kernel_that_does_not_drive_the_functions_is_told(host: Host) -> None:
    ((severity, text),) = host.found(driver=None)
    assert severity is Severity.WARNING
    assert text.startswith("0008:")
    assert " have no kernel driver: GPUs' traffic then goes over the processor" in text
    assert "(6.8.0-64k) is too old: take Linux 6.12" in text


def test_an_old_library_is_told_and_a_missing_one_is_unseen(host: Host) -> None:
    host.library.write_bytes(b"\x7fELF mlx5dv_open_device\0")
    ((severity, text),) = host.found()
    assert (severity, "rdma-core 54" in text) == (Severity.WARNING, True)
    assert text.startswith("/usr/lib/aarch64-linux-gnu/libmlx5.so.1 does not know Data Direct")
    host.library.unlink()
    ((severity, _),) = host.found()
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
    host: Host, towards_gpu: bool, control: int | None, severity: Severity | None, says: str
) -> None:
    port = next(p for p in host.ports if (p.rule.on == TOWARDS_GPU) is towards_gpu)
    (host.function(port) / "config").write_bytes(config_space(control))
    ((seen, text),) = host.found()
    assert seen is (severity or Severity.FINE)
    assert says in text
    if severity in (Severity.WARNING, Severity.NOTE):
        assert port.address in text
        assert "pci=config_acs=" in text
        assert f"{port.rule.words}@{port.address}" in text


def test_ports_of_another_switch_are_left_alone(host: Host) -> None:
    for port in host.ports:
        (host.function(port) / "device").write_text("0xc030\n")
        (host.function(port) / "config").write_bytes(config_space(KERNELS_OWN))
    assert [severity for severity, _ in host.found()] == [Severity.FINE]


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
