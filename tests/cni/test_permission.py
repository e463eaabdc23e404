"""Devices that resources offer come only into the pods that kubelet gave them, and protected ones into none."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from agent.config import CniSettings
from agent.errors import DeviceBusy, HardwareError, NotAllowed, Unavailable
from agent.model.allocation import PodRef
from cni.call import Call, GrantedDevice, Holding, Node
from cni.permission import Named, refusal
from cni.server import code_of
from tests.cni import tiny_node
from tests.cni.stand_ins import FixedDevices, NoSlots, attachments_of
from tests.cni.tiny_node import PF, PF_NETDEV, Rig, netdev, vf
from tests.live import Live
from tests.node import granted

POD = PodRef("default", "pod-of-c1")
OTHER = PodRef("default", "other")
SLOT = "slot-rdma:vf-0-0"


@dataclass
class Kubelet(FixedDevices):
    """What resources offer, and what kubelet says that pods have."""

    resources: Mapping[str, str] = field(default_factory=lambda: {vf(0): "rdma/vf", vf(1): "rdma/vf"})
    by_pod: dict[PodRef, Holding] = field(default_factory=dict)
    cni: CniSettings = field(default_factory=CniSettings)
    asked: int = 0
    away: bool = False

    def holding(self, pod: PodRef) -> Holding | None:
        self.asked += 1
        if self.away:
            raise Unavailable("kubelet is away")
        return self.by_pod.get(pod)

    def gives(self, *whole: str, shared: tuple[str, ...] = ()) -> None:
        self.by_pod[POD] = Holding(frozenset(whole), frozenset(shared))


@pytest.fixture
def kubelet() -> Kubelet:
    return Kubelet()


@pytest.fixture
def strict(own_network: None, tmp_path: Path, kubelet: Kubelet) -> Iterator[Rig]:
    """A node whose VFs 0 and 1 a resource offers."""
    with tiny_node.open_rig(tmp_path, held=kubelet) as rig:
        yield rig


@contextmanager
def refused(*words: str) -> Iterator[None]:
    with pytest.raises(NotAllowed) as caught:
        yield
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert code_of("ADD", caught.value) == 7


def test_a_pod_gets_the_vf_that_kubelet_gave_it_and_no_other(strict: Rig, kubelet: Kubelet) -> None:
    pod = strict.pod()
    kubelet.gives(vf(0))
    with refused(f"{vf(1)} belongs to rdma/vf, and kubelet has given it to no known pod, not to default/pod-of-c1"):
        strict.add("c1", pod, deviceID=vf(1))
    strict.ledger.grant(granted("rdma/vf", {vf(1): vf(1)}))
    strict.ledger.bind([vf(1)], OTHER)
    with refused("kubelet has given it to default/other", "let the pod ask for rdma/vf", "cni.requireGrant: false"):
        strict.add("c1", pod, deviceID=vf(1))
    assert strict.ledger.attachments() == ()
    answer = strict.add("c1", pod, deviceID=vf(0))
    asked = kubelet.asked
    kubelet.away = True
    assert strict.add("c1", pod, deviceID=vf(0)) == answer
    strict.check("c1", pod, deviceID=vf(0))
    strict.detach("c1", pod, deviceID=vf(0))
    assert kubelet.asked == asked
    with pytest.raises(Unavailable):
        strict.add("c1", pod, deviceID=vf(0))


def test_kubelets_word_counts_before_that_of_a_grant_whose_pod_has_just_gone(strict: Rig, kubelet: Kubelet) -> None:
    strict.ledger.grant(granted("rdma/vf", {vf(0): vf(0)}))
    strict.ledger.bind([vf(0)], OTHER)
    kubelet.gives(vf(0))
    strict.add("c1", strict.pod(), deviceID=vf(0))


def test_a_pod_that_kubelet_does_not_know_and_a_call_without_a_pod_get_nothing(strict: Rig, kubelet: Kubelet) -> None:
    pod = strict.pod()
    with refused("kubelet knows no pod default/pod-of-c1", "cni.requireGrant: false"):
        strict.add("c1", pod, deviceID=vf(0))
    with strict.call("c1", pod, {"deviceID": vf(0)}) as call, refused("K8S_POD_NAME", "set cni.requireGrant: false"):
        strict.attachments.add(replace(call, pod=PodRef("", "")))
    assert kubelet.asked == 1


def test_what_no_resource_offers_is_had_by_name_as_ever(strict: Rig, kubelet: Kubelet) -> None:
    kubelet.away = True
    strict.add("c1", strict.pod("a"), deviceID=vf(2))
    kubelet.cni = CniSettings(require_grant=False)
    strict.add("c2", strict.pod("b"), deviceID=vf(0))


def test_what_a_pod_has_of_a_resource_that_is_gone_is_not_had_by_name(strict: Rig, kubelet: Kubelet) -> None:
    strict.ledger.grant(granted("former/vf", {vf(2): vf(2)}))
    kubelet.gives(vf(0))
    with refused(f"{vf(2)} belongs to former/vf"):
        strict.add("c1", strict.pod(), deviceID=vf(2))


@pytest.mark.parametrize("conf", [{"deviceID": PF}, {"deviceID": None, "master": PF_NETDEV}])
def test_an_adapter_whose_vfs_are_offered_is_not_taken_away_with_them(
    strict: Rig, kubelet: Kubelet, conf: dict[str, Any]
) -> None:
    pod = strict.pod()
    kubelet.gives(vf(0))
    with refused(f"would take VFs along that rdma/vf offers ({vf(0)} and others)"):
        strict.add("c1", pod, mode="nic", **conf)
    kubelet.resources = {PF: "rdma/nic"}
    with refused("belongs to rdma/nic, and kubelet has given it to no known pod"):
        strict.add("c1", pod, mode="nic", **conf)
    kubelet.resources = {PF: "rdma/nic", vf(0): "rdma/vf"}
    kubelet.gives(PF)
    strict.add("c1", pod, mode="nic", **conf)


@contextmanager
def allowed() -> Iterator[None]:
    """See that an ADD gets as far as the adapter itself."""
    with pytest.raises(HardwareError, match=f"{PF_NETDEV} is down"):
        yield


@pytest.mark.parametrize("conf", [{"deviceID": PF}, {"deviceID": None, "master": PF_NETDEV}])
def test_a_share_is_enough_to_build_upon_an_adapter_and_not_to_take_it(
    strict: Rig, kubelet: Kubelet, conf: dict[str, Any]
) -> None:
    strict.pod()
    kubelet.resources = {PF: "rdma/hca"}
    kubelet.gives(vf(0))
    with refused("belongs to rdma/hca"):
        strict.add("c1", strict.folder / "pod.netns", mode="macvlan", **conf)
    kubelet.gives(shared=(PF,))
    with allowed():
        strict.add("c1", strict.folder / "pod.netns", mode="macvlan", **conf)
    with refused("has only a share of it"):
        strict.add("c1", strict.folder / "pod.netns", mode="nic", **conf)


def test_one_may_build_upon_an_adapter_of_which_only_vfs_are_offered(strict: Rig, kubelet: Kubelet) -> None:
    kubelet.away = True
    with allowed():
        strict.add("c1", strict.pod(), mode="macvlan", deviceID=None, master=PF_NETDEV)


def test_what_stands_upon_an_adapter_and_its_other_names_are_the_adapter(strict: Rig, kubelet: Kubelet) -> None:
    pod = strict.pod()
    kubelet.resources = {PF: "rdma/hca"}
    kubelet.gives(vf(0))
    subprocess.run(["ip", "link", "add", "storage.5", "type", "veth", "peer", "name", "far"], check=True)
    (strict.machine.root / f"sys/class/net/storage.5/lower_{PF_NETDEV}").mkdir(parents=True)
    subprocess.run(["ip", "link", "property", "add", "dev", PF_NETDEV, "altname", "second"], check=True)
    for master in ("storage.5", "second"):
        with refused(f"{master} belongs to rdma/hca"):
            strict.add("c1", pod, mode="macvlan", deviceID=None, master=master)
        kubelet.cni = CniSettings(require_grant=False, protect=(PF_NETDEV,))
        with refused(f"{master} is the host's alone, since cni.protect", PF_NETDEV):
            strict.add("c1", pod, mode="macvlan", deviceID=None, master=master)
        kubelet.cni = CniSettings()


@pytest.mark.parametrize("entry", [PF, PF_NETDEV])
def test_a_protected_adapter_comes_into_no_pod_and_its_vfs_only_through_a_resource(
    strict: Rig, kubelet: Kubelet, entry: str
) -> None:
    pod = strict.pod()
    kubelet.cni = CniSettings(protect=(entry,))
    kubelet.gives(vf(0), PF)
    for conf in (
        {"mode": "nic", "deviceID": PF},
        {"mode": "nic", "deviceID": None, "master": PF_NETDEV},
        {"mode": "macvlan", "deviceID": PF},
        {"mode": "macvlan", "deviceID": None, "master": PF_NETDEV},
        {"mode": "macvlan", "deviceID": None, "master": netdev(2)},
        {"deviceID": vf(2)},
        {"type": "sriov", "deviceID": vf(2)},
    ):
        with refused(f"is the host's alone, since cni.protect of the agent's configuration names {entry}"):
            strict.add("c1", pod, **conf)
    kubelet.resources = {vf(0): "rdma/vf"}
    with pytest.raises(DeviceBusy, match=r"no VF is free: of the 3 that pf selects, 3 of adapters that cni\.protect"):
        strict.add("c1", pod, deviceID=None, pf=[PF_NETDEV])
    assert strict.ledger.attachments() == ()
    strict.add("c1", pod, deviceID=vf(0))


def test_a_protected_device_that_a_pod_was_given_before_does_not_come_into_its_next_sandbox(
    strict: Rig, kubelet: Kubelet
) -> None:
    strict.granted.append(GrantedDevice(vf(0), "rdma/vf", None))
    kubelet.cni = CniSettings(protect=(netdev(0),))
    previous = {"cniVersion": "1.1.0", "interfaces": []}
    with refused(f"{vf(0)} is the host's alone"):
        strict.add("c1", strict.pod(), "eth0", prevResult=previous)
    kubelet.cni = CniSettings(protect=(PF_NETDEV,))
    kubelet.away = True
    strict.add("c1", strict.folder / "pod.netns", "eth0", prevResult=previous)


def test_a_slot_of_the_pods_own_brings_no_other_interface_along(strict: Rig, kubelet: Kubelet) -> None:
    class Bound(NoSlots):
        def bind(self, call: Call, wanted: object) -> tuple[GrantedDevice, ...]:
            return (GrantedDevice(vf(0), "rdma/vf", None, SLOT),)

    kubelet.resources = {PF: "rdma/hca", vf(0): "rdma/vf"}
    kubelet.gives(vf(0))
    strict.attachments.close()
    strict.attachments = attachments_of(
        Node(strict.machine, strict.ledger, Live(strict.machine.scan)), kubelet, Bound()
    )
    pod = strict.pod()
    with refused(f"{PF_NETDEV} belongs to rdma/hca"):
        strict.add("c1", pod, deviceID=SLOT, mode="macvlan", master=PF_NETDEV)
    kubelet.away = True
    strict.add("c1", pod, deviceID=SLOT)


def test_an_interface_upon_two_adapters_needs_one_of_them() -> None:
    bond = Named("bond0", ("0000:3b:00.0", "0000:3b:00.1"), frozenset(), stays=True)
    offered = dict.fromkeys(bond.devices, "rdma/hca")
    one = Holding(shared=frozenset({"0000:3b:00.1"}))
    assert refusal(bond, offered, {}, one, POD) is None
    assert refusal(bond, offered, {}, Holding(), POD) is not None
