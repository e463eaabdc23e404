"""InfiniBand VFs on a simulated node: GUIDs, rebinding with all names changed, partitions, and the way back.

The simulation does what the kernel's code does and no computer at hand can show: a VF takes its GUID when bound, its
interface and devices come anew under other names, and an interface is made anew when its RDMA device moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.errors import AttachmentError, HardwareError, RequestInvalid
from agent.hardware.host import Link, LinkChange, VfControl
from agent.hardware.netlink.links import Netlink
from cni.call import GrantedDevice
from cni.modes import guid, rdma
from hack.sim.fabric import device_of
from hack.sim.machine import SimulatedMachine
from tests.cni.modes import rdma_node
from tests.cni.modes.guids import GUID, state
from tests.cni.networks import network
from tests.cni.stand_ins import NoFacts
from tests.cni.tiny_node import PF_NETDEV, Rig, vf
from tests.node import granted


@pytest.fixture(params=["exclusive", "shared"])
def node(own_network: None, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    with rdma_node.opened(tmp_path, mode=request.param, ib=True) as rig:
        yield rig


def test_a_vf_gets_its_guid_and_all_is_as_before_afterwards(node: Rig) -> None:
    before, pod = state(node), node.pod()
    answer = node.add("c1", pod, guid=GUID, link_state="enable", mtu=1400)
    assert node.machine.vf_control.guids(PF_NETDEV, 0) == (GUID, GUID)
    assert node.settings().link_state == "enable"
    found = node.link(pod)
    assert (found.up, found.mtu, answer["interfaces"][0]["mac"]) == (True, 1400, found.mac)
    (row,) = node.ledger.attachments()
    assert row.undo.mode == "infiniband"
    node.check("c1", pod)
    node.detach("c1", pod)
    assert state(node) == before
    assert node.ledger.quarantines() == ()


class Passing:
    """A PF like another."""

    def __init__(self, control: VfControl) -> None:
        self._control = control

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)


class Forgetful(Passing):
    """A PF that says that it has given a GUID, and has not."""

    def set_guids(self, pf_netdev: str, vf_index: int, node: str, port: str) -> None:
        return None


def test_a_vf_that_comes_back_without_its_guid_is_told_and_brought_back(own_network: None, tmp_path: Path) -> None:
    def forgetful(machine: SimulatedMachine) -> Any:
        control: Any = Forgetful(machine.vf_control)
        return replace(machine, vf_control=control)

    with rdma_node.opened(tmp_path, ib=True, host=forgetful) as rig:
        before, pod = state(rig), rig.pod()
        with pytest.raises(HardwareError, match=f"was bound again for the GUID {GUID} but has "):
            rig.add("c1", pod, guid=GUID)
        assert (state(rig), rig.ledger.attachments(), rig.ledger.quarantines()) == (before, (), ())


class Tacit:
    """A machine whose PF does not tell its VFs' GUIDs."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        self.vf_control = TacitControl(machine.vf_control)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)


class TacitControl(Passing):
    def guids(self, pf_netdev: str, vf_index: int) -> None:
        return None


def test_a_former_guid_that_the_pf_does_not_tell_comes_back_too(own_network: None, tmp_path: Path) -> None:
    with rdma_node.opened(tmp_path, ib=True, host=Tacit) as rig:
        former = "02:00:00:00:00:00:00:99"
        rig.machine.vf_control.set_guids(PF_NETDEV, 0, former, former)
        guid.rebind(rig.machine, vf(0), "mlx5_core")
        before, pod = state(rig), rig.pod()
        rig.add("c1", pod, guid=GUID)
        rig.check("c1", pod)
        rig.detach("c1", pod)
        assert state(rig) == before
        assert rig.machine.vf_control.guids(PF_NETDEV, 0) == (former, former)
        found = rig.machine.find_rdma(vf(0))
        assert found is not None
        assert found.node_guid == "0200:0000:0000:0099"


def test_a_vf_whose_guid_is_set_already_is_not_bound_anew(infiniband: Rig) -> None:
    (before,) = [d for d in infiniband.machine.rdma.devices() if d.name == "mlx5_1"]
    pod = infiniband.pod()
    infiniband.add("c1", pod)
    with open(pod) as netns:
        assert infiniband.machine.rdma.devices(netns.fileno()) == (before,)
    assert infiniband.machine.vf_control.guids(PF_NETDEV, 0) == (guid.NONE, guid.NONE)


def test_a_killed_namespace_gives_all_back(node: Rig) -> None:
    before, pod = state(node), node.pod()
    node.add("c1", pod, guid=GUID)
    node.remove(pod)
    node.delete("c1", None)
    node.await_healed()
    assert state(node) == before


def test_pods_that_start_at_once_do_not_get_each_others_char_devices(infiniband: Rig) -> None:
    before = [state(infiniband, i) for i in range(3)]
    pods = [infiniband.pod(f"p{i}") for i in range(3)]
    guids = [f"02:00:00:00:00:00:01:0{i}" for i in range(3)]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda i: infiniband.add(f"c{i}", pods[i], deviceID=vf(i), guid=guids[i]), range(3)))
    for i, pod in enumerate(pods):
        with open(pod) as netns:
            (found,) = infiniband.machine.rdma.devices(netns.fileno())
            assert rdma.digits(found.node_guid) == rdma.digits(guids[i])
            assert infiniband.machine.rdma.char_device(found, "uverbs") == f"uverbs{i}"
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda i: infiniband.detach(f"c{i}", pods[i]), range(3)))
    assert [state(infiniband, i) for i in range(3)] == before


@pytest.mark.parametrize("where", ["the call", "the network"])
def test_several_vfs_of_a_pod_do_not_get_one_guid(node: Rig, where: str) -> None:
    """A GUID is for one attachment, as Multus calls; a chained call brings all VFs of the pod."""
    joined = network({"name": "ib", "guid": GUID}) if where == "the network" else None
    conf: dict[str, Any] = {"guid": GUID} if joined is None else {}
    before, pod = [state(node, index) for index in range(2)], node.pod()
    node.granted.extend(GrantedDevice(vf(index), "rdma/ib", joined) for index in range(2))
    with pytest.raises(RequestInvalid, match=f"guid {GUID} cannot be given to {vf(0)} and {vf(1)} at once"):
        node.add("c1", pod, "eth0", prevResult={"cniVersion": "1.1.0"}, **conf)
    assert ([state(node, index) for index in range(2)], node.ledger.attachments()) == (before, ())
    node.granted.pop()
    node.add("c1", pod, "eth0", prevResult={"cniVersion": "1.1.0"}, **conf)
    assert node.machine.vf_control.guids(PF_NETDEV, 0) == (GUID, GUID)


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_a_sandbox_made_anew_does_not_make_up_for_another_number(own_network: None, tmp_path: Path, mode: str) -> None:
    """kubelet asks Allocate once for a pod: its container gets the file of the first number in any sandbox."""
    promised = {vf(1): "/dev/infiniband/uverbs1"}
    with rdma_node.opened(tmp_path, mode, ib=True, facts=NoFacts(promised)) as rig:
        rig.ledger.grant(granted("rdma/ib", {vf(1): vf(1)}))
        rig.machine.unbind(vf(0))  # uverbs0 is free: whatever is bound anew, or moves, takes it
        for attempt in range(2):
            pod = rig.pod(f"sandbox-{attempt}")
            with pytest.raises(HardwareError, match=r"came with /dev/infiniband/uverbs1 and has .*uverbs0 in the pod"):
                rig.add(f"c{attempt}", pod, deviceID=vf(1), guid=GUID)
            rig.detach(f"c{attempt}", pod)
        promised[vf(1)] = "/dev/infiniband/uverbs0"  # another pod's grant
        rig.add("c9", rig.pod("other"), deviceID=vf(1), guid=GUID)


def test_a_vf_that_its_former_pod_had_bound_anew_since_the_grant_is_looked_at(
    own_network: None, tmp_path: Path
) -> None:
    """The next pod asks for no GUID, so that its own ADD binds nothing anew."""
    promised: dict[str, str] = {}
    with rdma_node.opened(tmp_path, "shared", ib=True, facts=NoFacts(promised)) as rig:
        machine, pod, own = rig.machine, rig.pod(), "02:00:00:00:00:00:00:77"
        machine.vf_control.set_guids(PF_NETDEV, 1, own, own)
        for step in (machine.unbind, lambda device: machine.bind(device, "mlx5_core")):
            step(vf(1))
        rig.add("c1", pod, deviceID=vf(1), guid=GUID)
        rig.ledger.grant(granted("rdma/ib", {vf(1): vf(1)}))
        promised[vf(1)] = "/dev/infiniband/uverbs1"
        machine.unbind(vf(0))  # uverbs0 is free
        rig.detach("c1", pod)
        with pytest.raises(HardwareError, match=r"came with /dev/infiniband/uverbs1 and has .*uverbs0 in the pod"):
            rig.add("c2", rig.pod("next"), deviceID=vf(1))
        rig.await_back(1)


def test_a_vf_without_any_guid_is_refused_with_what_to_do(infiniband: Rig) -> None:
    infiniband.machine.unbind(vf(0))
    infiniband.machine.bind(vf(0), "mlx5_core")
    with pytest.raises(HardwareError, match=r"has no GUID \(0000:0000:0000:0000\).*give `guid`"):
        infiniband.add("c1", infiniband.pod())


@pytest.mark.parametrize("conf", [{"vlan": 5}, {"mac": "02:00:00:00:00:05"}, {"trust": "on"}])
def test_what_only_ethernet_has_is_refused(infiniband: Rig, conf: dict[str, Any]) -> None:
    with pytest.raises(RequestInvalid, match="is an InfiniBand VF"):
        infiniband.add("c1", infiniband.pod(), guid=GUID, **conf)


def test_a_partition_is_waited_for_and_its_lack_told(infiniband: Rig, tmp_path: Path) -> None:
    before, pod = state(infiniband), infiniband.pod()
    infiniband.add("c1", pod, guid=GUID, pkey="0x7fff")  # of the same partition as 0xffff
    infiniband.detach("c1", pod)
    with pytest.raises(HardwareError, match=rf"has partition 0xffff at index 0, not 0x8005.*{GUID} a member"):
        infiniband.add("c2", pod, guid=GUID, pkey="0x8005")
    assert state(infiniband) == before


def test_a_table_that_the_subnet_manager_has_not_written_yet_is_waited_for(infiniband: Rig) -> None:
    (entry,) = (infiniband.machine.root / "sys/bus/pci/devices" / vf(0)).glob("infiniband/*/ports/1/pkeys/0")
    entry.write_text("0x0000\n")
    pod = infiniband.pod()
    with ThreadPoolExecutor(1) as runtime:
        added = runtime.submit(infiniband.add, "c1", pod, pkey="0x8005")
        with pytest.raises(TimeoutError):
            added.result(0.5)
        entry.write_text("0x8005\n")
        added.result(30.0)


def test_a_guid_that_was_changed_behind_the_agents_back_is_told_by_check(infiniband: Rig) -> None:
    pod = infiniband.pod()
    infiniband.add("c1", pod, guid=GUID)
    infiniband.machine.vf_control.set_guids(PF_NETDEV, 0, guid.ALL_ONES, guid.ALL_ONES)
    with pytest.raises(AttachmentError, match=f"has the GUIDs {guid.ALL_ONES} and {guid.ALL_ONES}, not {GUID}"):
        infiniband.check("c1", pod)


class Deaf(Netlink):
    """Refuses to bring an interface out of a pod."""

    def move_out(self, link: Link, netns: int, change: LinkChange) -> None:
        raise HardwareError("refused")


def test_an_interface_that_will_not_come_out_comes_with_its_rdma_device(own_network: None, tmp_path: Path) -> None:
    with (
        closing(Deaf(device_of)) as deaf,
        rdma_node.opened(tmp_path, ib=True, host=lambda machine: replace(machine, links=deaf)) as rig,
    ):
        before, pod = state(rig), rig.pod()
        rig.add("c1", pod, guid=GUID)
        rig.detach("c1", pod)
        assert state(rig) == before
