"""Chained behind a pod's network: the pod gets what kubelet granted to it, all or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.errors import HardwareError, IpamFailed, RequestInvalid
from agent.state import Latest
from cni.call import GrantedDevice, Node
from tests.cni import tiny_node
from tests.cni.networks import PREVIOUS
from tests.cni.networks import network as network_of_keys
from tests.cni.stand_ins import attachments_of
from tests.cni.tiny_node import Rig, mac_of, stub_answer, vf
from tests.node import attach, owner


def grant(rig: Rig, *indices: int, network: dict[str, Any] | None = None) -> None:
    joined = network_of_keys(network) if network is not None else None
    rig.granted[:] = [GrantedDevice(vf(i), "rdma/vf", joined) for i in indices]


def test_a_pod_without_our_devices_passes_through_unchanged(rig: Rig) -> None:
    before = {**PREVIOUS, "x": 1}
    assert rig.add("c1", rig.pod(), ifname="eth0", prevResult=before) == before
    assert rig.ledger.attachments() == ()
    rig.delete("c1", None, ifname="eth0")


def test_all_vfs_of_a_pod_enter_it_under_free_names_and_one_del_brings_them_back(rig: Rig) -> None:
    pod, before, joined = rig.pod(), [rig.found(i) for i in range(3)], {"mtu": 1400, "vlan": 7, "ipam": rig.ipam()}
    grant(rig, 0, 2, network=joined)
    previous = {**PREVIOUS, "interfaces": [*PREVIOUS["interfaces"], {"name": "net1"}]}
    answer = rig.add("c1", pod, ifname="eth0", prevResult=previous)
    assert [i["name"] for i in answer["interfaces"]] == ["cbr0", "eth0", "net1", "net2", "net3"]
    assert [(ip["interface"], ip["address"]) for ip in answer["ips"]] == [
        (1, "10.244.0.5/24"),
        (3, "10.9.0.2/24"),
        (3, "fd09::2/64"),
        (4, "10.9.0.3/24"),
        (4, "fd09::3/64"),
    ]
    assert answer["dns"] == PREVIOUS["dns"]
    for name, index in (("net2", 0), ("net3", 2)):
        link = rig.link(pod, name)
        assert (link.device, link.mac, link.mtu, link.up) == (vf(index), mac_of(index), 1400, True)
    assert len(rig.leases()) == 4
    grant(rig, 2, 0, network=joined)
    assert rig.add("c1", pod, ifname="eth0", prevResult=previous) == answer
    rig.check("c1", pod, ifname="eth0")
    rig.detach("c1", pod, ifname="eth0")
    assert ([rig.found(i) for i in range(3)], rig.leases()) == (before, [])


def test_a_vf_for_vfio_stays_and_the_others_enter(own_network: None, tmp_path: Path) -> None:
    tiny_node.create(tmp_path)
    tiny_node.bind_to_vfio(tmp_path)
    with tiny_node.open_rig(tmp_path) as rig:
        grant(rig, 0, 1)
        answer = rig.add("c1", rig.pod(), ifname="eth0", prevResult=PREVIOUS)
        assert [row.device for row in rig.ledger.attachments()] == [vf(1)]
        assert [i["name"] for i in answer["interfaces"]] == ["cbr0", "eth0", "net1"]


def test_a_second_vf_that_fails_undoes_the_first(rig: Rig) -> None:
    pod = rig.pod()
    before = [rig.found(i) for i in range(2)]
    script = f"[ $CNI_COMMAND$CNI_IFNAME = ADDnet2 ] && exit 1; echo $CNI_COMMAND $CNI_IFNAME >>{rig.folder}/calls;"
    grant(rig, 0, 1, network={"vlan": 7, "ipam": rig.stub_ipam(script + stub_answer("10.0.0.2/24"))})
    with pytest.raises(IpamFailed):
        rig.add("c1", pod, ifname="eth0", prevResult=PREVIOUS)
    assert [rig.found(i) for i in range(2)] == before
    assert rig.ledger.attachments() == ()
    assert (rig.folder / "calls").read_text() == "ADD net1\nDEL net2\nDEL net1\n"


def test_a_device_named_in_the_configuration_goes_before_grants(rig: Rig) -> None:
    """Multus names each device; what else the pod holds comes in calls of its own."""
    pod = rig.pod()
    grant(rig, 0, 1)
    answer = rig.add("c1", pod, ifname="net7", prevResult=PREVIOUS, deviceID=vf(2))
    assert [i["name"] for i in answer["interfaces"]] == ["cbr0", "eth0", "net7"]
    assert [row.device for row in rig.ledger.attachments()] == [vf(2)]


def test_leases_of_a_configured_network_are_kept_under_its_name_and_the_callers_mac_is_not_the_vfs(rig: Rig) -> None:
    pod, before = rig.pod(), rig.found()
    grant(rig, 0, network={"name": "storage", "ipam": rig.ipam()})
    answer = rig.add("c1", pod, prevResult={"interfaces": []}, mac="02:00:00:00:00:99")
    assert [i["mac"] for i in answer["interfaces"]] == [before[1]]
    assert len(list((rig.folder / "leases/storage").glob("10.9.*"))) == 1
    rig.collect(("c1", "net1"))
    assert rig.ledger.attachment_on(vf(0)) is not None
    rig.detach("c1", pod)
    assert list((rig.folder / "leases/storage").glob("10.9.*")) == []


# ------------------------------------------------------ type `rdma` after a plugin that brings the interface

RESULT: Mapping[str, Any] = {"cniVersion": "1.0.0", "interfaces": [{"name": "net1", "sandbox": "/x"}]}
CONF: Mapping[str, Any] = {"cniVersion": "1.0.0", "type": "rdma", "deviceID": vf(0), "prevResult": RESULT}


def test_in_a_shared_system_the_result_is_passed_on(rig: Rig) -> None:
    pod = rig.pod()
    rig.add("c1", pod)
    with rig.call("c1", pod, CONF) as call:
        assert rig.attachments.add(call) == RESULT
        rig.attachments.check(call)
        rig.attachments.delete(call)
    assert rig.in_pod(pod) is not None
    rig.detach("c1", pod)


def test_a_call_that_is_not_chained_is_refused(rig: Rig) -> None:
    with rig.call("c1", rig.pod(), {**CONF, "prevResult": None}) as call, pytest.raises(RequestInvalid) as caught:
        rig.attachments.add(call)
    assert "prevResult is missing" in str(caught.value)


def test_where_devices_are_kept_apart_the_pod_must_have_got_its_own(rig: Rig) -> None:
    attachments = attachments_of(
        Node(rig.machine, rig.ledger, Latest(replace(rig.machine.scan(), rdma_exclusive=True)))
    )
    with rig.call("c1", rig.pod(), CONF) as call:
        with pytest.raises(HardwareError, match="was brought into the pod by another plugin"):
            attachments.add(call)
        row = attach(rig.ledger, vf(0), owner("c1"))
        with pytest.raises(HardwareError, match=f"{vf(0)} came into the pod without an RDMA device"):
            attachments.add(call)
        rig.ledger.finish_detach(row)
        rig.ledger.begin_attach(
            row.owner,
            ifname="net1",
            device=vf(0),
            resource_name="",
            undo=replace(row.undo, rdma="mlx5_4", extra={"rdma_index": 4}),
            netns_path="/x",
            request=row.request,
        )
        assert attachments.add(call) == RESULT
        rig.ledger.finish_detach(rig.ledger.attachments()[0])
    attachments.close()
