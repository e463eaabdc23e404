"""Drivers and their functions, in a folder that stands for sysfs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from agent.errors import HardwareError
from agent.hardware.sysfs import pci
from tests import sandbox

VF = "0000:3b:00.2"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    driver = tmp_path / "sys/bus/pci/drivers/mlx5_core"
    device = tmp_path / "sys/bus/pci/devices" / VF
    driver.mkdir(parents=True)
    device.mkdir(parents=True)
    for name in ("bind", "unbind"):
        (driver / name).touch()
    (device / "driver").symlink_to(driver)
    return tmp_path


def test_a_function_is_written_to_its_driver(root: Path) -> None:
    pci.unbind(root, VF)
    assert (root / "sys/bus/pci/drivers/mlx5_core/unbind").read_text() == VF
    pci.bind(root, VF, "mlx5_core")
    assert (root / "sys/bus/pci/drivers/mlx5_core/bind").read_text() == VF


def test_a_function_without_a_driver_is_free_already(root: Path) -> None:
    (root / "sys/bus/pci/devices" / VF / "driver").unlink()
    pci.unbind(root, VF)
    pci.unbind(root, "0000:00:00.0")


def test_a_driver_that_is_not_there_is_named(root: Path) -> None:
    with pytest.raises(HardwareError, match=f"{VF} cannot be bound to irdma: No such file or directory"):
        pci.bind(root, VF, "irdma")


def test_what_is_bound_already_is_success(root: Path) -> None:
    (root / "sys/bus/pci/drivers/mlx5_core/bind").unlink()
    (root / "sys/bus/pci/drivers/mlx5_core/bind").mkdir()  # so that the write fails, as it does for a bound function
    pci.bind(root, VF, "mlx5_core")
    (root / "sys/bus/pci/drivers/mlx5_core/unbind").unlink()
    (root / "sys/bus/pci/drivers/mlx5_core/unbind").mkdir()
    with pytest.raises(HardwareError, match="cannot be unbound from its driver"):
        pci.unbind(root, VF)


def test_a_read_only_sysfs_is_refused_before_anything_begins(root: Path) -> None:
    pci.require_writable(root, "a test")
    with sandbox.mounts():
        bus = root / "sys/bus/pci"
        subprocess.run(["mount", "--bind", bus, bus], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", bus], check=True)
        with pytest.raises(HardwareError, match=f"{bus} is read-only, and a test writes there: add daemonset/"):
            pci.require_writable(root, "a test")
