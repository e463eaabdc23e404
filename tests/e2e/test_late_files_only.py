"""Adapters that have no interface (EFA), bound late: their character devices come beside the pod's GPU, and no more."""

from __future__ import annotations

import json

from agent.model.topology import Locality
from agent.placement import Distances
from hack.sim.stage import CONFIG, Stage, settled

ADAPTERS = ("0000:10:1b.0", "0000:20:1b.0", "0000:90:1b.0", "0000:a0:1b.0")


def spec_of(stage: Stage, kind: str) -> list[tuple[list[str], list[str]]]:
    """List variables and device files of each spec of a kind."""
    found = []
    for path in (stage.folder / "cdi-specs").glob("nodefabric-slot-*.json"):
        document = json.loads(path.read_text())
        if document["kind"] == f"nodefabric.io/{kind}":
            edits = document["devices"][0]["containerEdits"]
            found.append((edits["env"], [node["path"] for node in edits["deviceNodes"]]))
    return found


def test_the_files_of_the_adapters_beside_the_gpus_come_into_the_pod_and_no_interface(stage: Stage) -> None:
    stage.build_node("efa")
    resources = [
        {"name": "ex.com/hca", "kind": "hca", "shares": 1, "binding": "late", "select": {"pciAddresses": ADAPTERS[:2]}},
        {"name": "ex.com/nic", "kind": "nic", "binding": "late", "select": {"pciAddresses": ADAPTERS[2:3]}},
        {"name": "ex.com/early", "kind": "nic", "select": {"pciAddresses": ADAPTERS[3:]}},
        {"name": "nvidia.com/gpu", "kind": "gpu"},
    ]
    stage.write_config({**CONFIG, "resources": resources, "networks": []})
    stage.write_conflist()
    stage.start_kubelet("--seed", "7")
    stage.start_agent()
    stage.await_ready()
    snapshot = stage.machine.scan()
    pod = stage.run_pod("a", {"ex.com/hca": 1, "nvidia.com/gpu": 1})
    (gpu,) = pod["containers"][0]["devices"]["nvidia.com/gpu"]
    [(env, files)] = spec_of(stage, "hca")
    [device] = [d for d in snapshot.devices for r in d.rdma_devices if r.char_device("uverbs")[0].path in files]
    distances = Distances(snapshot)
    assert distances.distance(gpu, device.address) == min(distances.distance(gpu, a) for a in ADAPTERS) < Locality.NODE
    assert f"PCIDEVICE_EX_COM_HCA={device.address}" in env
    stage.run_pod("b", {"ex.com/nic": 1, "ex.com/early": 1})
    [(env, _)] = spec_of(stage, "nic")
    assert f"PCIDEVICE_EX_COM_NIC={ADAPTERS[2]}" in env
    assert stage.status()["attachments"] == []
    for name in ("a", "b"):
        stage.end_pods(name)
    assert settled(lambda: list(map(str, (*spec_of(stage, "hca"), *spec_of(stage, "nic"))))) == []
