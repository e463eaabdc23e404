"""The stand-in for the API server, as a user and the scheduler have to do with it, and kubelet's end of the driver."""

from __future__ import annotations

import json
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from proto.dra.v1 import api_pb2, api_pb2_grpc

DRIVER, NODE = "nodefabric.io", "sim-node"
ANSWER_SECONDS = 0.005
"""So long the API server takes for each answer, beside its work."""
SLICES = f"/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.nodeName%3D{NODE}"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
CALL_SECONDS = 45.0
WRITES = ("applies", "merges", "created", "replaced", "deletes")


class Cluster:
    """One stand-in, over HTTP."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self, method: str, path: str, document: Any = None) -> Any:
        """Ask for something. Raises OSError for anything but success."""
        body = None if document is None else json.dumps(document).encode()
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method=method)
        with self._opener.open(request, timeout=30) as answer:
            return json.load(answer)

    def answer_slowly(self) -> None:
        """Take a while for each answer from now on."""
        self.ask("PUT", "/_sim/fault", {"delay_seconds": ANSWER_SECONDS})

    def writes(self) -> int:
        """Tell how often anything was written so far, by anybody."""
        counts = self.ask("GET", "/_sim/counts")
        return sum(int(counts[name]) for name in WRITES)

    def applies(self) -> int:
        """Tell how often anything was applied: that is how the agent writes, and nobody else."""
        return int(self.ask("GET", "/_sim/counts")["applies"])

    def slices(self) -> list[Mapping[str, Any]]:
        """List the node's slices."""
        found: list[Mapping[str, Any]] = self.ask("GET", SLICES)["items"]
        return found

    def is_whole(self) -> bool:
        """Tell whether all of the node's slices are there."""
        slices = self.slices()
        return bool(slices) and len(slices) == slices[0]["spec"]["pool"]["resourceSliceCount"]

    def devices(self, resource: str) -> list[Mapping[str, Any]]:
        """List what is published of a resource, in its order."""
        devices = [device for found in self.slices() for device in found["spec"].get("devices", ())]
        return [device for device in devices if device["attributes"]["resource"]["string"] == resource]

    def wipe(self) -> None:
        """Delete the node's slices, as kubelet does at its start."""
        self.ask("DELETE", SLICES)

    def allocate(self, name: str, device: Mapping[str, Any], pod: Mapping[str, str]) -> api_pb2.Claim:
        """Make a claim for one device that a pod may use; `pod` has name and UID. Return it as kubelet calls it."""
        head = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim"}
        asked = {"requests": [{"name": "nic", "exactly": {"deviceClassName": "rdma-vf"}}]}
        metadata = {"name": name, "namespace": "default"}
        made = self.ask("POST", CLAIMS, {**head, "metadata": metadata, "spec": {"devices": asked}})
        term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [NODE]}]}
        result = {"request": "nic", "driver": DRIVER, "pool": NODE, "device": device["name"], **_share_of(device)}
        allocation = {"devices": {"results": [result]}, "nodeSelector": {"nodeSelectorTerms": [term]}}
        status = {"allocation": allocation, "reservedFor": [{"resource": "pods", **pod}]}
        self.ask("PUT", f"{CLAIMS}/{name}/status", {**made, "status": status})
        return api_pb2.Claim(namespace="default", name=name, uid=made["metadata"]["uid"])

    def has_status(self, name: str) -> bool:
        """Tell whether anybody has written of a claim's devices."""
        return bool(self.ask("GET", f"{CLAIMS}/{name}")["status"].get("devices"))

    def remove(self, name: str) -> None:
        """Delete a claim."""
        self.ask("DELETE", f"{CLAIMS}/{name}")


def _share_of(device: Mapping[str, Any]) -> Mapping[str, Any]:
    """Tell what the scheduler adds to the result for a device that several may have a part of."""
    if not device.get("allowMultipleAllocations"):
        return {}
    return {"shareID": str(uuid.uuid4()), "consumedCapacity": dict.fromkeys(device["capacity"], "1")}


class Driver:
    """kubelet's end of the driver's socket."""

    def __init__(self, kubelet: Path) -> None:
        """`kubelet` is its folder."""
        (socket,) = (kubelet / "plugins" / DRIVER).glob("dra-*.sock")
        self._channel = grpc.insecure_channel(f"unix:{socket}")
        self._stub = api_pb2_grpc.DRAPluginStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def prepare(self, claim: api_pb2.Claim) -> Sequence[api_pb2.Device]:
        """Have one claim prepared. Raises RuntimeError if it is not."""
        request = api_pb2.NodePrepareResourcesRequest(claims=[claim])
        return prepared(claim, self._stub.NodePrepareResources(request, timeout=CALL_SECONDS))

    def begin_to_prepare(self, claim: api_pb2.Claim) -> Any:
        """Have it prepared while the caller goes on: a future of the answer."""
        request = api_pb2.NodePrepareResourcesRequest(claims=[claim])
        return self._stub.NodePrepareResources.future(request, timeout=CALL_SECONDS)

    def unprepare(self, *claims: api_pb2.Claim) -> None:
        """Have claims unprepared. Raises RuntimeError if one is not."""
        request = api_pb2.NodeUnprepareResourcesRequest(claims=claims)
        answer = self._stub.NodeUnprepareResources(request, timeout=CALL_SECONDS)
        for problem in _problems(claims, answer):
            raise RuntimeError(problem)


def prepared(claim: api_pb2.Claim, answer: api_pb2.NodePrepareResourcesResponse) -> Sequence[api_pb2.Device]:
    """Return a claim's devices. Raises RuntimeError if it has none that a container could get."""
    for problem in _problems([claim], answer):
        raise RuntimeError(problem)
    devices = answer.claims[claim.uid].devices
    if not devices or not all(device.cdi_device_ids for device in devices):
        raise RuntimeError(f"claim {claim.name} was prepared without a device for its containers")
    return list(devices)


def _problems(claims: Sequence[api_pb2.Claim], answer: Any) -> Iterator[str]:
    for claim in claims:
        if claim.uid not in answer.claims:
            yield f"there is no answer for claim {claim.name}"
        elif error := answer.claims[claim.uid].error:
            yield f"claim {claim.name}: {error}"
