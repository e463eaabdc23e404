"""VFs that programs drive, on a machine with an IOMMU: hack/vm/vmrun --iommu, see the README there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.errors import DeviceBusy
from tests.vm.adapters import PCI_DEVICES, Pf, ip, netdevs, run, wait_until
from tests.vm.direct import Direct, look, opened

ASKED: dict[str, Any] = {"vlan": 100, "vlanQoS": 3, "mac": "02:00:00:00:00:77", "trust": "on", "max_tx_rate": 200}


def bind(address: str, driver: str) -> None:
    """Bind a function to a driver, from whichever it has."""
    folder = PCI_DEVICES / address
    if (folder / "driver").exists():
        (folder / "driver/unbind").write_text(address)
    (folder / "driver_override").write_text(driver)
    Path("/sys/bus/pci/drivers_probe").write_text(address)
    assert (folder / "driver").resolve().name == driver


@pytest.fixture(scope="module")
def bound(pfs: tuple[Pf, ...], vfs: Callable[[Pf, int], tuple[str, ...]]) -> Iterator[tuple[Pf, str]]:
    if not any(Path("/sys/kernel/iommu_groups").glob("*")):
        pytest.skip("this machine has no IOMMU: hack/vm/vmrun --iommu")
    run("modprobe", "vfio_iommu_type1")
    run("modprobe", "vfio-pci")
    address = vfs(pfs[0], 2)[1]
    bind(address, "vfio-pci")
    yield pfs[0], address
    bind(address, "igbvf")
    (PCI_DEVICES / address / "driver_override").write_text("\n")


@pytest.fixture
def direct(bound: tuple[Pf, str], tmp_path: Path) -> Iterator[Direct]:
    before = look(bound[0])
    with opened(tmp_path) as parts:
        yield parts
        wait_until("everything back as it was", lambda: look(bound[0]) == before)
        assert (parts.ledger.attachments(), parts.ledger.quarantines()) == ((), ())


def test_the_pf_enforces_what_was_asked_and_the_function_is_reset(
    bound: tuple[Pf, str], direct: Direct, netns: Callable[[], str]
) -> None:
    pf, address = bound
    pod = netns()
    answer = direct.add("c1", pod, address, functionReset=True, **ASKED)
    assert answer["interfaces"] == [
        {"name": "net1", "mac": ASKED["mac"], "sandbox": f"/run/netns/{pod}", "pciID": address}
    ]
    on_pf = pf.settings(1)
    assert (on_pf["address"], on_pf["trust"], on_pf["rate"]["max_tx"]) == (ASKED["mac"], True, 200)
    assert on_pf["vlan_list"] == [{"vlan": 100, "qos": 3}]
    direct.check("c1", pod)
    with pytest.raises(DeviceBusy):
        direct.add("c2", netns(), address, vlan=7)
    direct.delete("c1", pod)


def test_a_program_that_has_the_group_open_does_not_keep_its_settings(
    bound: tuple[Pf, str], direct: Direct, netns: Callable[[], str]
) -> None:
    pod, address = netns(), bound[1]
    direct.add("c1", pod, address, **ASKED)
    group = os.path.basename(os.readlink(PCI_DEVICES / address / "iommu_group"))
    held = os.open(f"/dev/vfio/{group}", os.O_RDWR)
    try:
        with pytest.raises(OSError, match="busy"):
            os.close(os.open(f"/dev/vfio/{group}", os.O_RDWR))
        ip("netns", "delete", pod)
        assert direct.heal(address) == "owner-gone"
    finally:
        os.close(held)


def test_a_vf_that_was_bound_to_the_kernel_meanwhile_heals(
    bound: tuple[Pf, str], direct: Direct, netns: Callable[[], str]
) -> None:
    pod, address = netns(), bound[1]
    direct.add("c1", pod, address, **ASKED)
    bind(address, "igbvf")
    wait_until("its interface", lambda: netdevs(address))
    try:
        direct.delete("c1", pod)
    finally:
        bind(address, "vfio-pci")


def test_a_kernel_vf_that_was_bound_to_vfio_meanwhile_heals(
    bound: tuple[Pf, str], direct: Direct, netns: Callable[[], str], tmp_path: Path
) -> None:
    address = bound[1]
    bind(address, "igbvf")
    wait_until("its interface", lambda: netdevs(address))
    with opened(tmp_path / "..") as later:  # has scanned anew
        pod = netns()
        later.add("c1", pod, address, **ASKED)
        bind(address, "vfio-pci")
        ip("netns", "delete", pod)
        assert later.heal(address) == "owner-gone"
        assert (later.ledger.attachments(), later.ledger.quarantines()) == ((), ())
