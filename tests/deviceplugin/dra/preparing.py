"""A node that prepares claims: real books and CDI specs, and stand-ins for whom it asks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from agent.config import Config, Resource
from agent.edits.specs import Specs
from agent.errors import Unavailable
from agent.kubelet.cri import Sandbox
from agent.kubelet.podresources import ContainerDevices, DeviceAssignment, PodDevices
from agent.ledger import Ledger
from agent.model.allocation import Attachment, Claim, ClaimRef, PodRef, Quarantine
from agent.model.device import Snapshot
from agent.offer.offer import Offer
from agent.offer.units import plain_offer
from agent.state import Latest
from deviceplugin.dra.attributes import Facts, StableFacts, stable_facts
from deviceplugin.dra.devices import DraDevice
from deviceplugin.dra.planner import Planner
from deviceplugin.dra.pods import Allocations, GpuAsker
from deviceplugin.dra.preparer import ClaimFiles, DeviceUsers, Patience, Preparer
from tests.deviceplugin.dra.claim_documents import DRIVER, NODE, POD, REF, claim, result
from tests.node import attach, node, owner

VF = Resource("rdma/vf", "vf", offer="dra")
LATE = Resource("rdma/vf", "vf", offer="dra", binding="late")
HCA = Resource("rdma/hca", "hca", offer="dra", shares=2)
NIC = Resource("rdma/nic", "nic", offer="dra")
QUICK = Patience(prepare=0.3, unprepare=0.3, poll=0.005, slow_poll=0.02)
PATIENT = Patience(prepare=20, unprepare=20, poll=0.005, slow_poll=0.02)
FIRST = "0000:12:00.1"
OTHER = ClaimRef("11111111-2222-4333-8444-555555555555", "team", "other")
OTHER_POD = PodRef("team", "other-pod", "ffffffff-2222-4333-8444-555555555555")


def listed(offer: Offer, config: Config) -> tuple[DraDevice, ...]:
    """A plain device for each unit; of late-bound resources one for each adapter, named by its number: slots-0."""
    found = []
    for resource in config.claimable:
        units = offer.claimable[resource.name]
        if resource.binding == "late":
            ports = list(dict.fromkeys(offer.distances.port(unit.device) for unit in units))
            for number, port in enumerate(ports):
                here = tuple(unit for unit in units if offer.distances.port(unit.device) == port)
                found.append(DraDevice(f"slots-{number}", resource.name, {}, units=here))
        else:
            found += [
                DraDevice(f"{resource.kind}-{i}", resource.name, {}, units=(unit,)) for i, unit in enumerate(units)
            ]
    return tuple(found)


@dataclass
class Others:
    """The API server, kubelet and what heals, as they answer now."""

    claims: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """By UID."""
    pods: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """By name."""
    of_drivers: dict[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    held: dict[str, Mapping[str, Mapping[str, Sequence[str]]]] = field(default_factory=dict)
    """Pod → container → resource → units; a pod that is missing is one that kubelet does not know."""
    files: dict[str, Sequence[str]] = field(default_factory=dict)
    """Resource → the device files that its plugin gave, to any container."""
    is_away: bool = False
    on_heal: Callable[[str], object] = str
    sandboxes: Sequence[Sandbox] = ()
    asked: list[str] = field(default_factory=list)

    def get(self, ref: ClaimRef) -> Mapping[str, Any] | None:
        self._ask(f"claim {ref}")
        return self.claims.get(ref.uid)

    def claim(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        self._ask(f"claim {namespace}/{name}")
        return next((c for c in self.claims.values() if c["metadata"]["name"] == name), None)

    def pod(self, pod: PodRef) -> Mapping[str, Any] | None:
        self._ask(f"pod {pod}")
        return self.pods.get(pod.name)

    def slices(self, driver: str) -> Sequence[Mapping[str, Any]]:
        self._ask(f"slices {driver}")
        return self.of_drivers.get(driver, ())

    def heal(self, device: str) -> str | None:
        self.on_heal(device)
        return None

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if self.is_away:
            raise Unavailable("the API server is away")


@dataclass
class KubeletStandIn:
    """Tells what pods hold."""

    others: Others

    def sandboxes(self) -> Sequence[Sandbox]:
        return self.others.sandboxes

    def pods(self) -> Sequence[PodDevices]:
        namespace = POD.namespace
        return [found for name in self.others.held if (found := self.pod(PodRef(namespace, name))) is not None]

    def files(self, pod: PodRef, container: str, resource_name: str) -> Sequence[str]:
        return self.others.files.get(resource_name, ())

    def pod(self, pod: PodRef) -> PodDevices | None:
        held = self.others.held.get(pod.name)
        if held is None:
            return None
        return PodDevices(
            pod,
            tuple(
                ContainerDevices(name, tuple(DeviceAssignment(r, tuple(units)) for r, units in resources.items()))
                for name, resources in held.items()
            ),
        )


class Desk:
    """A node with some resources for claims, and one who prepares them."""

    def __init__(
        self,
        folder: Path,
        *resources: Resource,
        snapshot: Snapshot | None = None,
        config: Config | None = None,
        boot_id: str = "boot",
        patience: Patience = QUICK,
    ) -> None:
        self.config = replace(config or Config(resources=resources or (VF,)), cdi_dir=folder / "cdi")
        self.offer = plain_offer(self.config.resources, snapshot if snapshot is not None else node())
        self.ledger = Ledger.open(folder / "ledger.db", boot_id)
        self.folder = folder / "cdi"
        self.specs = Specs(self.ledger, self.folder)
        self.others = Others()
        self.catalog: Latest[tuple[DraDevice, ...]] = Latest(listed(self.offer, self.config))
        self.facts = Latest(Facts(stable_facts(self.offer, StableFacts())))
        self.preparer = self.made(patience)

    def made(self, patience: Patience, ledger: Any = None, specs: Any = None) -> Preparer:
        """Make one who prepares, with the desk's own books and specs or others."""
        others, kubelet = self.others, KubeletStandIn(self.others)
        books, gpus = ledger or self.ledger, GpuAsker(kubelet, others)
        planner = Planner(Latest(self.config), Latest(self.offer), self.catalog, books, gpus, others)
        holders = DeviceUsers(books, others, kubelet, cast(Any, others))
        files = ClaimFiles(specs or self.specs, Latest(self.config), self.catalog, self.facts)
        return Preparer(Allocations(kubelet, others, DRIVER, NODE), planner, books, files, holders, patience)

    def claimed(self, ref: ClaimRef, document: Mapping[str, Any]) -> ClaimRef:
        """Have the API server know a claim."""
        self.others.claims[ref.uid] = document
        return ref

    def attach(self, device: str, pod: PodRef, claim_uid: str = "", container_id: str = "sandbox-1") -> Attachment:
        """Have a device in a pod."""
        row = attach(self.ledger, device, owner(container_id, pod=pod), claim_uid=claim_uid)
        self.ledger.finish_attach([row.attachment_id], {})
        return row

    def detached(self, row: Attachment) -> None:
        """Have a device back."""
        self.ledger.begin_detach([row.attachment_id])
        self.ledger.finish_detach(row)


Desks = Callable[..., Desk]


@pytest.fixture
def desks(tmp_path: Path) -> Iterator[Desks]:
    """Make the desk of a node. The books of the one before are closed, as those of an agent that has ended."""
    with ExitStack() as books:

        def made(*resources: Resource, **more: Any) -> Desk:
            books.close()
            desk = Desk(tmp_path, *resources, **more)
            books.callback(desk.ledger.close)
            return desk

        yield made


@pytest.fixture
def desk(desks: Desks) -> Desk:
    return desks(VF, HCA)


def prepared(desk: Desk, *results: Any, **more: Any) -> Any:
    """Prepare a claim of our pod."""
    return desk.preparer.prepare(desk.claimed(REF, claim(*(results or (result("nic", "vf-0"),)), **more)))


def of_another(desk: Desk, device: str = "vf-0") -> ClaimRef:
    """Another claim, of another pod."""
    return desk.claimed(OTHER, claim(result("nic", device), ref=OTHER, pods=[OTHER_POD], owner=OTHER_POD))


def had_alone(desk: Desk) -> dict[str, ClaimRef]:
    """Map each device that a claim has alone to the claim."""
    holds = ((found, hold) for found in desk.ledger.claims() for hold in found.devices if hold.exclusive)
    return {hold.device: found.ref for found, hold in holds}


def spec(desk: Desk, uid: str = REF.uid) -> dict[str, Any]:
    """What the runtime finds of a claim: CDI name → edits."""
    document = json.loads((desk.folder / f"nodefabric-claim-{uid}.json").read_text())
    return {device["name"]: device["containerEdits"] for device in document["devices"]}


def files(desk: Desk) -> list[str]:
    """List the specs that are there, in whole or in part: beside each stands a copy of its claim's rows."""
    return sorted({f"{path.stem}.json" for path in desk.folder.iterdir()}) if desk.folder.exists() else []


class Counting:
    """Books that count how often a claim was tried, or a device looked for."""

    def __init__(self, books: Ledger) -> None:
        self._books = books
        self.looks = 0

    def prepare_claim(self, claim: Claim) -> Claim:
        self.looks += 1
        return self._books.prepare_claim(claim)

    def quarantines(self) -> tuple[Quarantine, ...]:
        self.looks += 1
        return self._books.quarantines()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._books, name)
