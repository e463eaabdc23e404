"""Slots in CNI calls: chained or named by Multus, bound for the call, and let go of whatever becomes of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent.errors import DeviceBusy, RequestInvalid
from agent.model.unit_id import slot_id
from cni.attachment import Settings
from cni.call import Call, GrantedDevice, Node
from tests.cni import tiny_node
from tests.cni.networks import network
from tests.cni.stand_ins import NoSlots, attachments_of
from tests.cni.tiny_node import Rig, stub_answer, vf
from tests.live import Live

SLOT, OTHER = (slot_id("rdma/vf", 0, n) for n in range(2))
CHAINED: Mapping[str, Any] = {"prevResult": {"cniVersion": "1.0.0", "interfaces": [{"name": "eth0"}]}}
NETWORK = network({"name": "rails", "vlan": 7})


class Chooser(NoSlots):
    """Binds as it is told, and notes what it is asked."""

    def __init__(self) -> None:
        self.found: list[GrantedDevice] = []
        self.asked: list[str] = []
        self.let_go: list[tuple[str, str]] = []
        self.during: Callable[[], None] = lambda: None

    def bind(self, call: Call, wanted: Callable[[], bool]) -> Sequence[GrantedDevice]:
        assert wanted()
        self.asked.append(call.container_id)
        self.during()
        return tuple(self.found)

    def unbind(self, container_id: str, ifname: str) -> None:
        self.let_go.append((container_id, ifname))


@pytest.fixture
def slots() -> Chooser:
    return Chooser()


@pytest.fixture
def rig(own_network: None, tmp_path: Path, slots: Chooser) -> Iterator[Rig]:
    with tiny_node.open_rig(tmp_path) as rig:
        rig.attachments.close()
        node = Node(rig.machine, rig.ledger, Live(rig.machine.scan))
        rig.attachments = attachments_of(node, slots=slots, settings=Settings(busy_seconds=0.3))
        yield rig


def test_the_devices_of_a_pods_slots_come_into_a_chained_network(rig: Rig, slots: Chooser) -> None:
    slots.found = [GrantedDevice(vf(n), "rdma/vf", NETWORK, slot) for n, slot in ((1, SLOT), (0, OTHER))]
    pod, before = rig.pod(), [rig.found(n) for n in range(2)]
    answer = rig.add("c1", pod, "eth0", **CHAINED)
    assert [i["name"] for i in answer["interfaces"] if "sandbox" in i] == ["net1", "net2"]
    assert [row.device for row in rig.ledger.attachments()] == [vf(1), vf(0)]
    assert rig.settings(1).vlan == 7
    assert slots.let_go == []
    rig.detach("c1", pod, "eth0")
    assert [rig.found(n) for n in range(2)] == before
    assert slots.let_go == [("c1", "eth0")]


def test_multus_names_a_device_by_its_slot(rig: Rig, slots: Chooser) -> None:
    slots.found = [GrantedDevice(vf(n), "rdma/vf", NETWORK, slot) for n, slot in ((1, SLOT), (0, OTHER))]
    pod = rig.pod()
    rig.add("c1", pod, deviceID=SLOT, ipam=rig.stub_ipam(f"cat >{rig.folder}/asked; {stub_answer('10.9.0.2/24')}"))
    (row,) = rig.ledger.attachments()
    assert (row.device, row.resource_name, row.ifname) == (vf(1), "rdma/vf", "net1")
    assert json.loads((rig.folder / "asked").read_text())["deviceID"] == vf(1)
    assert rig.settings(1).vlan == 0  # Multus's own configuration counts, not the resource's network
    rig.check("c1", pod, deviceID=SLOT)
    rig.detach("c1", pod)


def test_a_slot_of_another_pod_is_refused(rig: Rig, slots: Chooser) -> None:
    slots.found = [GrantedDevice(vf(0), "rdma/vf", NETWORK, SLOT)]
    with pytest.raises(RequestInvalid, match=f"{OTHER} is a slot that kubelet has not given to pod default/pod-of-c1"):
        rig.add("c1", rig.pod(), deviceID=OTHER)
    assert slots.let_go == [("c1", "net1")]


def test_what_was_bound_for_an_add_that_fails_is_let_go(rig: Rig, slots: Chooser) -> None:
    slots.found = [GrantedDevice(vf(0), "rdma/vf", network({"name": "rails", "ipam": rig.stub_ipam("exit 1")}), SLOT)]
    before = rig.found()
    with pytest.raises(Exception, match="stub"):
        rig.add("c1", rig.pod(), "eth0", **CHAINED)
    assert slots.let_go == [("c1", "eth0")]
    assert rig.found() == before
    assert rig.ledger.attachments() == ()


def test_a_del_that_overtakes_a_pod_with_nothing_to_move_is_heard(rig: Rig, slots: Chooser) -> None:
    pod = rig.pod()
    slots.during = lambda: rig.delete("c1", pod, "eth0")
    with pytest.raises(DeviceBusy, match="DEL of c1 eth0 came while its ADD was under way"):
        rig.add("c1", pod, "eth0", **CHAINED)
    assert slots.let_go == [("c1", "eth0"), ("c1", "eth0")]


def test_a_pod_without_slots_passes_through(rig: Rig, slots: Chooser) -> None:
    assert rig.add("c1", rig.pod(), "eth0", **CHAINED) == CHAINED["prevResult"]
    assert slots.asked == ["c1"]
    assert slots.let_go == []


def test_calls_for_a_device_by_its_address_ask_for_no_slots(rig: Rig, slots: Chooser) -> None:
    rig.add("c1", rig.pod(), deviceID=vf(0))
    assert slots.asked == []


def test_few_pods_wait_at_once_for_the_devices_of_their_slots(rig: Rig, slots: Chooser) -> None:
    rig.attachments.close()
    node = Node(rig.machine, rig.ledger, Live(rig.machine.scan))
    rig.attachments = attachments_of(node, slots=slots, settings=Settings(max_adding=2))
    waits, go = threading.Event(), threading.Event()

    def wait() -> None:
        waits.set()
        assert go.wait(30)

    slots.during = wait
    pod, answers = rig.pod(), list[Mapping[str, Any]]()
    first = threading.Thread(target=lambda: answers.append(rig.add("c1", pod, "eth0", **CHAINED)))
    first.start()
    assert waits.wait(30)
    with pytest.raises(DeviceBusy, match="network rails has 1 ADDs under way"):
        rig.add("c2", pod, "eth0", **CHAINED)
    go.set()
    first.join()
    assert answers == [CHAINED["prevResult"]]
    assert rig.add("c2", pod, "eth0", **CHAINED) == CHAINED["prevResult"]
