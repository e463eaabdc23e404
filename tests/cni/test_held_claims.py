"""Devices that DRA claims bring into pods: real books, real links, and what kubelet and the API server would say."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from agent.config import CniSettings
from agent.errors import DeviceBusy, HardwareError, NetlinkFailed, NotAllowed, RequestInvalid, UnknownUnit
from agent.hardware.host import RdmaCharDevice, RdmaLink
from agent.kubelet.podresources import ContainerDevices, DeviceAssignment, PodDevices
from agent.model.allocation import ClaimState, PodRef
from cni.targets import names_of
from hack.sim.rdma import SimulatedRdma
from tests.agent.books import open_books
from tests.cni import tiny_node
from tests.cni.claiming import RESOURCES, Kubelet, Scene, of_share, of_vf
from tests.cni.claiming import scene as scene  # the fixture
from tests.cni.modes import rdma_node
from tests.cni.networks import PREVIOUS
from tests.cni.tiny_node import mac_of, vf

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
        link = rig.in_pod(pod, name)
        assert link is not None
        assert (link.device, link.mac, link.mtu, link.up) == (vf(index), mac_of(index), mtu, True)
    rig.check("c1", pod, ifname="eth0")
    assert (scene.kubelet.asked, scene.reader.read) == (0, [])
    rig.delete("c1", pod, ifname="eth0")
    rig.await_back(0, 1)
    assert [rig.found(i) for i in range(2)] == before
    assert [claim.state for claim in rig.ledger.claims()] == [ClaimState.PREPARED]


def test_a_new_sandbox_of_the_pod_gets_the_same_devices_again(scene: Scene) -> None:
    rig = scene.rig
    scene.claim("nics", of_vf(1), pods=("c1",))
    first = rig.pod("first")
    scene.start("c1", first)
    rig.delete("c1", first, ifname="eth0")
    rig.await_back(1)
    again = rig.pod("again")
    scene.start("c1", again)
    assert scene.rows() == {vf(1): ("c1", "net1", "uid-nics")}
    rig.check("c1", again, ifname="eth0")


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
        rig.delete("c1", pod, ifname="eth0")
        rig.await_back(0, 1, 2)


def test_a_pod_gets_what_its_claims_and_what_its_units_bring(scene: Scene) -> None:
    scene.claim("nics", of_vf(0))
    rig = scene.rig

    class Both(Kubelet):
        def pod(self, pod: PodRef) -> PodDevices | None:
            return PodDevices(pod, (ContainerDevices("main", (DeviceAssignment("plugin/vf", (vf(2),)),)),))

    scene.kubelet.pod = Both().pod  # type: ignore[method-assign]
    rig.ledger.grant("plugin/vf", {vf(2): vf(2)})
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
        link = scene.rig.in_pod(pod, "net1")
        assert link is not None
        assert link.kind == "macvlan"


def test_a_network_of_the_resource_holds_where_the_claim_names_none(scene: Scene) -> None:
    resources = (dataclasses.replace(RESOURCES[0], network="rails"), *RESOURCES[1:])
    scene.config.set(dataclasses.replace(scene.config.value, resources=resources))
    scene.claim("nics", of_vf(0))
    pod = scene.rig.pod()
    scene.start("c1", pod)
    link = scene.rig.in_pod(pod, "net1")
    assert link is not None
    assert link.mtu == 1400


def test_addresses_are_leased_under_the_name_of_the_network_that_a_claim_extends(scene: Scene) -> None:
    scene.claim("nics", of_vf(0, network={"name": "rails", "ipam": scene.rig.ipam(), "mtu": 1300}))
    scene.start("c1")
    assert scene.rig.leases() == ["10.9.0.2", "fd09::2"]


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
    assert names_of([(name, "") for name in wanted], {"eth0", "net1"}) == names


def test_usual_names_give_way_to_each_other_and_to_what_claims_say() -> None:
    wanted = [("", "rail0"), ("rail1", "rail0"), ("", "rail1"), ("", "rail0"), ("", ""), ("", "x%d"), ("", "rail0")]
    expected = ["rail0", "rail1", "rail1-2", "rail0-2", "net1", "x0", "rail0-3"]
    assert names_of(wanted, {"eth0"}) == expected
    with pytest.raises(RequestInvalid, match="give the network a shorter ifName"):
        names_of([("", "rail-of-the-pf0")] * 2, {"eth0"})


@pytest.mark.parametrize("wanted", [["eth0"], ["a", "a"]])
def test_a_name_that_two_would_have_is_refused(wanted: list[str]) -> None:
    with pytest.raises(RequestInvalid, match="give the one that a claim names so another ifName"):
        names_of([(name, "") for name in wanted], {"eth0"})


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


def test_books_that_were_kept_are_believed(scene: Scene) -> None:
    scene.kubelet.claims["pod-of-c1"] = ("of-another-driver",)
    assert scene.start("c1") == PREVIOUS
    assert scene.kubelet.asked == 0


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


def test_the_plugins_that_are_replaced_take_a_place_too_alone_and_with_type_rdma_behind_them(
    own_network: None, tmp_path: Path
) -> None:
    rdma_node.create(tmp_path)
    with tiny_node.open_rig(tmp_path) as rig:
        scene = Scene(rig)
        scene.claim("nics", dataclasses.replace(of_vf(1), device_name=PLACE))
        pod = rig.pod()
        before = rig.add("c1", pod, "net1", deviceID=PLACE, type="sriov")
        assert scene.rows() == {vf(1): ("c1", "net1", "uid-nics")}
        assert rig.add("c1", pod, "net1", deviceID=PLACE, type="rdma", prevResult=before) == before


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
    rdma_node.create(tmp_path)
    with tiny_node.open_rig(tmp_path) as rig:
        scene = Scene(rig)
        scene.claim("nics", of_vf(2, edits=edits_of(2)), of_share(0, edits=edits_of(7)))
        rig.machine.rdma.withdraw(vf(0))
        scene.start("c1")
        (known,) = rig.ledger.claims()
        assert [device.edits for device in known.devices] == [edits_of(0), edits_of(7)]
        assert scene.specs.is_written(known)
    with open_books(tmp_path) as books:
        assert books.claims()[0].devices[0].edits == edits_of(0)


def test_a_spec_that_is_right_is_not_written_again(own_network: None, tmp_path: Path) -> None:
    rdma_node.create(tmp_path)
    with tiny_node.open_rig(tmp_path) as rig:
        scene = Scene(rig)
        claim = scene.claim("nics", of_vf(0, edits=edits_of(0)))
        scene.specs.remove(claim.ref.uid)
        scene.start("c1")
        assert not scene.specs.is_written(claim)


def test_a_device_that_comes_without_its_verbs_device_is_brought_back(own_network: None, tmp_path: Path) -> None:
    rdma_node.create(tmp_path)

    class Unloaded(SimulatedRdma):
        def char_device(
            self, device: RdmaLink, kind: str, port: int | None = None, netns: int | None = None
        ) -> RdmaCharDevice:
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
