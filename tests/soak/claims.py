"""DRA claims in a small agent: the real preparer, CNI's part and the healer, with a cluster that is a file."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent.config import Config, Dra, Resource
from agent.edits.claim_specs import ClaimSpecs
from agent.errors import AgentError, ClaimConflict, Unavailable
from agent.kubelet.cri import Sandbox
from agent.kubelet.podresources import ClaimedDevice, ContainerDevices, PodDevices
from agent.model.allocation import Attachment, ClaimRef, PodRef
from agent.model.device import Snapshot
from agent.offer.offer import Offer
from agent.offer.units import plain_offer
from agent.reconcile import claims as healing
from agent.reconcile.view import Outside, View
from agent.state import Latest
from cni.add_facts import FactsWriter
from cni.attachment import Attachments
from cni.call import GrantedDevice, Node
from cni.held import PodClaims
from deviceplugin.dra.attributes import Facts, StableFacts, stable_facts
from deviceplugin.dra.devices import DraDevice, devices_of
from deviceplugin.dra.planner import Planner
from deviceplugin.dra.pods import GpuAsker, PodGroups
from deviceplugin.dra.preparer import Allocations, ClaimFiles, DeviceUsers, Patience, Preparer
from tests.cni import tiny_node
from tests.cni.fixed_grants import FixedGrants
from tests.cni.networks import network
from tests.soak.slots import SPECS

CLUSTER = "cluster.json"
"""In the node's folder: what the API server and kubelet say, as `Cluster` has it."""
API_AWAY = "api-away"
DRIVER, POOL = "nodefabric.io", "tiny"
EARLY = Resource("claimed/vf", "vf", offer="dra")
"""The first VF."""
LATE = Resource("claimed/late-vf", "vf", offer="dra", binding="late")
"""The others."""
FIRST = tiny_node.vf(0)
NETWORK: Mapping[str, Any] = {"vlan": 11, "trust": "on"}
"""What the class of all claims sets devices up with; addresses come on top."""
PATIENCE = Patience(prepare=0.3, unprepare=0.3, poll=0.005, slow_poll=0.02)


@dataclass(frozen=True)
class Cluster:
    """What the API server has, and what kubelet says of its pods."""

    claims: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By UID, as the API server has them."""
    pods: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Pods that kubelet lists → UIDs of the claims that it says they have."""

    @classmethod
    def read(cls, folder: Path) -> Cluster:
        """Read what a node's folder says."""
        path = folder / CLUSTER
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def write(self, folder: Path) -> None:
        """Have a node's folder say so."""
        fresh = folder / f"{CLUSTER}.new"
        fresh.write_text(json.dumps({"claims": self.claims, "pods": self.pods}))
        fresh.rename(folder / CLUSTER)


class _Api:
    """An API server that is a file, for those who read claims."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, ref: ClaimRef) -> Mapping[str, Any] | None:
        return self._cluster().claims.get(ref.uid)

    def claim(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        return next((c for c in self._cluster().claims.values() if c["metadata"]["name"] == name), None)

    def pod(self, pod: PodRef) -> Mapping[str, Any] | None:
        return None

    def slices(self, driver: str) -> Sequence[Mapping[str, Any]]:
        return ()

    def _cluster(self) -> Cluster:
        if (self._folder / API_AWAY).exists():
            raise Unavailable("the API server is away")
        return Cluster.read(self._folder)


class _Kubelet:
    """Says which claims pods have, whoever prepared them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def sandboxes(self) -> tuple[Sandbox, ...]:
        return ()

    def pods(self) -> Sequence[PodDevices]:
        return ()

    def files(self, pod: PodRef, container: str, resource_name: str) -> Sequence[str]:
        return ()

    def pod(self, pod: PodRef) -> PodDevices | None:
        cluster = Cluster.read(self._folder)
        if pod.name not in cluster.pods:
            return None
        names = [cluster.claims[uid]["metadata"]["name"] for uid in cluster.pods[pod.name] if uid in cluster.claims]
        claimed = tuple(ClaimedDevice(pod.namespace, name, DRIVER, POOL, "") for name in names)
        return PodDevices(pod, (ContainerDevices("worker", claimed=claimed),))


class _Healer(healing.Claims):
    """Every claim is old, and every pause over: the state machine's time is not the clock's."""

    def heal(self, view: View) -> None:
        super().heal(replace(view, asked_at=time.time() + 2 * healing.NEW_SECONDS))


class ClaimParts:
    """What an agent has for claims."""

    def __init__(self, folder: Path, node: Node, snapshot: Latest[Snapshot]) -> None:
        self._folder = folder
        self._node = node
        self._config = Latest(_config(folder))
        self._stable = StableFacts()
        self._offer = Latest(Offer())
        self._catalog: Latest[tuple[DraDevice, ...]] = Latest(())
        self._facts = Latest(Facts(self._stable))
        self._api = _Api(folder)
        self._specs = ClaimSpecs(folder / SPECS)
        self._snapshot = snapshot
        self.of_pods = PodClaims(self._config, node, _Kubelet(folder), Latest(self._api))
        nobody: Any = None
        self.facts = FactsWriter(node, nobody, self._specs, nobody, nobody)
        self._preparer: Preparer | None = None
        self.look()

    def look(self) -> None:
        """Offer what there is now."""
        units = {r.name: plain_offer((r,), self._snapshot.value).claimable[r.name] for r in (EARLY, LATE)}
        for name, found in units.items():  # no device is of two resources
            units[name] = tuple(unit for unit in found if (unit.device == FIRST) == (name == EARLY.name))
        offer = Offer(self._snapshot.value, claimable=units)
        self._stable = stable_facts(offer, self._stable)
        self._offer.set(offer)
        self._facts.set(Facts(self._stable))
        self._catalog.set(devices_of(self._config.value, offer, self._facts.value))

    def serve(self, attachments: Attachments) -> None:
        """Be there for kubelet's calls."""
        ledger, api, kubelet = self._node.ledger, self._api, _Kubelet(self._folder)
        planner = Planner(self._config, self._offer, self._catalog, ledger, GpuAsker(kubelet, api), api)
        users = DeviceUsers(ledger, api, kubelet, attachments)
        files = ClaimFiles(self._specs, self._config, self._catalog, self._facts)
        self._preparer = Preparer(
            Allocations(api, PodGroups(kubelet, api), DRIVER, POOL), planner, ledger, files, users, PATIENCE
        )

    def healer(self, outside: Outside) -> healing.Claims:
        """Make what heals claims."""
        clock = itertools.count(1.0, 2 * healing.ASK_SECONDS)
        reader: Latest[Any] = Latest(self._api)
        return _Healer(self._node.ledger, self._specs, self._snapshot, outside, reader, clock.__next__)

    def prepare(self, ref: ClaimRef) -> Any:
        """Carry out NodePrepareResources for one claim: the CDI names, or what is wrong."""
        assert self._preparer is not None
        try:
            return [name for device in self._preparer.prepare(ref) for name in device.cdi_device_ids]
        except AgentError as error:
            return {"error": str(error)}

    def unprepare(self, ref: ClaimRef) -> Any:
        """Carry out NodeUnprepareResources for one claim: nothing, or what is wrong."""
        assert self._preparer is not None
        try:
            self._preparer.unprepare(ref)
        except AgentError as error:
            return {"error": str(error)}
        return []

    def listed(self) -> Collection[tuple[str, str]]:
        """List the pods that kubelet knows."""
        return [("default", name) for name in Cluster.read(self._folder).pods]


@dataclass
class GrantsAndClaims(FixedGrants):
    """What a file says of units, and the books of claims."""

    claims: PodClaims | None = None
    facts: FactsWriter | None = None

    def devices(self, pod: PodRef) -> Sequence[GrantedDevice]:
        assert self.claims is not None
        return (*self.claims.devices(pod), *super().devices(pod))

    def claimed(self, pod: PodRef, device: str) -> GrantedDevice | None:
        assert self.claims is not None
        return self.claims.claimed(pod, device)

    def entered(self, row: Attachment, netns: int) -> None:
        assert self.facts is not None
        self.facts.entered(row, netns)


def granted_or_not(grant: Any, *arguments: Any) -> Any:
    """Write a grant, unless a claim has what it is about."""
    try:
        return grant(*arguments)
    except ClaimConflict as error:
        return {"error": str(error)}


def ref_of(order: Mapping[str, Any]) -> ClaimRef:
    """Read which claim an order is about."""
    return ClaimRef(order["uid"], order["namespace"], order["name"])


def ipam(folder: Path, number: int) -> dict[str, Any]:
    """Configure addresses, one of each family, from the plugin that notes its calls."""
    ranges = [[{"subnet": f"10.{number}.0.0/16"}], [{"subnet": f"fd{number:02}::/64"}]]
    return {"type": "journalled", "dataDir": str(folder / "leases"), "ranges": ranges}


def _config(folder: Path) -> Config:
    joined = network({"name": "claims", **NETWORK, "ipam": ipam(folder, 11)})
    told = Dra(metadata=True)
    return Config(resources=(EARLY, LATE), networks=(joined,), dra=told, kubelet_dir=folder / "kubelet")
