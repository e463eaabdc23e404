"""The second part of the demo: a VF by claim (DRA). The scheduler's part is played here."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import yaml

from agent.errors import AgentError
from agent.model.device import Snapshot
from agent.placement import Distances
from agent.report import status_text
from hack.sim import scheduler
from hack.sim.stage import CONFIG, Stage, in_pod, wait

POD, CLAIM = "trainer-3", "trainer-3-vf"
UNITS = "nodefabric.io/units"
CONFIG_BY_CLAIM: Mapping[str, Any] = {
    **CONFIG,
    "resources": [
        {**each, "offer": "dra", "binding": "late"} if each["name"] == "rdma/vf" else each
        for each in CONFIG["resources"]
    ],
}
PODS_CLAIM = f"""\
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: {CLAIM}, namespace: default}}
spec:
  devices:
    requests:
      - name: vf
        exactly: {{deviceClassName: rdma-vf, count: 1}}
"""
PODS_SPEC = f"""\
spec:
  resourceClaims:
    - {{name: vf, resourceClaimName: {CLAIM}}}
  containers:
    - name: worker
      image: pytorch
      resources:
        limits: {{nvidia.com/gpu: 1}}
        claims: [{{name: vf}}]
"""


def play(stage: Stage, port: int, snapshot: Snapshot) -> Iterator[str]:
    """Have one pod get a VF by a claim and give it back, and tell what happens.

    Raises AgentError if the claim's CDI spec is not there with the pod and gone after it.
    """
    yield "\nNow by claim (DRA): in the configuration rdma/vf gets `offer: dra, binding: late`, and the agent reads it"
    stage.write_config(CONFIG_BY_CLAIM)
    places = wait("the ResourceSlice", partial(_places, port))
    wait("kubelet to find the driver", partial(_is_registered, stage))
    yield f"  It has published a ResourceSlice of {len(places)} devices, each a place with its VFs, for the scheduler:"
    yield from (f"    {name}: {units} VFs" for name, units in places.items())
    uid = str(uuid.uuid4())
    head = f"apiVersion: v1\nkind: Pod\nmetadata: {{name: {POD}, namespace: default, uid: {uid}}}\n"
    yield "Creating a claim, and a pod that has it and gets its GPU from the device plugin\n"
    yield f"{PODS_CLAIM}---\n{head}{PODS_SPEC}"
    place = list(places)[-1]
    result = {"request": "vf", "device": place, "shareID": str(uuid.uuid4()), "consumedCapacity": {UNITS: "1"}}
    claim_uid = scheduler.claim(port, CLAIM, {"name": POD, "uid": uid}, result)
    yield f"The demo plays the scheduler, which cannot see this GPU: it allocates a VF of {place}"
    (stage.folder / f"manifests/{POD}.yaml").write_text(f"{head}{PODS_SPEC}")
    pod = stage.await_pod(POD)
    spec = stage.folder / f"cdi-specs/nodefabric-claim-{claim_uid}.json"
    if not spec.exists():
        raise AgentError(f"{spec.name} is not there")
    yield "kubelet has had the claim prepared: the agent has chosen the free VF nearest to the GPU that the pod has."
    yield "The CNI plugin has brought it in, and the container gets its device files by the CDI name\n"
    yield from what_it_got(stage, pod, snapshot)
    yield f"\nInside {POD}: ip -brief address\n"
    yield in_pod(pod, "ip", "-brief", "address")
    yield "The claim's status\n"
    yield yaml.safe_dump(wait("the claim's status", partial(_status, port)), sort_keys=False)
    yield "The node's books (nodefabric status)\n"
    yield status_text.text(stage.status(), time.time())
    yield "\nDeleting the pod"
    stage.end_pods(POD)
    if spec.exists():
        raise AgentError(f"{spec.name} is left")
    yield "  the claim is unprepared, and its CDI spec is gone"


def what_it_got(stage: Stage, pod: Mapping[str, Any], snapshot: Snapshot) -> list[str]:
    """Lay out the pod's GPU and VF, how near they are, and what its container was told of the VF."""
    (container,) = pod["containers"]
    gpu = snapshot.gpu_by_uuid[container["devices"]["nvidia.com/gpu"][0]]
    row = next(row for row in stage.status()["attachments"] if row["pod"] == f"default/{POD}")
    near = Distances(snapshot).distance(gpu.uuid, row["device"]).name
    rows = [(pod["name"], f"GPU{gpu.index} {gpu.pci_address}", row["device"], near, row["ifname"])]
    return [*status_text.table(("POD", "GPU", "VF", "GPU-VF", "INTERFACE"), rows), *container["cdi_devices"]]


def _places(port: int) -> Mapping[str, int] | None:
    """Return how many VFs each device of the slices stands for; None if there are none."""
    return {one["name"]: int(one["capacity"][UNITS]["value"]) for one in scheduler.devices(port)} or None


def _is_registered(stage: Stage) -> bool | None:
    return stage.status().get("dra", {}).get("registered") or None


def _status(port: int) -> list[dict[str, Any]] | None:
    """Return what the agent reports about the claim's devices; None as long as it reports nothing."""
    found = scheduler.call(port, "GET", f"{scheduler.CLAIMS}/{CLAIM}")
    devices: list[dict[str, Any]] | None = found.get("status", {}).get("devices")
    return devices
