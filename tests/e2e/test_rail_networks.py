"""One network for all rails: each VF of a pod gets the subnet and the name of the rail that it stands on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from agent.model.device import Snapshot
from hack.sim.demo import not_back, still_attached
from hack.sim.stage import Stage, in_pod, settled, wait
from tests.e2e.test_data_direct import GPU_BESIDE


def configuration(stage: Stage, binding: str, leases: str = "leases", first: int = 10) -> dict[str, Any]:
    """A network whose subnets are 10.10.0.0/16, 10.11.0.0/16 … for rails 0, 1 …"""
    subnet, folder = f"10.{{rail+{first}}}.0.0/16", str(stage.folder / leases)
    ipam = {"type": "host-local", "ranges": [[{"subnet": subnet}]], "dataDir": folder}
    of_vfs = {"name": "rdma/vf", "kind": "vf", "binding": binding, "select": {"vendors": ["15b3"]}, "network": "rails"}
    return {
        "resources": [of_vfs, {"name": "nvidia.com/gpu", "kind": "gpu"}],
        "networks": [{"name": "rails", "ifName": "rail{rail}", "mtu": 4200, "ipam": ipam}],
    }


def rails_of(snapshot: Snapshot) -> dict[str, int]:
    """Number the adapters that a switch joins to a GPU."""
    ports = sorted(device.address for device in snapshot.devices if device.vfs)
    return {port: number for number, port in enumerate(ports)}


def seen(pod: Mapping[str, Any]) -> dict[str, str]:
    """What the pod sees: interface → the IPv4 address on it."""
    told = json.loads(in_pod(pod, "/usr/sbin/ip", "-json", "-4", "address"))
    return {link["ifname"]: link["addr_info"][0]["local"] for link in told if link["ifname"] not in ("lo", "eth0")}


def attached(stage: Stage, pod: str) -> dict[str, str]:
    """What the books say of a pod: interface → device."""
    return {row["ifname"]: row["device"] for row in stage.status()["attachments"] if row["pod"] == f"default/{pod}"}


def assert_on_its_rails(stage: Stage, pod: Mapping[str, Any], name: str, count: int) -> None:
    snapshot = stage.machine.scan()
    rails, there = rails_of(snapshot), attached(stage, name)
    assert len(there) == count
    for interface, device in there.items():
        assert interface == f"rail{rails[snapshot.by_address[device].physfn or '']}"
    addresses = seen(pod)
    assert addresses.keys() == there.keys()
    for interface, address in addresses.items():
        assert address.startswith(f"10.{10 + int(interface.removeprefix('rail'))}.0.")


def check(stage: Stage, pod: Mapping[str, Any], container_id: str) -> tuple[int, Any]:
    """Call the plugin with CHECK for pod a, chained as eth0."""
    document = {"cniVersion": "1.0.0", "name": "cluster", "prevResult": pod["cni_result"]}
    return stage.call("CHECK", document, container_id, pod["netns"], "eth0", "a")


def leased(stage: Stage, folder: str = "leases") -> list[str]:
    return sorted(path.name for path in (stage.folder / folder).glob("*/10.*"))


def test_four_vfs_of_four_rails_have_four_subnets_and_the_names_of_their_rails(stage: Stage) -> None:
    stage.play("h100-8gpu", configuration(stage, "late"))
    before = stage.machine.links.by_device()
    for name in ("a", "b"):
        stage.create_pod(name, {"rdma/vf": 4, "nvidia.com/gpu": 4})
    a, b = stage.await_pod("a"), stage.await_pod("b")
    assert_on_its_rails(stage, a, "a", 4)
    assert_on_its_rails(stage, b, "b", 4)
    assert attached(stage, "a").keys() | attached(stage, "b").keys() == {f"rail{n}" for n in range(8)}
    assert len(leased(stage)) == 8

    (container_id,) = {row["container"] for row in stage.status()["attachments"] if row["pod"] == "default/a"}
    assert check(stage, a, container_id) == (0, {})
    name, address = next(iter(seen(a).items()))
    in_pod(a, "/usr/sbin/ip", "address", "del", f"{address}/16", "dev", name)
    status, told = check(stage, a, container_id)
    assert status == 1
    assert f"{name} lacks address {address}/16" in told["msg"]

    # What was leased is given back where it was leased, whatever the configuration says by then.
    stage.write_config(configuration(stage, "late", "other", 100))
    wait("the configuration", lambda: stage.log("agent").count("the new configuration is in effect") or None)
    stage.end_pods("a")
    assert settled(lambda: [x for x in leased(stage) if x == address]) == []
    assert len(leased(stage)) == 4
    stage.run_pod("c", {"rdma/vf": 1, "nvidia.com/gpu": 1})
    (of_c,) = leased(stage, "other")
    (rail,) = attached(stage, "c")
    assert of_c.startswith(f"10.{100 + int(rail.removeprefix('rail'))}.0.")
    for pod in ("b", "c"):
        stage.end_pods(pod)

    # More VFs than rails.
    found = seen(stage.run_pod("d", {"rdma/vf": 9}))
    (twice,) = [name for name in found if "-" in name]
    assert found.keys() == {*(f"rail{n}" for n in range(8)), twice}
    assert found[twice].rpartition(".")[0] == found[twice.removesuffix("-2")].rpartition(".")[0]
    stage.end_pods("d")
    assert leased(stage, "other") == []
    assert settled(lambda: [*not_back(stage.machine, before), *still_attached(stage), *leased(stage)]) == []


@pytest.mark.parametrize("way", ["rails", "late"])
def test_planes_of_one_adapter_come_together_each_with_its_own_network(stage: Stage, way: str) -> None:
    """Two adapters with all their planes, beside two GPUs: four interfaces, of two rails and two planes."""
    nic: dict[str, Any] = {"kind": "nic", "select": {"vendors": ["15b3"]}}
    more = {"network": "rails", "environment": ["rails"]}
    of_rails: dict[str, Any] = {"name": "rdma/rail", "kind": "rail", "nic": {**nic, "count": "planes"}, **more}
    late: dict[str, Any] = {"name": "rdma/nic", **nic, "binding": "late", **more}
    ipam = {"type": "host-local", "ranges": [[{"subnet": "10.{rail}.{plane*128}.0/17"}]]}
    network = {
        "name": "rails",
        "ifName": "rail{rail}p{plane}",
        "ipam": {**ipam, "dataDir": str(stage.folder / "leases")},
    }
    resources = [of_rails] if way == "rails" else [late, {"name": "nvidia.com/gpu", "kind": "gpu"}]
    stage.play("gb200-cx8-4gpu", {"resources": resources, "networks": [network]})
    pod = stage.run_pod("a", {"rdma/rail": 2} if way == "rails" else {"rdma/nic": 4, "nvidia.com/gpu": 2})
    (file,) = (stage.folder / "cdi-specs").glob("*.rails")
    told = json.loads(file.read_text())["rails"]
    places = [(rail["rail"], rail["plane"]) for rail in told]
    assert places == [(rail, plane) for rail in sorted({rail for rail, _ in places}) for plane in (0, 1)]
    assert len(places) == 4
    assert [rail["nic"]["interface"] for rail in told] == [f"rail{rail}p{plane}" for rail, plane in places]
    assert [rail["gpu"]["pciAddress"] for rail in told] == [
        GPU_BESIDE[rail["nic"]["pfPciAddress"].rpartition(".")[0] + ".0"] for rail in told
    ]
    addresses = seen(pod)
    for rail, plane in places:
        assert ip_address(addresses[f"rail{rail}p{plane}"]) in ip_network(f"10.{rail}.{plane * 128}.0/17")
    nics = {nic["address"]: (nic["rail"], nic["plane"]) for nic in stage.status()["hardware"]["nics"]}
    assert [nics[rail["nic"]["pfPciAddress"]] for rail in told] == places
