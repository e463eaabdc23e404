"""Devices that DRA claims bring into pods: real books, real links, and what kubelet and the API server would say."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.config import CniSettings
from agent.edits.claim_metadata import IN_CONTAINERS, metadata_path, mounted
from agent.errors import (
    DeviceBusy,
    HardwareError,
    NetlinkFailed,
    NotAllowed,
    Refused,
    RequestInvalid,
    Unavailable,
    UnknownUnit,
)
from agent.hardware.host import RdmaLink
from agent.kubelet.podresources import ContainerDevices, DeviceAssignment, PodDevices
from agent.model.allocation import Claim, ClaimState, Hold, PodRef, Spec
from cni.targets import interface_names
from hack.sim.rdma import SimulatedRdma
from tests.cni import tiny_node
from tests.cni.claiming import RESOURCES, Kubelet, Scene, of_share, of_vf, pod_of
from tests.cni.claiming import scene as scene  # the fixture
from tests.cni.modes import rdma_node
from tests.cni.networks import PREVIOUS
from tests.cni.tiny_node import Rig, mac_of, vf
from tests.node import bound_slot, granted, open_books

# -------------------------------------------------------------------------------------------------------- into the pod


def test_the_devices_of_a_prepared_claim_come_into_its_pod(scene: Scene) -> None:
    rig = scene.rig
    before = [rig.found(i) for i in range(2)]
    scene.claim("nics", of_vf(0, ifname="rail0", network={"mtu": 1300}), of_vf(1))
    pod = rig.pod()
    answer = scene.start("c1", pod)
    assert [i["name"] for i in answer["interfaces"]] == ["cbr0", "eth0", "rail0", "net1"]
    assert scene.rows() == {vf(0): ("c1", "rail0", "uid-nics"), vf(1): ("c1", "net1", "uid-nics")}
    for name, index, mtu in (("rail0", 0, 1300), ("net1", 1, 1500)):
        link = rig.link(pod, name)
        assert (link.device, link.mac, link.mtu, link.up) == (vf(index), mac_of(index), mtu, True)
    rig.check("c1", pod, ifname="eth0")
    assert (scene.kubelet.asked, scene.reader.read) == (0, [])
    rig.detach("c1", pod, ifname="eth0")
    assert [rig.found(i) for i in range(2)] == before
    assert [claim.state for claim in rig.ledger.claims()] == [ClaimState.PREPARED]


def test_interfaces_of_all_claims_of_a_pod_are_numbered_together_and_alike_in_each_sandbox(scene: Scene) -> None:
    rig = scene.rig
    scene.claim("b", of_vf(0, ifname="nic%d"))
    scene.claim("a", of_vf(1, ifname="nic%d"))
    scene.claim("of-before", of_vf(2, ifname="nic0"))  # as an earlier version wrote it
    for name in ("first", "again"):
        pod = rig.pod(name)
        answer = scene.start("c1", pod)
        assert [i["name"] for i in answer["interfaces"]] == ["cbr0", "eth0", "nic1", "nic2", "nic0"]
        assert {device: row[1] for device, row in scene.rows().items()} == {vf(1): "nic1", vf(0): "nic2", vf(2): "nic0"}
        rig.check("c1", pod, ifname="eth0")
        rig.detach("c1", pod, ifname="eth0")


def test_a_pod_gets_what_its_claims_and_what_its_units_bring(scene: Scene) -> None:
    scene.claim("nics", of_vf(0))
    rig = scene.rig

    class Both(Kubelet):
        def pod(self, pod: PodRef) -> PodDevices | None:
            return PodDevices(pod, (ContainerDevices("main", (DeviceAssignment("plugin/vf", (vf(2),)),)),))

    scene.kubelet.pod = Both().pod  # type: ignore[method-assign]
    rig.ledger.grant(granted("plugin/vf", {vf(2): vf(2)}))
    answer = scene.start("c1")
    assert [i["name"] for i in answer["interfaces"]] == ["cbr0", "eth0", "net1", "net2"]
    assert scene.rows() == {vf(0): ("c1", "net1", "uid-nics"), vf(2): ("c1", "net2", "")}


def test_what_is_only_looked_at_stays_in_the_host(scene: Scene) -> None:
    scene.claim("looks", of_vf(0, admin=True, exclusive=False), of_vf(1))
    scene.start("c1")
    assert set(scene.rows()) == {vf(1)}


def test_shares_of_an_adapter_bring_one_interface_for_each_pod_where_they_join_a_network(scene: Scene) -> None:
    child = {"mode": "macvlan"}
    scene.claim("a", of_share(0, network=child), of_share(1, network=child))
    scene.claim("b", of_share(2, network=child), pods=("c1", "c2"), owned=False)
    scene.claim("plain", of_share(3), pods=("c3",))
    first, second = scene.rig.pod("first"), scene.rig.pod("second")
    assert [i["name"] for i in scene.start("c1", first)["interfaces"]] == ["cbr0", "eth0", "net1"]
    assert [i["name"] for i in scene.start("c2", second)["interfaces"]] == ["cbr0", "eth0", "net1"]
    assert scene.start("c3") == PREVIOUS  # its containers have the character devices, and nothing comes into the pod
    assert sorted(row.claim_uid for row in scene.rig.ledger.attachments()) == ["uid-a", "uid-b"]
    for pod in (first, second):
        link = scene.rig.link(pod, "net1")
        assert link.kind == "macvlan"


# --------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (["", ""], ["net2", "net3"]),
        (["", "net2", ""], ["net3", "net2", "net4"]),
        (["rail%d", "rail%d", "x", "rail1"], ["rail0", "rail2", "x", "rail1"]),
        (["net%d"], ["net0"]),
    ],
)
def test_interfaces_get_the_names_that_claims_say_and_the_others_free_ones(wanted: list[str], names: list[str]) -> None:
    assert interface_names([(name, "") for name in wanted], {"eth0", "net1"}) == names


def test_usual_names_give_way_to_each_other_and_to_what_claims_say() -> None:
    wanted = [("", "rail0"), ("rail1", "rail0"), ("", "rail1"), ("", "rail0"), ("", ""), ("", "x%d"), ("", "rail0")]
    expected = ["rail0", "rail1", "rail1-2", "rail0-2", "net1", "x0", "rail0-3"]
    assert interface_names(wanted, {"eth0"}) == expected
    with pytest.raises(RequestInvalid, match="give the network a shorter ifName"):
        interface_names([("", "rail-of-the-pf0")] * 2, {"eth0"})


@pytest.mark.parametrize("wanted", [["eth0"], ["a", "a"]])
def test_a_name_that_two_would_have_is_refused(wanted: list[str]) -> None:
    with pytest.raises(RequestInvalid, match="give the one that a claim names so another ifName"):
        interface_names([(name, "") for name in wanted], {"eth0"})


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("state", [ClaimState.PREPARING, ClaimState.UNPREPARING])
def test_a_claim_that_is_not_prepared_brings_nothing(scene: Scene, state: ClaimState) -> None:
    scene.claim("nics", of_vf(0))
    scene.rig.ledger.set_claim_state("uid-nics", state)
    with pytest.raises(DeviceBusy, match=f"claim default/nics is {state}: its devices come into no pod"):
        scene.start("c1")
    assert scene.rows() == {}


def test_a_claim_of_an_earlier_boot_waits_until_its_devices_are_found_again(scene: Scene) -> None:
    claim = scene.claim("nics", of_vf(0))
    scene.rig.ledger.boot_id = "boot-2"
    with pytest.raises(DeviceBusy, match="have not been found again since the node was booted"):
        scene.start("c1")
    scene.rig.ledger.prepare_claim(claim)
    scene.rig.ledger.set_claim_state(claim.ref.uid, ClaimState.PREPARED)
    scene.start("c1", scene.rig.folder / "c1.netns")
    assert set(scene.rows()) == {vf(0)}


def test_a_device_of_a_resource_that_is_gone_does_not_come_in_as_if_it_had_no_network(scene: Scene) -> None:
    scene.claim("nics", of_vf(0))
    scene.config.set(dataclasses.replace(scene.config.value, resources=RESOURCES[1:]))
    with pytest.raises(UnknownUnit, match="has no resource of this name any more"):
        scene.start("c1")


@pytest.mark.parametrize("lost", ["new", "recovered"])
def test_lost_books_let_no_pod_start_without_the_devices_of_its_claim(scene: Scene, lost: str) -> None:
    ledger = scene.rig.ledger
    ledger.is_new, ledger.recovered_from = lost == "new", Path("x") if lost == "recovered" else None
    scene.kubelet.claims |= {"pod-of-c1": ("nics",), "pod-of-c2": ()}
    with pytest.raises(DeviceBusy, match="claim default/nics was prepared before the books were lost"):
        scene.start("c1")
    assert scene.start("c2") == PREVIOUS
    scene.claim("nics", of_vf(0))
    scene.start("c1", scene.rig.folder / "c1.netns")
    assert set(scene.rows()) == {vf(0)}


# -------------------------------------------------------------------------------------------------------------- Multus


def test_multus_may_name_a_device_of_the_pods_claim_and_the_row_says_so(scene: Scene) -> None:
    rig = scene.rig
    scene.config.set(dataclasses.replace(scene.config.value, cni=CniSettings(require_grant=True)))
    scene.claim("nics", of_vf(0))
    scene.kubelet.claims |= {"pod-of-c1": ("nics",), "pod-of-c2": ()}
    pod = rig.pod()
    rig.add("c1", pod, "net7", deviceID=vf(0))
    assert scene.rows() == {vf(0): ("c1", "net7", "uid-nics")}
    (row,) = rig.ledger.attachments()
    assert row.resource_name == "rdma/vf"
    with pytest.raises(NotAllowed, match=f"{vf(0)} belongs to rdma/vf, and kubelet has given it to default/pod-of-c1"):
        rig.add("c2", rig.pod("c2"), "net1", deviceID=vf(0))
    with pytest.raises(NotAllowed, match=f"{vf(1)} belongs to rdma/vf"):
        rig.add("c1", pod, "net8", deviceID=vf(1))


PLACE = "slots-rdma-vf-gpu-0000-1b-00-0"


def test_multus_may_name_the_place_of_a_claim_and_each_call_brings_another_of_the_devices_chosen_there(
    scene: Scene,
) -> None:
    rig = scene.rig
    scene.config.set(dataclasses.replace(scene.config.value, cni=CniSettings(require_grant=True)))
    here = [dataclasses.replace(of_vf(n), device_name=PLACE, share_id=f"share-{n}") for n in range(2)]
    scene.claim("nics", *here, dataclasses.replace(of_vf(2), device_name="slots-rdma-vf-numa-0"))
    pod = rig.pod()
    for ifname, place in (("net1", PLACE), ("net2", PLACE), ("net3", "slots-rdma-vf-numa-0"), ("net2", PLACE)):
        rig.add("c1", pod, ifname, deviceID=place, network="rails")
    assert scene.rows() == {vf(n): ("c1", f"net{n + 1}", "uid-nics") for n in range(3)}
    assert {row.resource_name for row in rig.ledger.attachments()} == {"rdma/vf"}
    with pytest.raises(
        RequestInvalid, match=f"deviceID {PLACE} is a place .* all 2 devices .* are in it: claim a device"
    ):
        rig.add("c1", pod, "net4", deviceID=PLACE)
    with pytest.raises(RequestInvalid, match="pod default/pod-of-c2 has no device there by a claim"):
        rig.add("c2", rig.pod("c2"), "net1", deviceID=PLACE)


def test_the_plugins_that_are_replaced_take_a_place_too_alone_and_with_type_rdma_behind_them(exclusive: Rig) -> None:
    scene = Scene(exclusive)
    scene.claim("nics", dataclasses.replace(of_vf(1), device_name=PLACE))
    pod = exclusive.pod()
    before = exclusive.add("c1", pod, "net1", deviceID=PLACE, type="sriov")
    assert scene.rows() == {vf(1): ("c1", "net1", "uid-nics")}
    assert exclusive.add("c1", pod, "net1", deviceID=PLACE, type="rdma", prevResult=before) == before


def test_a_place_of_a_claim_that_is_not_prepared_waits(scene: Scene) -> None:
    claim = scene.claim("nics", dataclasses.replace(of_vf(0), device_name=PLACE))
    scene.rig.ledger.set_claim_state(claim.ref.uid, ClaimState.UNPREPARING)
    with pytest.raises(DeviceBusy, match="claim default/nics is unpreparing"):
        scene.rig.add("c1", scene.rig.pod(), "net1", deviceID=PLACE)


def test_a_device_that_is_prepared_is_kept_from_a_pod_that_may_name_any(scene: Scene) -> None:
    scene.config.set(dataclasses.replace(scene.config.value, cni=CniSettings(require_grant=False)))
    scene.claim("nics", of_vf(0))
    with pytest.raises(DeviceBusy, match="is prepared for claim default/nics, which is not of pod default/pod-of-c2"):
        scene.rig.add("c2", scene.rig.pod(), deviceID=vf(0))


def test_a_pool_gives_no_device_that_a_claim_has(scene: Scene) -> None:
    scene.claim("nics", of_vf(0), of_vf(1))
    with pytest.raises(DeviceBusy, match="no VF is free"):
        scene.rig.add("c2", scene.rig.pod(), deviceID=None, pf=["ens1f0#0-1"])


# --------------------------------------------------------------------------------------------------- character devices


def edits_of(number: int) -> dict[str, Any]:
    """Say what a container gets for a VF: its verbs device, and what is no VF's own."""
    path = f"/dev/infiniband/uverbs{number}"
    return {
        "env": ["A=1"],
        "deviceNodes": [
            {"path": path, "hostPath": path, "permissions": "rw"},
            {"path": "/dev/infiniband/rdma_cm", "permissions": "rw"},
        ],
    }


def test_a_spec_names_the_character_devices_that_the_device_has_in_its_pod(own_network: None, tmp_path: Path) -> None:
    """A move frees the number for others. Containers are made after the ADD, so they get what is true then."""
    with rdma_node.opened(tmp_path) as rig:
        scene = Scene(rig)
        scene.claim("nics", of_vf(2, edits=edits_of(2)), of_share(0, edits=edits_of(7)))
        rig.machine.rdma.withdraw(vf(0))
        scene.start("c1")
        (known,) = rig.ledger.claims()
        assert [device.edits for device in known.devices] == [edits_of(0), edits_of(7)]
        assert not scene.specs.rewrite()
    with open_books(tmp_path) as books:
        assert books.claims()[0].devices[0].edits == edits_of(0)


def test_a_slots_spec_names_those_too(own_network: None, tmp_path: Path) -> None:
    """The choice is made by a scan: another pod may have brought the device back with another number since."""
    with rdma_node.opened(tmp_path) as rig:
        scene, slot = Scene(rig), "slot-rdma:vf-0-0"
        scene.config.set(dataclasses.replace(scene.config.value, cni=CniSettings(require_grant=False)))
        bound = bound_slot(slot, "rdma/vf", "vf", vf(2), "main", "c1", "net1", pod_of("c1"), edits_of(2))
        rig.ledger.bind_slots([bound])
        rig.machine.rdma.withdraw(vf(0))
        rig.add("c1", rig.pod("c1"), deviceID=vf(2))
        (device,) = json.loads((rig.folder / f"cdi/nodefabric-{slot}.json").read_text())["devices"]
        assert device["containerEdits"] == edits_of(0)
    with open_books(tmp_path) as books:
        assert [slot.edits for slot in books.bound_slots()] == [edits_of(0)]


def test_a_device_that_comes_without_its_verbs_device_is_brought_back(own_network: None, tmp_path: Path) -> None:
    rdma_node.create(tmp_path)

    class Unloaded(SimulatedRdma):
        def char_device(self, device: RdmaLink, kind: str, port: int | None = None, netns: int | None = None) -> str:
            if netns is not None:
                raise NetlinkFailed("look up", 2, "no such file")
            return super().char_device(device, kind, port, netns)

    with tiny_node.open_rig(tmp_path) as rig:
        before = rig.found(0)
        scene = Scene(rig, dataclasses.replace(rig.machine, rdma=Unloaded(tmp_path, rig.machine.root)))
        scene.claim("nics", of_vf(0, edits=edits_of(0)))
        with pytest.raises(HardwareError, match="came into its pod without uverbs, in place of /dev"):
            scene.start("c1")
        assert (scene.rows(), rig.found(0)) == ({}, before)


def reserved(claim: Claim, *pods: PodRef) -> Mapping[str, Any]:
    """Say a claim as the API server does."""
    entries = [{"resource": "pods", "name": pod.name, "uid": pod.uid or f"uid-{pod.name}"} for pod in pods]
    meta = {"namespace": claim.ref.namespace, "name": claim.ref.name, "uid": claim.ref.uid}
    return {"metadata": meta, "status": {"reservedFor": [*entries, {"resource": "others", "name": "x", "uid": "y"}]}}


def test_a_second_pod_of_a_claim_is_learnt_from_kubelet_and_the_api_server(scene: Scene) -> None:
    claim = scene.claim("shared", of_share(network={"mode": "macvlan"}), owned=False)
    scene.start("c1")
    scene.kubelet.claims["pod-of-c2"] = ("shared",)
    scene.reader.claims["shared"] = reserved(claim, pod_of("c2"), pod_of("c3"))
    answer = scene.start("c2")
    assert [i["name"] for i in answer["interfaces"]] == ["cbr0", "eth0", "net1"]
    (known,) = scene.rig.ledger.claims()
    assert [pod.name for pod in known.pods] == ["pod-of-c2", "pod-of-c3"]
    scene.kubelet.is_away = True
    scene.start("c3")
    assert scene.reader.read == ["shared"]


def test_each_pod_of_a_pod_group_gets_its_share_of_the_groups_claim(scene: Scene) -> None:
    claim = scene.claim("shared", of_share(network={"mode": "macvlan"}), pods=(), owned=False)
    group = {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "workers", "uid": "uid-workers"}
    found = reserved(claim)
    scene.reader.claims["shared"] = {**found, "status": {"reservedFor": [group]}}
    for container in ("c1", "c2"):
        scene.kubelet.claims[f"pod-of-{container}"] = ("shared",)
        assert [i["name"] for i in scene.start(container)["interfaces"]] == ["cbr0", "eth0", "net1"]
    assert [pod.name for pod in scene.rig.ledger.claims()[0].pods] == ["pod-of-c1", "pod-of-c2"]


def test_a_pod_without_the_claim_gets_nothing_of_it(scene: Scene) -> None:
    scene.claim("shared", of_share(network={"mode": "macvlan"}), owned=False)
    scene.kubelet.claims["pod-of-c2"] = ("another",)
    for container in ("c2", "c3"):  # c3 is a pod that kubelet does not list
        assert scene.start(container) == PREVIOUS
    assert (scene.kubelet.asked, scene.reader.read) == (2, [])


@pytest.mark.parametrize("error", [Unavailable("away"), Refused(403, "no"), None])
def test_without_the_api_servers_word_kubelet_is_believed(scene: Scene, error: Exception | None) -> None:
    scene.claim("shared", of_share(network={"mode": "macvlan"}), owned=False)
    scene.kubelet.claims["pod-of-c2"] = ("shared",)
    scene.reader.error = error
    if error is None:
        scene.asks.set(None)  # nobody can ask
    scene.start("c2")
    assert [pod.name for pod in scene.rig.ledger.claims()[0].pods] == ["pod-of-c1", "pod-of-c2"]


def test_a_claim_that_is_gone_goes_to_no_pod_whose_claim_has_its_name(scene: Scene) -> None:
    scene.claim("shared", of_share(network={"mode": "macvlan"}), owned=False)
    scene.kubelet.claims["pod-of-c2"] = ("shared",)
    assert scene.start("c2") == PREVIOUS
    assert scene.reader.read == ["shared"]
    assert [pod.name for pod in scene.rig.ledger.claims()[0].pods] == ["pod-of-c1"]


def test_a_device_cannot_be_in_two_pods_of_its_claim_and_the_second_is_told_what_to_do(scene: Scene) -> None:
    rig = scene.rig
    scene.claim("shared", of_vf(0), pods=("c1", "c2"), owned=False)
    first = rig.pod("first")
    scene.start("c1", first)
    with pytest.raises(DeviceBusy, match=r"still held by pod default/pod-of-c1 .* use a template, a claim per pod"):
        scene.start("c2")
    assert scene.rows() == {vf(0): ("c1", "net1", "uid-shared")}
    rig.check("c1", first, ifname="eth0")
    rig.detach("c1", first, ifname="eth0")
    rig.remove(rig.folder / "c2.netns")
    scene.start("c2")


CHILD = {"mode": "macvlan"}


def told_of(scene: Scene, claim: str, device: Hold) -> Hold:
    """Have containers get a file about the device, as Prepare writes it."""
    uid, request = f"uid-{claim}", device.request
    requests = [{"name": request, "devices": [{"name": device.device_name, "attributes": {}}]}]
    scene.specs.metadata.write(uid, request, {"metadata": {"name": claim}, "requests": requests})
    path = f"{IN_CONTAINERS}/resourceclaims/{claim}/{request}/nodefabric.io-metadata.json"
    return dataclasses.replace(
        device, spec=Spec("claim", mounted({}, metadata_path(scene.rig.folder / "cdi", uid, request), path))
    )


def told(scene: Scene, claim: str, request: str) -> tuple[int, dict[str, Any] | None]:
    """Number of a file, and what it says of the device in its pod."""
    document = json.loads(metadata_path(scene.rig.folder / "cdi", f"uid-{claim}", request).read_text())
    (device,) = document["requests"][0]["devices"]
    return document["metadata"]["generation"], device.get("networkData")


def test_a_share_that_several_pods_have_is_told_of_in_none(scene: Scene) -> None:
    scene.claim("shared", told_of(scene, "shared", of_share(network=CHILD)), pods=("c1", "c2"), owned=False)
    scene.start("c1")
    generation, network = told(scene, "shared", "share")
    assert network is not None
    assert (generation, network["interfaceName"]) == (2, "net1")
    scene.start("c2")
    assert told(scene, "shared", "share") == (3, None)


def test_a_pod_whose_file_is_gone_is_refused_and_its_devices_stay_on_the_host(scene: Scene) -> None:
    """The runtime could create none of its containers."""
    scene.claim("nics", told_of(scene, "nics", of_vf(0)))
    metadata_path(scene.rig.folder / "cdi", "uid-nics", "nic0").unlink()
    before = scene.rig.found(0)
    with pytest.raises(Unavailable, match=r"nic0\.metadata is gone"):
        scene.start("c1")
    scene.rig.await_back(0)
    assert (scene.rig.found(0), scene.rows()) == (before, {})
