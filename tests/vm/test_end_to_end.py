"""The whole line on real hardware as the kernel sees it: kubelet's grants, the relay, VFs in pods, and back."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hack.sim.stage import files_of, manifest
from tests.containerd.cri import sandbox_config
from tests.containerd.runtime import Containerd
from tests.vm.adapters import MakeVfs, Pf, ip, link, netdevs, run, shows, wait_until
from tests.vm.direct import look
from tests.vm.node import NETNS, Node, configuration, in_netns, ping

ALL_UNITS = {"rdma/hca": 8, "rdma/storage": 1, "rdma/vf": 2}


@dataclass
class Hardware:
    """The VFs, and how everything about them was before any pod came."""

    pfs: tuple[Pf, ...]
    vfs: tuple[str, ...]
    before: dict[str, Any]

    def is_as_before(self) -> bool:
        return shows(lambda: look(*self.pfs), self.before)


@contextmanager
def on_interface(name: str, address: str) -> Iterator[None]:
    ip("address", "add", address, "dev", name)
    try:
        yield
    finally:
        ip("address", "delete", address, "dev", name)


@pytest.fixture(scope="module")
def hardware(pfs: tuple[Pf, ...], vfs: MakeVfs) -> Iterator[Hardware]:
    made = (*vfs(pfs[0], 2), *vfs(pfs[1], 1))
    run("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", pfs[1].netdev)
    yield Hardware(pfs, made, look(*pfs))
    run("rdma", "link", "delete", "rxe0")


@pytest.fixture(scope="module")
def node(hardware: Hardware, request: pytest.FixtureRequest) -> Iterator[Node]:
    started = Node()
    started.write_config(configuration(*hardware.pfs))
    try:
        started.start_kubelet()
        started.start_agent()
        started.await_ready()
        yield started
    finally:
        if request.session.testsfailed:
            print(started.log_ends())
        started.close()


@pytest.fixture(autouse=True)
def nothing_left(hardware: Hardware, node: Node) -> Iterator[None]:
    """After each test everything is as it was before the first one."""
    yield
    node.end_pods(*(file.stem for file in (node.folder / "manifests").iterdir()))
    wait_until("everything back as it was", hardware.is_as_before)
    wait_until("empty books", lambda: not node.status()["attachments"])
    assert [p.name for p in node.addresses.iterdir()] == []


def test_pods_get_vfs_set_up_on_their_pfs_and_talk_and_leave_nothing(node: Node, hardware: Hardware) -> None:
    wait_until("all units with kubelet", lambda: node.allocatable() == ALL_UNITS)
    assert node.status()["problems"] == []
    first, second = hardware.pfs
    node.create_pod("one", {"rdma/vf": 1, "rdma/hca": 1})
    node.create_pod("two", {"rdma/vf": 1})
    node.create_pod("far", {"rdma/storage": 1})
    pods = {name: node.await_pod(name) for name in ("one", "two", "far")}

    assert netdevs(hardware.vfs[0]) == netdevs(hardware.vfs[1]) == netdevs(hardware.vfs[2]) == ()
    for index in (0, 1):
        settings = first.settings(index)
        assert settings["vlan_list"] == [{"vlan": 100, "qos": 3}]
        assert (settings["trust"], settings["spoofchk"], settings["rate"]["max_tx"]) == (True, False, 200)
    assert second.settings(0)["vlan_list"] == [{"vlan": 100}]
    assert second.settings(0)["address"] == "02:00:00:00:00:07"

    addresses = {}
    for name, pod in pods.items():
        inside = link("net1", Path(pod["netns"]).name)
        assert {"UP", "LOWER_UP"} <= set(inside["flags"])
        assert inside["mtu"] == (1500 if name == "far" else 1400)
        (lease,) = pod["cni_result"]["ips"]
        assert pod["cni_result"]["interfaces"][lease["interface"]]["mac"] == inside["address"]
        addresses[name] = lease["address"].partition("/")[0]
        assert addresses[name] in in_netns(pod["netns"], "ip", "address", "show", "net1")
    assert link("net1", Path(pods["far"]["netns"]).name)["address"] == "02:00:00:00:00:07"
    ping(pods["one"]["netns"], addresses["two"])
    ping(pods["one"]["netns"], addresses["far"])
    with on_interface(first.netdev, "10.77.0.254/24"), pytest.raises(AssertionError):
        run("/run/busybox", "ping", "-c", "2", "-w", "2", addresses["one"])  # the PF itself is outside of the VLAN

    (main,) = pods["one"]["containers"]
    nodes = files_of(main, Path("/var/run/cdi"))
    assert nodes == ["/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0"]

    (share,) = [grant for grant in node.status()["grants"] if grant["resource"] == "rdma/hca"]
    assert (share["device"], share["pod"]) == (second.address, "default/one")

    attached = {row["device"]: row for row in node.status()["attachments"]}
    assert set(attached) == set(hardware.vfs)
    assert attached[hardware.vfs[2]]["pod"] == "default/far"
    # A VF in a pod is still a unit of the node.
    assert node.allocatable() == ALL_UNITS


def test_a_namespace_that_is_killed_without_del_gives_its_vf_back_healed(node: Node, hardware: Hardware) -> None:
    device = hardware.vfs[1]
    ip("netns", "add", "doomed")
    doomed = "doomed-container", str(NETNS / "doomed"), "net7"
    conf = {"deviceID": device, "vlan": 200, "trust": "on", "mac": "02:00:00:00:00:09", "ipam": {"type": "counter"}}
    status, answer = node.call("ADD", conf, *doomed, pod="direct")
    assert (status, [i["name"] for i in answer["interfaces"]]) == (0, ["net7"])
    assert node.call("ADD", conf, *doomed, pod="direct") == (0, answer)
    assert node.call("CHECK", {**conf, "prevResult": answer}, *doomed, pod="direct") == (0, {})
    assert hardware.pfs[0].settings(1)["vlan_list"] == [{"vlan": 200}]

    ip("netns", "delete", "doomed")

    wait_until("the VF healed", hardware.is_as_before, 60)
    wait_until("empty books", lambda: not node.status()["attachments"], 60)
    assert node.status()["quarantine"] == []
    assert node.call("DEL", conf, "doomed-container", "", "net7", pod="direct") == (0, {})


def test_a_vf_of_a_real_runtimes_pod_comes_back_healed_when_all_of_the_pod_is_killed(
    node: Node, hardware: Hardware, containerd: Containerd
) -> None:
    cluster = {"type": "ptp", "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.0.0/24"}]]}}
    conflist = {"cniVersion": "1.1.0", "name": "cluster", "plugins": [cluster, {"type": "nodefabric"}]}
    for plugin in (node.folder / "cni").iterdir():
        (containerd.plugins / plugin.name).symlink_to(plugin)
    (containerd.net_d / "10-cluster.conflist").write_text(json.dumps(conflist))
    in_host = manifest("real", {"rdma/vf": 1}).replace("spec:", "spec:\n  hostNetwork: true")
    (node.folder / "manifests/real.yaml").write_text(in_host)  # so the stand-in leaves the sandbox to containerd
    config = sandbox_config("real", node.await_pod("real")["uid"], cgroup=f"/{containerd.cgroups.name}")
    sandbox = containerd.cri.run_sandbox(config)

    (row,) = node.status()["attachments"]
    assert (row["container"], row["pod"]) == (sandbox, "default/real")
    inside = link("net1", containerd.netns(sandbox).name)
    assert {"UP", "LOWER_UP"} <= set(inside["flags"])
    assert hardware.pfs[0].settings(hardware.vfs.index(row["device"]))["vlan_list"] == [{"vlan": 100, "qos": 3}]

    netns = containerd.netns(sandbox)
    containerd.end(signal.SIGKILL)
    containerd.kill_pods()
    run("umount", str(netns))
    netns.unlink()
    wait_until("the VF healed", hardware.is_as_before, 60)
    wait_until("empty books", lambda: not node.status()["attachments"], 60)

    containerd.start()
    containerd.cri.stop_sandbox(sandbox)
    containerd.cri.remove_sandbox(sandbox)
    assert hardware.is_as_before()


def test_an_agent_killed_amid_an_add_loses_nothing(node: Node, hardware: Hardware) -> None:
    hold, held = node.addresses / "hold", node.addresses / "held"
    hold.touch()
    node.create_pod("unlucky", {"rdma/vf": 1})
    # The plugin is waited for with the VF in the pod, set up on its PF, and the books not yet closed.
    wait_until("an ADD under way", held.exists, 90)
    assert not hardware.is_as_before()
    node.end("agent", signal.SIGKILL)
    hold.unlink()
    held.unlink()
    node.start_agent()
    node.await_ready()

    pod = node.await_pod("unlucky")
    (row,) = node.status()["attachments"]
    assert (row["container"], row["state"]) == (pod["container_id"], "attached")
    untouched = ({*hardware.vfs} - {row["device"]}).pop()
    assert look(*hardware.pfs)[untouched] == hardware.before[untouched]
    assert [p.name for p in node.addresses.iterdir()] == [row["addresses"][0].partition("/")[0]]


def test_a_pod_outlives_the_agent_and_can_end_without_it(node: Node, hardware: Hardware) -> None:
    pod = node.run_pod("patient", {"rdma/vf": 1})
    node.end("agent", signal.SIGTERM)
    assert "UP" in link("net1", Path(pod["netns"]).name)["flags"]

    node.end_pods("patient")
    assert list(Path("/var/lib/nodefabric/spool").glob("*.del"))
    assert not hardware.is_as_before()

    node.start_agent()
    node.await_ready()
    wait_until("the VF back", hardware.is_as_before, 60)
    assert not list(Path("/var/lib/nodefabric/spool").glob("*.del"))


def test_the_lists_follow_vfs_that_are_removed_even_from_a_pod_and_made_again(node: Node, hardware: Hardware) -> None:
    second = hardware.pfs[1]
    node.run_pod("robbed", {"rdma/storage": 1})
    second.set_vfs(0)
    # A device that is gone stays listed for a while, so that its reason can be told.
    wait_until("no VF of the second PF", lambda: node.allocatable()["rdma/storage"] == 0)
    assert node.allocatable()["rdma/vf"] == 2
    node.end_pods("robbed")
    wait_until("empty books", lambda: not node.status()["attachments"])
    assert node.status()["quarantine"] == []

    second.set_vfs(1)
    hardware.before = look(*hardware.pfs)  # the new VF has a new MAC
    wait_until("the VF offered again", lambda: node.allocatable() == ALL_UNITS)
    node.run_pod("again", {"rdma/storage": 1})
