"""The agent in the place of two other device plugins, with their configurations as they are."""

from __future__ import annotations

import json
from pathlib import Path

from hack.sim.stage import Stage, wait

SRIOV = {
    "resourceList": [
        {"resourceName": "rail0", "selectors": {"rootDevices": ["0000:18:00.0#0-3"], "IsRdma": True}},
        {"resourceName": "rest", "selectors": [{"vendors": ["15b3"], "devices": ["101e"]}], "comment": "unknown"},
    ]
}
SHARED = {"configList": [{"resourceName": "hca", "rdmaHcaMax": 100, "selectors": {"deviceIDs": ["1021"]}}]}


def written(path: Path, document: object) -> str:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(document))
    fresh.rename(path)
    return str(path)


def test_pods_run_on_the_pools_of_both(stage: Stage) -> None:
    stage.build_node("h100-8gpu")
    stage.write_config({"resources": [], "networks": []})
    sriov, shared = stage.folder / "pcidp.json", stage.folder / "shared.json"
    options = ["--sriov-config", written(sriov, SRIOV), "--rdma-shared-config", written(shared, SHARED)]
    stage.start_kubelet("--seed", "5")
    stage.start_agent(*options)
    stage.await_ready()
    offered = {r["name"]: r["units"] for r in stage.status()["resources"]}
    assert offered == {"intel.com/rail0": 4, "intel.com/rest": 60, "rdma/hca": 100}

    (container,) = stage.run_pod("a", {"intel.com/rail0": 1, "rdma/hca": 1})["containers"]
    ((device, attached),) = [(row["device"], row["state"]) for row in stage.status()["attachments"]]
    assert attached == "attached"
    assert container["envs"]["PCIDEVICE_INTEL_COM_RAIL0"] == device
    info = json.loads(container["envs"]["PCIDEVICE_INTEL_COM_RAIL0_INFO"])[device]
    assert info["rdma"]["rdma_cm"] == "/dev/infiniband/rdma_cm"
    folder = stage.folder / "node/root/var/run/k8s.cni.cncf.io/devinfo/dp"
    (told,) = [json.loads(path.read_text()) for path in folder.iterdir()]
    assert told["pci"]["pci-address"] == device

    written(shared, {"configList": [{**SHARED["configList"][0], "rdmaHcaMax": 7}]})
    wait(
        "the new number", lambda: {r["name"]: r["units"] for r in stage.status()["resources"]}["rdma/hca"] == 7 or None
    )
    stage.end_pods("a")
    wait("the VF back", lambda: stage.status()["attachments"] == [] or None)
    assert "resourceList[1].comment: is not a known key" in stage.log("agent")
