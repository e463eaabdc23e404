"""VFs of a pool that CNI alone manages: each call gets the first free one, which is nobody else's."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from agent.errors import (
    AttachmentError,
    ConnectivityLimited,
    DeviceBusy,
    HardwareError,
    IpamFailed,
    RequestInvalid,
    Unavailable,
)
from agent.hardware.host import Host
from agent.ledger import Ledger
from agent.model.allocation import PodRef, Undo
from agent.model.device import Snapshot
from agent.state import Latest
from cni import netconf
from cni.call import Call, Node
from cni.pod_devices import HeldDevices
from cni.targets import Pool
from tests.cni.stand_ins import FixedDevices
from tests.cni.tiny_node import PF, PF_NETDEV, Rig, vf
from tests.node import attach, gpu_uuid, granted, node, open_books, owner

POOL: dict[str, Any] = {"deviceID": None, "pf": [PF_NETDEV]}


def devices(rig: Rig) -> dict[str, str]:
    return {row.owner.container_id: row.device for row in rig.ledger.attachments()}


def call_for(container_id: str, *pf: str, pod: str = "trainer") -> Call:
    conf = netconf.from_document({"cniVersion": "1.1.0", "name": "rails", "pf": list(pf)})
    return Call(container_id, "net1", None, "", PodRef("default", pod), "", "", conf)


@contextmanager
def opened(folder: Path, snapshot: Snapshot, held: HeldDevices) -> Iterator[tuple[Pool, Ledger]]:
    with open_books(folder) as books:
        yield Pool(Node(cast(Host, None), books, Latest(snapshot)), held), books


def test_each_pod_gets_a_vf_of_its_own_until_none_is_left(rig: Rig) -> None:
    before = [rig.found(index) for index in range(3)]
    pods = [rig.pod(f"pod{number}") for number in range(4)]
    for number in range(3):
        rig.add(f"c{number}", pods[number], **POOL, mac=f"02:00:00:00:00:7{number}")
        rig.check(f"c{number}", pods[number], pf=[PF_NETDEV])
    assert devices(rig) == {"c0": vf(0), "c1": vf(1), "c2": vf(2)}
    with pytest.raises(DeviceBusy, match="no VF is free: of the 3 that pf selects, 3 in pods"):
        rig.add("c3", pods[3], **POOL)
    rig.detach("c1", pods[1], pf=[PF_NETDEV])
    rig.add("c3", pods[3], **POOL)
    assert devices(rig)["c3"] == vf(1)
    for number in (0, 2, 3):
        rig.detach(f"c{number}", pods[number], pf=[PF_NETDEV])
    assert [rig.found(index) for index in range(3)] == before


def test_the_same_add_again_gets_the_same_vf(rig: Rig) -> None:
    pod = rig.pod()
    answer = rig.add("c1", pod, **POOL)
    assert rig.add("c1", pod, **POOL) == answer
    assert devices(rig) == {"c1": vf(0)}


def test_an_add_that_fails_leaves_its_vf_to_the_next(rig: Rig) -> None:
    with pytest.raises(IpamFailed):
        rig.add("c1", rig.pod(), **POOL, ipam={"type": "absent"})
    rig.add("c2", rig.pod("two"), **POOL)
    assert devices(rig) == {"c2": vf(0)}


def test_pods_that_start_at_once_get_different_vfs(rig: Rig) -> None:
    pods = [rig.pod(f"pod{number}") for number in range(3)]
    begin = threading.Barrier(3)

    def start(number: int) -> None:
        begin.wait(30)
        rig.add(f"c{number}", pods[number], **POOL)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(start, range(3)))
    assert set(devices(rig).values()) == {vf(0), vf(1), vf(2)}


def test_check_and_del_of_a_pod_that_has_none_are_told_and_harmless(rig: Rig) -> None:
    pod = rig.pod()
    with pytest.raises(AttachmentError, match="a VF of pf is not attached for container c1"):
        rig.check("c1", pod, pf=[PF_NETDEV])
    rig.delete("c1", pod, pf=[PF_NETDEV])


@pytest.mark.parametrize("name", [PF_NETDEV, PF])
def test_only_the_vfs_that_are_named_are_of_the_pool(rig: Rig, name: str) -> None:
    rig.add("c1", rig.pod(), deviceID=None, pf=[f"{name}#1"])
    assert devices(rig) == {"c1": vf(1)}
    with pytest.raises(DeviceBusy, match="of the 1 that pf selects, 1 in pods"):
        rig.add("c2", rig.pod("two"), deviceID=None, pf=[f"{name}#1"])
    with pytest.raises(HardwareError, match=r"pf selects no VF of this node: look at the names \(eth77, ens1f0\)"):
        rig.add("c2", rig.pod("three"), deviceID=None, pf=["eth77", f"{PF_NETDEV}#7"])


def test_a_device_that_the_call_names_goes_before_the_pool(rig: Rig) -> None:
    rig.add("c1", rig.pod(), deviceID=vf(2), pf=[PF_NETDEV])
    assert devices(rig) == {"c1": vf(2)}


def test_the_pool_is_ready_while_one_of_its_pfs_is_up(rig: Rig) -> None:
    def ask(*pf: str) -> None:
        with rig.call("", None, {"pf": list(pf)}) as call:
            rig.attachments.status(call)

    with pytest.raises(Unavailable, match="the interface eth77 is not in the host: load its driver, or change pf"):
        ask("eth77")
    with pytest.raises(ConnectivityLimited, match=rf"the interface {PF} is down: set it up \(ip link set {PF_NETDEV}"):
        ask(PF)
    subprocess.run(["ip", "link", "set", PF_NETDEV, "up"], check=True)
    ask("eth77", f"{PF_NETDEV}#0-3")


def test_what_others_give_is_never_taken(tmp_path: Path) -> None:
    snapshot = node(rails=1, vfs=6)
    free = [device.address for device in snapshot.devices if device.is_vf]
    moved = tuple(replace(d, netdevs=()) if d.address == free[4] else d for d in snapshot.devices)
    held = FixedDevices(resources={free[0]: "rdma/vf"})
    with opened(tmp_path, replace(snapshot, devices=moved), held) as (pool, books):
        books.grant(granted("former/resource", {"unit": free[1]}))
        books.quarantine(free[2], "reason")
        attach(books, free[3], owner("somebody"))
        assert pool.take(call_for("c1", "rail0")) == free[5]
        with pytest.raises(DeviceBusy) as caught:
            pool.take(call_for("c2", "rail0"))
        assert str(caught.value) == (
            "no VF is free: of the 6 that pf selects, 2 in pods and 2 of resources that kubelet gives and 1 in"
            " quarantine and 1 without an interface in the host"
        )
        pool.let_go(call_for("c1", "rail0"))
        assert pool.take(call_for("c2", "rail0")) == free[5]


def test_a_vf_that_could_not_be_attached_is_passed_over(tmp_path: Path) -> None:
    """Else each call would choose it anew, and fail, while others are free."""
    snapshot = node(rails=2, vfs=3)
    first, second, third = (device for device in snapshot.devices if device.physfn == "0000:12:00.0")
    port = replace(first, netdevs=(replace(first.netdevs[0], is_enslaved=True),))
    devices = tuple(port if d is first else d for d in snapshot.devices)
    snapshot = replace(snapshot, devices=devices, only_ways=frozenset({second.netdevs[0].name}))
    with opened(tmp_path, snapshot, FixedDevices()) as (pool, books):
        assert pool.take(call_for("c1", "rail0")) == third.address
        with pytest.raises(DeviceBusy, match="of the 3 that pf selects, 1 in pods and 2 that the host itself uses"):
            pool.take(call_for("c2", "rail0"))
        undo = Undo("rail1", "02:00:00:00:00:09", 1500, up=True, mode="nic")
        attach(books, "0000:22:00.0", owner("c9"), undo=undo)
        with pytest.raises(DeviceBusy, match="of the 3 that pf selects, 3 of an adapter that a pod has"):
            pool.take(call_for("c2", "rail1"))
        assert pool.take(call_for("c9", "rail1")).startswith("0000:22:")


def test_the_vf_is_near_the_pods_gpu_and_else_of_the_pf_with_the_fewest_in_use(tmp_path: Path) -> None:
    snapshot = node(rails=4, vfs=2)
    rails = ("rail0", "rail1", "rail2", "rail3")

    def units_of(pod: PodRef) -> Sequence[tuple[str, str]]:
        if pod.name == "nobody":
            raise Unavailable("kubelet is away")
        return [("nvidia.com/gpu", gpu_uuid(2)), ("rdma/hca", "0")] if pod.name == "trainer" else []

    def rail_of(device: str) -> str:
        netdev = snapshot.pf_netdev(snapshot.by_address[device])
        assert netdev is not None
        return netdev.name

    with opened(tmp_path, snapshot, FixedDevices(units_of=units_of)) as (pool, _):
        assert rail_of(pool.take(call_for("c1", *rails))) == "rail2"
        taken = [
            rail_of(pool.take(call_for(f"d{n}", *rails, pod=pod))) for n, pod in enumerate(("plain", "nobody", ""))
        ]
        assert sorted(taken) == ["rail0", "rail1", "rail3"]


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"pf": "ens1f0"}, "pf must be a list of 1 to 64 PFs"),
        ({"pf": ["a/b"]}, "pf must be a list of 1 to 64 PFs"),
        ({"pf": ["ens1f0"], "mode": "nic"}, "pf has no effect in mode nic, only in vf"),
    ],
)
def test_a_wrong_pool_is_refused(conf: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestInvalid, match=words):
        netconf.from_document(conf)
