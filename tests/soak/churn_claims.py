"""The scheduler's, the API server's and kubelet's part of claims in a churn, with the agent's real door.

What a claim gives back goes to the next one first, and after a forced deletion that is while the pod still lives.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from hack.sim.scheduler import CLAIMS, call, claim, devices, start_api_server
from hack.sim.stage import Stage, wait
from proto.dra.v1 import api_pb2, api_pb2_grpc

DRIVER = "nodefabric.io"
EARLY, LATE, SHARES = "claimed/vf", "claimed/late", "claimed/hca"
PCI = "resource.kubernetes.io/pciBusID"
CALL_SECONDS = 45.0
PATIENCE_SECONDS = 90.0


def resources(pfs: Sequence[str]) -> list[dict[str, Any]]:
    """Spell the resources for claims: of the VFs of one adapter, of two bound late, and shares of the last one."""
    early, one, two, shared = ([f"{pf}"] for pf in pfs)
    common = {"offer": "dra", "network": "claims"}
    return [
        {"name": EARLY, "kind": "vf", **common, "select": {"rootDevices": early}},
        {"name": LATE, "kind": "vf", "binding": "late", **common, "select": {"rootDevices": one + two}},
        {"name": SHARES, "kind": "hca", "offer": "dra", "shares": 8, "select": {"rootDevices": shared}},
    ]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one result of a claim gets."""

    resource: str
    device: str
    """In the slices."""
    address: str = ""
    """Of a VF that is bound early."""
    capacity: str = ""
    """What it takes one of, where several may have the device."""

    def result(self, number: int) -> dict[str, Any]:
        """Spell it as a result of an allocation."""
        part = {"shareID": str(uuid.uuid4()), "consumedCapacity": {self.capacity: "1"}} if self.capacity else {}
        return {"request": f"request-{number}", "device": self.device, **part}


@dataclass(frozen=True, slots=True)
class PodClaim:
    """One claim, and its pod."""

    uid: str
    name: str
    pod_uid: str
    pieces: tuple[Piece, ...]

    @property
    def vfs(self) -> int:
        """How many interfaces the pod gets."""
        return sum(piece.resource != SHARES for piece in self.pieces)

    @property
    def addresses(self) -> frozenset[str]:
        """The VFs that are known beforehand."""
        return frozenset(piece.address for piece in self.pieces if piece.address)


class Desk:
    """Hands out devices by claims, and has them prepared and unprepared as kubelet does. For many threads."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._guard = threading.Lock()
        self._free: dict[str, list[Piece]] = {}
        for name in ("plugins", "plugins_registry"):  # as kubelet has made them
            (stage.folder / "kubelet" / name).mkdir()
        self._port = start_api_server(stage)
        self.agent_options = ("--kubeconfig", str(stage.folder / "kubeconfig"))

    def open(self) -> None:
        """Learn from the slices what there is to hand out."""
        found = wait("the slices", lambda: found if len(found := self._pieces()) == 3 else None)
        self._free = found

    def hand_out(self, pod: str, rng: random.Random) -> PodClaim | None:
        """Make a claim for a pod, as the scheduler does; None if nothing is left."""
        wanted = rng.choice(([EARLY], [LATE], [LATE, LATE], [EARLY, LATE], [SHARES], [EARLY, SHARES]))
        with self._guard:
            pieces = tuple(self._free[name].pop() for name in wanted if self._free[name])
        if not pieces:
            return None
        pod_uid = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        of = {"name": pod, "uid": pod_uid}
        owner = {"apiVersion": "v1", "kind": "Pod", **of, "controller": True}
        name = f"claim-of-{pod}"
        results = [piece.result(number) for number, piece in enumerate(pieces)]
        return PodClaim(claim(self._port, name, of, *results, ownerReferences=[owner]), name, pod_uid, pieces)

    def take_back(self, of: PodClaim) -> None:
        """Delete a claim. The next one gets what it had."""
        call(self._port, "DELETE", f"{CLAIMS}/{of.name}")
        with self._guard:
            for piece in of.pieces:
                self._free[piece.resource].append(piece)

    def prepare(self, of: PodClaim) -> str:
        """Have a claim prepared, however often it must be asked for; what was wrong last, or nothing."""
        return self._insist(of, "NodePrepareResources", api_pb2.NodePrepareResourcesRequest)

    def unprepare(self, of: PodClaim) -> str:
        """Have a claim unprepared; what was wrong last, or nothing."""
        return self._insist(of, "NodeUnprepareResources", api_pb2.NodeUnprepareResourcesRequest)

    def _insist(self, of: PodClaim, method: str, request: Any) -> str:
        deadline = time.monotonic() + PATIENCE_SECONDS
        wanted = request(claims=[api_pb2.Claim(namespace="default", uid=of.uid, name=of.name)])
        while True:
            problem = self._ask(of.uid, method, wanted)
            if not problem or time.monotonic() > deadline:
                return problem
            time.sleep(0.2)

    def _ask(self, uid: str, method: str, wanted: Any) -> str:
        folder = self._stage.folder / "kubelet/plugins" / DRIVER
        for socket in folder.glob("dra-*.sock"):  # one of an agent that was killed may still be there
            with grpc.insecure_channel(f"unix:{socket}") as channel:
                try:
                    answer = getattr(api_pb2_grpc.DRAPluginStub(channel), method)(wanted, timeout=CALL_SECONDS)
                except grpc.RpcError:
                    continue
                return str(answer.claims[uid].error)
        return "the agent does not answer"

    def _pieces(self) -> dict[str, list[Piece]]:
        found: dict[str, list[Piece]] = {}
        for device in devices(self._port):
            resource = device["attributes"]["resource"]["string"]
            address = device["attributes"].get(PCI, {}).get("string", "") if resource == EARLY else ""
            capacities: Mapping[str, Any] = device.get("capacity") or {"": {"value": "1"}}
            for name, capacity in capacities.items():
                piece = Piece(resource, device["name"], address, name)
                found.setdefault(resource, []).extend([piece] * int(capacity["value"]))
        return found
