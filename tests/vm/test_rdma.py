"""RDMA netlink against a real kernel, and RDMA devices that go along into pods in exclusive mode.

The RDMA devices are soft RoCE over VFs: the kernel's own, whose driver moves nothing, and the changed one of
hack/vm/extra-modules, which hangs below the PCI function and moves as a hardware VF's does.
"""

from __future__ import annotations

import errno
import functools
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent.errors import AttachmentError, HardwareError, NetlinkFailed
from agent.hardware.host import RdmaLink
from agent.hardware.machine import Machine
from agent.hardware.netlink.rdma_netlink import RdmaNetlink
from agent.model.change import of_function
from tests.vm.adapters import MakePod, MakeVfs, Pf, ip, netdevs, run, wait_until
from tests.vm.direct import Direct, opened

RXE = "/sys/class/infiniband"


@pytest.fixture(scope="module")
def rdma() -> Iterator[RdmaNetlink]:
    opened = RdmaNetlink()
    yield opened
    opened.close()


@pytest.fixture
def node(tmp_path: Path, pfs: tuple[Pf, ...], vfs: MakeVfs) -> Iterator[Direct]:
    """What attaches, and VFs for an RDMA device each."""
    made = vfs(pfs[0], 2)
    for address in made:
        wait_until("the VF's interface", functools.partial(netdevs, address))
    with opened(tmp_path, follows=True) as parts:
        parts.vfs = made
        yield parts


@pytest.fixture
def exclusive() -> Iterator[None]:
    """The system's exclusive mode, which can be had only while no other namespace exists."""
    _set_mode("exclusive")
    yield
    _set_mode("shared")


def _set_mode(mode: str) -> None:
    for entry in Path("/run/netns").iterdir():
        ip("netns", "delete", entry.name)

    def done() -> bool:  # not at once: the kernel clears a namespace away when it finds time
        return subprocess.run(["rdma", "system", "set", "netns", mode], capture_output=True).returncode == 0

    wait_until(f"{mode} mode", done)


@pytest.fixture
def movable(node: Direct, changed_rxe: Callable[[str, str], None]) -> Callable[[int], str]:
    """Put the changed soft RoCE device on a VF."""

    def make(index: int) -> str:
        name = f"vfrdma{index}"
        (netdev,) = netdevs(node.vfs[index])
        ip("link", "set", netdev, "up")
        changed_rxe(name, netdev)
        return name

    return make


def test_the_mode_is_queried(rdma: RdmaNetlink, exclusive: None) -> None:
    assert rdma.mode() == "exclusive"


def test_devices_and_their_char_devices_are_found(rdma: RdmaNetlink, pfs: tuple[Pf, ...], rxe: Any) -> None:
    name = rxe(pfs[1].netdev)
    (found,) = rdma.devices()
    folder = Path(RXE, name)
    assert (found.name, found.node_guid) == (name, (folder / "node_guid").read_text().strip())
    assert int(run("rdma", "-d", "dev", "show", name).split(":")[0]) == found.index
    node = rdma.char_device(found, "uverbs")
    number = os.stat(f"/dev/infiniband/{node}").st_rdev
    told = Path(f"/sys/class/infiniband_verbs/{node}/dev").read_text().strip()
    assert told == f"{os.major(number)}:{os.minor(number)}"
    umad = rdma.char_device(found, "umad", 1)
    assert Path(f"/sys/class/infiniband_mad/{umad}/ibdev").read_text().strip() == name
    with pytest.raises(NetlinkFailed, match=f"look up nonsense of RDMA device {name}"):
        rdma.char_device(found, "nonsense")
    rdma.rename(found, "other0")
    assert [device.name for device in rdma.devices()] == ["other0"]
    rdma.rename(found, name)


def test_soft_roce_that_a_pod_made_is_not_the_hosts(pfs: tuple[Pf, ...], rxe: Any, netns: MakePod) -> None:
    """All see it, with the name of the interface that it is over; and pods call theirs as they like."""
    own, pod, (pf, _) = rxe(pfs[0].netdev), netns(), pfs
    ip("-n", pod, "link", "add", pf.netdev, "type", "dummy")
    run("ip", "netns", "exec", pod, "rdma", "link", "add", "another", "type", "rxe", "netdev", pf.netdev)
    try:
        assert Path(RXE, "another/parent").read_text().strip() == pf.netdev
        with closing(Machine.open()) as machine:
            snapshot = machine.scan()
            for seen in (snapshot, machine.rescan(snapshot, of_function(pf.address))):
                assert [rdma.name for rdma in seen.by_address[pf.address].rdma_devices] == [own]
            found = machine.find_rdma(pf.address)
            assert found is not None
            assert found.name == own
    finally:
        run("rdma", "link", "delete", "another")


def test_the_stock_driver_moves_nothing(
    rdma: RdmaNetlink, exclusive: None, pfs: tuple[Pf, ...], rxe: Any, netns: MakePod
) -> None:
    rxe(pfs[1].netdev)
    (found,) = rdma.devices()
    with open(f"/run/netns/{netns()}") as pod:
        with pytest.raises(NetlinkFailed, match="move RDMA device rxe0") as caught:
            rdma.move_in(found, pod.fileno())
        assert caught.value.errno == errno.EOPNOTSUPP
        assert rdma.devices(pod.fileno()) == ()
    gone = RdmaLink(9999, "gone", "")
    with pytest.raises(NetlinkFailed, match="rename RDMA device gone to x"):
        rdma.rename(gone, "x")


def test_a_vf_with_a_software_rdma_device_is_refused_with_what_to_do(
    exclusive: None, node: Direct, rxe: Any, netns: MakePod
) -> None:
    (netdev,) = netdevs(node.vfs[0])
    ip("link", "set", netdev, "up")
    rxe(netdev)
    pod = netns()
    with pytest.raises(HardwareError, match=r"rxe0 is software over the interface.*rdma link delete rxe0"):
        node.do("add", "c1", pod, deviceID=node.vfs[0])
    assert netdevs(node.vfs[0]) == (netdev,)
    assert node.ledger.attachments() == ()


def test_the_rdma_device_moves_along_and_back_under_its_name_also_when_the_pod_renamed_it(
    exclusive: None, node: Direct, movable: Callable[[int], str], netns: MakePod
) -> None:
    first, second = movable(0), movable(1)
    before = [netdevs(address) for address in node.vfs]
    pod = netns()
    node.do("add", "c1", pod, deviceID=node.vfs[0])
    assert (node.rdma_names(pod), node.rdma_names()) == ([first], [second])
    assert first in run("ip", "netns", "exec", pod, "rdma", "dev")
    assert not Path(RXE, first).exists()
    node.do("check", "c1", pod, deviceID=node.vfs[0])
    # A function whose RDMA device is in a pod is still known to have one.
    assert [d.name for d in node.machine.scan().by_address[node.vfs[0]].rdma_devices] == [first]

    run("ip", "netns", "exec", pod, "rdma", "dev", "set", first, "name", "mine")
    assert node.rdma_names(pod) == ["mine"]
    node.do("check", "c1", pod, deviceID=node.vfs[0])
    node.bring_home("c1", pod)
    assert (node.rdma_names(pod), sorted(node.rdma_names())) == ([], [first, second])
    assert [netdevs(address) for address in node.vfs] == before


def test_a_namespace_that_is_killed_gives_both_back(
    exclusive: None, node: Direct, movable: Callable[[int], str], netns: MakePod
) -> None:
    first, pod = movable(0), netns()
    before = netdevs(node.vfs[0])
    node.do("add", "c1", pod, deviceID=node.vfs[0])
    ip("netns", "delete", pod)
    node.bring_home("c1", None)
    assert node.rdma_names() == [first]
    assert netdevs(node.vfs[0]) == before


def test_a_device_that_was_taken_out_is_missed_by_check(
    exclusive: None, node: Direct, movable: Callable[[int], str], netns: MakePod
) -> None:
    movable(0)
    pod = netns()
    node.do("add", "c1", pod, deviceID=node.vfs[0])
    with open(f"/run/netns/{pod}") as inside:
        (found,) = node.machine.rdma.devices(inside.fileno())
        node.machine.rdma.move_out(found, inside.fileno())
    with pytest.raises(AttachmentError, match="RDMA device vfrdma0 is not in the pod"):
        node.do("check", "c1", pod, deviceID=node.vfs[0])
    node.bring_home("c1", pod)


def test_a_char_device_that_gets_another_number_on_the_way_is_no_success(
    exclusive: None, node: Direct, movable: Callable[[int], str], netns: MakePod
) -> None:
    first, second = movable(0), movable(1)
    run("rdma", "link", "delete", first)  # now uverbs0 is free, and a device that moves takes the lowest
    pod = netns()
    with pytest.raises(HardwareError, match=r"came with /dev/infiniband/uverbs1 and has /dev/infiniband/uverbs0"):
        node.do("add", "c1", pod, deviceID=node.vfs[1])
    assert node.rdma_names() == [second]
    assert netdevs(node.vfs[1]) != ()
    assert node.ledger.attachments() == ()
