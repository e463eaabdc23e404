"""DRA claims in a small agent: the real preparer, CNI's part and the healer, with a cluster that is a file."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent.config import Config, Dra, Resource
from agent.edits.claim_specs import ClaimSpecs
from agent.errors import AgentError, ClaimConflict
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
from cni.pod_devices import PodClaims
from deviceplugin.dra.attributes import Facts, StableFacts, stable_facts
from deviceplugin.dra.devices import DraDevice, devices_of
from deviceplugin.dra.planner import Planner
from deviceplugin.dra.pods import GpuAsker, PodGroups
from deviceplugin.dra.preparer import Allocations, ClaimFiles, DeviceUsers, Patience, Preparer
from tests.cni import tiny_node
from tests.cni.fixed_grants import FixedGrants
from tests.cni.networks import network
from tests.soak.kubelet import DRIVER, POOL, Api, Cluster, Kubelet

SPECS = "cdi"
"""In the node's folder."""
EARLY = Resource("claimed/vf", "vf", offer="dra")
"""The first VF."""
LATE = Resource("claimed/late-vf", "vf", offer="dra", binding="late")
"""The others."""
FIRST = tiny_node.vf(0)
NETWORK: Mapping[str, Any] = {"vlan": 11, "trust": "on"}
"""What the class of all claims sets devices up with; addresses come on top."""
PATIENCE = Patience(prepare=0.3, unprepare=0.3, poll=0.005, slow_poll=0.02)


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
        self._api = Api(folder)
        self._specs = ClaimSpecs(folder / SPECS)
        self._snapshot = snapshot
        self.of_pods = PodClaims(self._config, node, Kubelet(folder), Latest(self._api))
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
        ledger, api, kubelet = self._node.ledger, self._api, Kubelet(self._folder)
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
        return [("default", name) for name in Cluster.read(self._folder).by_claim]


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
