"""Pods that get their devices by claims (DRA), from the slice to the way back, and what people see of it."""

from __future__ import annotations

import json
import signal
import uuid
from pathlib import Path
from typing import Any

import yaml

from agent.model.locality import Locality
from agent.placement import Distances
from hack.sim.demo import not_back, still_attached
from hack.sim.scheduler import (
    CLAIMS,
    SLICES,
    call,
    claim,
    create,
    devices,
    kubelet_options,
    play_claims,
    start_api_server,
)
from hack.sim.stage import CONFIG, Stage, in_pod, settled, wait

A = {"name": "a", "uid": "11111111-2222-4333-8444-555555555555"}
B = {"name": "b", "uid": "22222222-2222-4333-8444-555555555555"}


def specs(stage: Stage) -> list[Path]:
    return sorted((stage.folder / "cdi-specs").glob("nodefabric-claim-*.json"))


def events(stage: Stage) -> list[tuple[str, str, bool]]:
    """List the events about claims, oldest first: which, what, and whether it is a warning."""
    found = [e for e in reversed(stage.status()["events"]) if e["kind"] == "claim"]
    return [(e["subject"], e["text"].partition(":")[0], e["warning"]) for e in found]


def _registered(stage: Stage, port: int) -> dict[str, Any] | None:
    driver: dict[str, Any] = stage.status().get("dra") or {}
    published = len(call(port, "GET", SLICES)["items"])
    return driver if driver.get("registered") and driver["slices"] == published else None


def test_a_pod_gets_the_vf_of_its_claim_which_all_can_see_until_it_is_gone_and_leaves_nothing_behind(
    stage: Stage,
) -> None:
    port = play_claims(stage)
    wait("the slices", lambda: devices(port) or None)
    driver = wait("kubelet to have the driver, and all slices to be there", lambda: _registered(stage, port))
    assert (driver["problem"], driver["dropped"]) == (None, [])
    assert sum(found["count"] for found in driver["devices"]) == len(devices(port))
    machine = stage.machine
    before = machine.links.by_device()
    vf = next(device for device in devices(port) if device["name"].startswith("vf-"))
    address = vf["attributes"]["resource.kubernetes.io/pciBusID"]["string"]
    assert address in before

    uid = claim(port, "nics", A, {"request": "nic", "device": vf["name"]})
    create(stage, A, ["nics"])
    running = stage.await_pod("a")

    assert address not in machine.links.by_device()
    assert "net1" in in_pod(running, "ip", "-brief", "link")
    assert [path.name for path in specs(stage)] == [f"nodefabric-claim-{uid}.json"]

    def told() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = call(port, "GET", f"{CLAIMS}/nics")["status"].get("devices", [])
        return found

    (status,) = wait("the claim's status", lambda: told() or None)
    assert (status["device"], status["networkData"]["interfaceName"]) == (vf["name"], "net1")
    assert status["networkData"]["ips"][0].startswith("192.168.100.")
    assert status["data"]["pciAddress"] == address
    (known,) = stage.status()["claims"]
    assert (known["namespace"], known["name"], known["state"]) == ("default", "nics", "prepared")
    assert known["pods"] == ["default/a"]
    (found,) = known["devices"]
    assert (found["request"], found["name"], found["state"]) == ("nic", vf["name"], "attached")
    lines = stage.fetch("/metrics").splitlines()
    assert 'nodefabric_dra_registered{driver="nodefabric.io"} 1.0' in lines
    assert 'nodefabric_dra_claims{resource="rdma/vf",state="attached"} 1.0' in lines
    assert any(
        line.startswith('nodefabric_rpc_duration_milliseconds_count{operation="NodePrepareResources",outcome="ok"')
        for line in lines
    )

    claim(port, "rival", B, {"request": "nic", "device": vf["name"], "pool": "another-node"})
    create(stage, B, ["rival"])
    refused = wait("the refusal", lambda: next((e for e in events(stage) if e[2]), None))
    assert refused == ("default/rival", "not prepared", True)
    stage.delete_pod("b")
    stage.delete_pod("a")
    stage.await_no_pod("a", "b")
    assert events(stage) == [
        ("default/nics", "prepared for default/a", False),
        ("default/rival", "not prepared", True),
        ("default/nics", "unprepared", False),
    ]
    assert stage.status()["claims"] == []
    assert settled(lambda: [*not_back(machine, before), *still_attached(stage)]) == []
    assert specs(stage) == []


def test_a_vf_goes_from_claim_to_claim_also_through_the_death_of_the_agent(stage: Stage) -> None:
    port = play_claims(stage)
    wait("the slices", lambda: devices(port) or None)
    machine = stage.machine
    before = machine.links.by_device()
    vf = next(device["name"] for device in devices(port) if device["name"].startswith("vf-"))
    claim(port, "of-a", A, {"request": "nic", "device": vf})
    create(stage, A, ["of-a"])
    stage.await_pod("a")
    stage.end("agent", signal.SIGKILL)
    stage.start_agent("--kubeconfig", str(stage.folder / "kubeconfig"))

    # As after a forced deletion: the scheduler has the VF back while the pod's sandbox lives.
    stage.delete_pod("a")
    call(port, "DELETE", f"{CLAIMS}/of-a")
    uid = claim(port, "of-b", B, {"request": "nic", "device": vf})
    create(stage, B, ["of-b"])
    running = stage.await_pod("b")

    assert "net1" in in_pod(running, "ip", "-brief", "link")
    stage.await_no_pod("a")
    assert [path.name for path in specs(stage)] == [f"nodefabric-claim-{uid}.json"]
    stage.end_pods("b")
    assert settled(lambda: [*not_back(machine, before), *still_attached(stage), *map(str, specs(stage))]) == []


def test_an_unchanged_pod_gets_the_vfs_beside_its_gpus_through_a_claim_for_extended_resources(stage: Stage) -> None:
    vfs = {"name": "rdma/vf", "kind": "vf", "binding": "late", "select": {"vendors": ["15b3"]}, "network": "rails"}
    port = play_claims(stage, {**CONFIG, "resources": [vfs, {"name": "nvidia.com/gpu", "kind": "gpu"}]})
    places = wait("the slices", lambda: [device["name"] for device in devices(port)] or None)
    machine = stage.machine
    snapshot, before = machine.scan(), machine.links.by_device()

    results = [
        {"request": "container-0-request-0", "device": place, "shareID": str(uuid.uuid4())}
        | {"consumedCapacity": {"nodefabric.io/units": "1"}}
        for place in places[-4:]
    ]
    owner = {"apiVersion": "v1", "kind": "Pod", **A, "controller": True}
    annotations = {"resource.kubernetes.io/extended-resource-claim": "true"}
    name = "a-extended-resources-x7k2p"
    uid = claim(port, name, A, *results, ownerReferences=[owner], annotations=annotations)
    limits = {"nvidia.com/gpu": 4, "rdma/vf": 4}
    mapping = {"containerName": "main", "resourceName": "rdma/vf", "requestName": "container-0-request-0"}
    document = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": "default", **A},
        "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]},
        "status": {"extendedResourceClaimStatus": {"resourceClaimName": name, "requestMappings": [mapping]}},
    }
    (stage.folder / "manifests/a.yaml").write_text(yaml.safe_dump(document))
    running = stage.await_pod("a")

    (container,) = running["containers"]
    (spec,) = specs(stage)
    assert uid in spec.name
    edits = json.loads(spec.read_text())["devices"][0]["containerEdits"]
    (listed,) = [text for text in edits["env"] if text.startswith("PCIDEVICE_RDMA_VF=")]
    vfs_of_pod = listed.partition("=")[2].split(",")
    distances, gpus = Distances(snapshot), container["devices"]["nvidia.com/gpu"]
    assert len(set(vfs_of_pod)) == len(gpus) == 4
    assert {min(distances.distance(gpu, vf) for vf in vfs_of_pod) for gpu in gpus} == {Locality.PIX}
    assert {name.rpartition("=")[0] for name in container["cdi_devices"]} == {"nodefabric.io/claim"}
    assert not set(vfs_of_pod) & machine.links.by_device().keys()

    stage.end_pods("a")
    assert settled(lambda: [*not_back(machine, before), *still_attached(stage)]) == []


def test_a_node_that_offers_nothing_to_claims_loads_no_driver_opens_no_socket_and_watches_nothing(
    stage: Stage,
) -> None:
    stage.build_node("h100-8gpu")
    port = start_api_server(stage)
    stage.start_kubelet(*kubelet_options(port))
    stage.start_agent("--kubeconfig", str(stage.folder / "kubeconfig"), env={"PYTHONPROFILEIMPORTTIME": "1"})
    stage.await_ready()
    wait("all parts", lambda: "agent.cluster.node_events" in stage.log("agent") or None)
    stage.run_pod("a", {"rdma/vf": 1})

    loaded = {line.rpartition("|")[2].strip() for line in stage.log("agent").splitlines() if "import time:" in line}
    assert "agent.main" in loaded
    of_claims = {name for name in loaded if name.startswith(("deviceplugin.dra.", "proto.dra", "proto.pluginreg"))}
    assert of_claims == {"deviceplugin.dra.driver"}
    assert loaded.isdisjoint({"agent.cluster.slices", "agent.cluster.claim_objects"})
    assert [
        path for name in ("plugins", "plugins_registry") for path in (stage.folder / "kubelet" / name).iterdir()
    ] == []
    counts = call(port, "GET", "/_sim/counts")
    assert (counts["watches"], counts["lists"], counts["applies"]) == (0, 0, 0)
    assert specs(stage) == []
