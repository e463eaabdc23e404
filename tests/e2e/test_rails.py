"""Rails and whole adapters as units: kubelet counts one thing, and the pod gets all that belongs to it."""

from __future__ import annotations

from typing import Any

from agent.model.locality import Locality
from agent.placement import Distances
from hack.sim.demo import not_back, still_attached
from hack.sim.machine import SimulatedMachine
from hack.sim.stage import CONFIG, Stage, settled

RAIL = {
    "name": "rdma/rail",
    "kind": "rail",
    "gpu": {},
    "nic": {"kind": "vf", "select": {"vendors": ["15b3"]}},
    "network": "rails",
    "passBy": ["envvar"],
}


def play(stage: Stage, node: str, *resources: dict[str, Any]) -> SimulatedMachine:
    return stage.play(node, {**CONFIG, "resources": list(resources)})


def test_a_rail_brings_its_gpu_and_the_vf_beside_it(stage: Stage) -> None:
    hardware = play(stage, "h100-8gpu", RAIL)
    snapshot, before = hardware.scan(), hardware.links.by_device()
    distances = Distances(snapshot)
    pod = stage.run_pod("a", {"rdma/rail": 2})
    (container,) = pod["containers"]
    gpus = container["envs"]["NVIDIA_VISIBLE_DEVICES"].split(",")
    vfs = container["envs"]["PCIDEVICE_RDMA_RAIL"].split(",")
    assert {f"rail-{gpu}" for gpu in gpus} == set(container["devices"]["rdma/rail"])
    assert [distances.distance(gpu, vf) for gpu, vf in zip(gpus, vfs, strict=True)] == [Locality.PIX] * 2
    assert {row["device"] for row in stage.status()["attachments"]} == set(vfs)
    assert not set(vfs) & hardware.links.by_device().keys()
    (resource,) = stage.status()["resources"]
    assert (resource["units"], resource["healthy"], resource["granted"]) == (8, 8, 2)

    stage.restart_agent()
    stage.end_pods("a")
    assert settled(lambda: [*not_back(hardware, before), *still_attached(stage)]) == []


def test_a_whole_adapter_goes_into_the_pod_and_comes_back(stage: Stage) -> None:
    hardware = play(stage, "h100-8gpu", {"name": "rdma/nic", "kind": "nic", "select": {}})
    before = hardware.links.by_device()
    (resource,) = stage.status()["resources"]
    assert resource["units"] > 0
    pod = stage.run_pod("a", {"rdma/nic": 1})
    (nic,) = pod["containers"][0]["devices"]["rdma/nic"]
    assert pod["containers"][0]["envs"] == {"PCIDEVICE_RDMA_NIC": nic}
    assert nic not in hardware.links.by_device()
    assert [(row["device"], row["pod"]) for row in stage.status()["attachments"]] == [(nic, "default/a")]
    assert stage.status()["resources"][0]["units"] == resource["units"]
    stage.end_pods("a")
    assert settled(lambda: [*not_back(hardware, before), *still_attached(stage)]) == []


def test_a_rail_of_two_vfs_brings_both_each_with_an_interface_of_its_own(stage: Stage) -> None:
    one_of_each = {"pf": [f"ens{n}f0np0#0" for n in range(1, 9)]}
    several = {**RAIL, "nic": {"kind": "vf", "select": one_of_each, "count": 2}, "network": "rails"}
    networks = [{"name": "rails", "ifName": "rail{rail}"}]
    hardware = stage.play("h100-8gpu", {**CONFIG, "resources": [several], "networks": networks})
    before = hardware.links.by_device()
    taken: dict[str, str] = {}
    for name in ("a", "b"):
        (container,) = stage.run_pod(name, {"rdma/rail": 1})["containers"]
        nics = container["envs"]["PCIDEVICE_RDMA_RAIL"].split(",")
        rows = [row for row in stage.status()["attachments"] if row["pod"] == f"default/{name}"]
        assert {row["device"] for row in rows} == set(nics)
        first, second = sorted(row["ifname"] for row in rows)
        assert second == f"{first}-2"
        assert taken.keys().isdisjoint(nics)
        taken |= dict.fromkeys(nics, name)
        assert len(taken) == 2 * len({*taken.values()})
        stage.restart_agent()
        granted = {grant["pod"]: grant["devices"] for grant in stage.status()["grants"]}
        assert granted[f"default/{name}"] == nics
    for name in ("a", "b"):
        stage.end_pods(name)
    assert settled(lambda: [*not_back(hardware, before), *still_attached(stage)]) == []
