"""macvlan interfaces upon a PF, with soft RoCE over the PF: what shares of an HCA bring."""

from __future__ import annotations

import errno
import ipaddress
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.errors import AttachmentError, NetlinkFailed
from agent.hardware.host import Child
from cni.call import GrantedDevice
from tests.cni.networks import network
from tests.vm.adapters import MakePod, Pf, ip, link, run, wait_until
from tests.vm.direct import Direct, opened
from tests.vm.node import ping

CLUSTER = {"cniVersion": "1.0.0", "interfaces": [{"name": "eth0"}]}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Direct]:
    with opened(tmp_path, follows=True) as parts:
        yield parts


def test_pods_with_shares_of_one_adapter_talk_and_its_rdma_device_knows_their_addresses(
    node: Direct, pfs: tuple[Pf, ...], rxe: Callable[[str], str], netns: MakePod
) -> None:
    name, parent = rxe(pfs[1].netdev), pfs[1].netdev
    pods = [netns(), netns()]
    before = link(parent)
    for number, pod in enumerate(pods, 1):
        node.granted[:] = [GrantedDevice(pfs[1].address, "rdma/hca", network({"mode": "macvlan", "mtu": 1400}))]
        answer = node.do("add", pod, pod, "eth0", prevResult=CLUSTER)
        shown = link("net1", pod)
        assert [i["name"] for i in answer["interfaces"]] == ["eth0", "net1"]
        assert (answer["interfaces"][1]["mac"], answer["interfaces"][1]["mtu"]) == (shown["address"], 1400)
        assert shown["linkinfo"]["info_kind"] == "macvlan"
        assert shown["linkinfo"]["info_data"]["mode"] == "bridge"
        assert (shown["mtu"], "UP" in shown["flags"]) == (1400, True)
        node.address(pod, f"10.99.0.{number}/24")
        node.do("check", pod, pod, "eth0", prevResult=answer)
    ping(f"/run/netns/{pods[0]}", "10.99.0.2")

    def known() -> set[str]:
        folder = Path("/sys/class/infiniband", name, "ports/1/gids")
        gids = (ipaddress.ip_address((folder / entry).read_text().strip()) for entry in os.listdir(folder))
        return {str(gid.ipv4_mapped) for gid in gids if isinstance(gid, ipaddress.IPv6Address) and gid.ipv4_mapped}

    wait_until("a GID for each pod's address", lambda: {"10.99.0.1", "10.99.0.2"} <= known())

    for pod in pods:
        node.do("delete", pod, pod, "eth0")
    node.await_back()
    assert all("net1" not in ip("-n", pod, "-brief", "link") for pod in pods)
    wait_until("the GIDs to go", lambda: not {"10.99.0.1", "10.99.0.2"} & known())
    assert (link(parent)["address"], link(parent)["flags"]) == (before["address"], before["flags"])


def test_one_that_was_renamed_and_taken_down_is_told_and_removed(
    node: Direct, pfs: tuple[Pf, ...], netns: MakePod
) -> None:
    pod = netns()
    node.do("add", pod, pod, mode="macvlan", master=pfs[0].netdev, mac="02:00:00:00:00:31", macvlanMode="private")
    assert link("net1", pod)["address"] == "02:00:00:00:00:31"
    assert link("net1", pod)["linkinfo"]["info_data"]["mode"] == "private"
    ip("-n", pod, "link", "set", "net1", "down", "name", "mine")
    with pytest.raises(AttachmentError, match="mine"):
        node.do("check", pod, pod, mode="macvlan", master=pfs[0].netdev)
    node.bring_home(pod, pod)
    assert "mine" not in ip("-n", pod, "-brief", "link")


def test_a_killed_namespace_takes_it_along(node: Direct, pfs: tuple[Pf, ...], netns: MakePod) -> None:
    pod = netns()
    node.do("add", pod, pod, mode="macvlan", deviceID=pfs[0].address)
    row = node.ledger.attachment_on(f"{pfs[0].address}/{pod}/net1")
    assert row is not None
    ip("netns", "delete", pod)
    node.heal(row.device)
    assert (node.ledger.attachments(), node.ledger.quarantines()) == ((), ())


def test_a_passthru_takes_the_parent_alone_and_gives_it_back(node: Direct, pfs: tuple[Pf, ...], netns: MakePod) -> None:
    first, second, parent = netns(), netns(), pfs[0].netdev
    mac = link(parent)["address"]
    node.do("add", first, first, mode="macvlan", master=parent, macvlanMode="passthru")
    assert link("net1", first)["address"] == mac
    with pytest.raises(NetlinkFailed, match=rf"{parent} (is in use otherwise|cannot carry it)"):
        node.do("add", second, second, mode="macvlan", master=parent)
    node.bring_home(first, first)
    node.do("add", second, second, mode="macvlan", master=parent)
    node.bring_home(second, second)
    assert link(parent)["address"] == mac


def test_an_ipoib_child_upon_ethernet_is_refused_by_the_kernel_too(
    node: Direct, pfs: tuple[Pf, ...], netns: MakePod
) -> None:
    """No emulated adapter has an InfiniBand port: this is as far as the request can be tried here."""
    run("modprobe", "ib_ipoib")
    parent = node.machine.links.find(pfs[0].netdev)
    assert parent is not None
    with open(f"/run/netns/{netns()}") as pod:
        for pkey in (0x8001, None):
            with pytest.raises(NetlinkFailed) as caught:
                node.machine.links.create(Child("ipoib", "net1", "datagram", pkey=pkey), parent, pod.fileno())
            assert caught.value.errno in (errno.EINVAL, errno.ENODEV)
