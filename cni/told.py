"""ADD tells containers of their devices once these are in the pod: in CDI specs and files, see `agent.edits.told`.

What was found out goes into the rows, then the files are written, then the edits in the books, then the specs. The
containers are created after ADD, so an agent that is killed in between leaves an ADD that the next one, or DEL, undoes.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from agent.edits import told
from agent.edits.claim_specs import ClaimSpecs
from agent.edits.rails import Place, document, nccl_topology, paired
from agent.edits.spec_files import SpecFiles
from agent.edits.told import NOTED, Nic, RdmaFacts, Told
from agent.edits.unit_specs import UnitSpecs
from agent.errors import AgentError, HardwareError
from agent.hardware.sysfs.gids import Gid, best_first, find_gids, roce_ports
from agent.kubelet.podresources import PodDevices
from agent.model.allocation import Attachment, AttachmentState, PodRef, UnitSpec
from agent.model.claims import Claim
from agent.model.device import LinkLayer, is_pci_address
from agent.model.lldp import Neighbour
from agent.model.network_data import network_data
from agent.offer.offer import Offer
from agent.state import Latest
from cni.modes import rdma
from cni.node import Node
from cni.slots.bound import BoundSlots

GID_SECONDS = 1.0
"""How long the kernel may take to enter an address into the table of GIDs."""
POLL_SECONDS = 0.01
MAIN_IFNAME = "eth0"
"""What runtimes call a pod's interface to the cluster's network."""

log = logging.getLogger(__name__)


class AsksKubelet(Protocol):
    """Asks kubelet's PodResources. May be called on any thread but the event loop's."""

    def pod(self, pod: PodRef) -> PodDevices | None:
        """Ask what a pod holds; None if kubelet does not know it. Raises Unavailable."""

    def files(self, pod: PodRef, container: str, resource_name: str) -> Sequence[str]:
        """List the device files that a resource's plugin gave to a container; none if that is not known."""


class RailFiles:
    """The files that tell of pods' rails, beside the CDI specs, where no runtime takes them for specs.

    Methods block, briefly.
    """

    def __init__(
        self, folder: Path, offer: Latest[Offer], kubelet: AsksKubelet, leaves: Latest[Mapping[str, Neighbour]]
    ) -> None:
        self._offer = offer
        self._kubelet = kubelet
        self._leaves = leaves
        whose = "a pod of this sandbox"
        self._files = {
            "NODEFABRIC_RAILS": SpecFiles(folder, _START, whose, ".rails"),
            "NCCL_TOPO_FILE": SpecFiles(folder, _START, whose, ".nccl"),
        }

    def write(
        self,
        container_id: str,
        pod: PodRef,
        asked: Collection[str],
        nics: Sequence[Nic],
        sets: Iterable[Sequence[str]] = (),
    ) -> Mapping[str, str]:
        """Write those that are asked for: variable → path on the host. Raises Unavailable.

        `sets` are the devices of the pod's rails that have several NICs.
        """
        if not asked:
            return {}
        offer = self._offer.value
        of_sets = {d: number for mine in sets if (number := offer.rail_number(mine)) is not None for d in mine}
        numbers = {**offer.rail_of, **of_sets}
        place = Place(offer.snapshot, offer.distances, numbers, self._leaves.value, offer.plane_of)
        gpus = self._gpus(pod, place)
        rails = paired(nics, gpus, place)
        texts = {
            "NODEFABRIC_RAILS": json.dumps(document(rails, place), indent=1) + "\n",
            "NCCL_TOPO_FILE": nccl_topology(rails, gpus, place),
        }
        for variable in sorted(asked):
            self._files[variable].write(_START + container_id, texts[variable])
        return {variable: str(self._files[variable].path(_START + container_id)) for variable in asked}

    def missing(self, container_id: str, asked: Iterable[str]) -> bool:
        """Tell whether one that is asked for is not there."""
        return any(not self._files[variable].path(_START + container_id).exists() for variable in asked)

    def remove(self, container_id: str) -> None:
        """Remove those of a sandbox. What is not there is removed already. Raises Unavailable."""
        for files in self._files.values():
            files.remove(_START + container_id)

    def container_ids(self) -> frozenset[str]:
        """List the sandboxes that have files."""
        return frozenset(name.removeprefix(_START) for files in self._files.values() for name in files.names())

    def _gpus(self, pod: PodRef, place: Place) -> Sequence[str]:
        """List a pod's GPUs in the driver's order, as far as kubelet knows them."""
        try:
            found = self._kubelet.pod(pod) if place.distances.gpus and pod.name else None
        except AgentError as error:
            log.warning("the GPUs of pod %s are not known, so its files tell of none: %s", pod, error)
            return ()
        gpus: set[str] = set()
        for container in found.containers if found is not None else ():
            gpus.update(
                place.distances.gpus_of(container.units, files=partial(self._kubelet.files, pod, container.name))
            )
        return [gpu for gpu in place.distances.gpus if gpu in gpus]


_START = "sandbox-"


class Teller:
    """Tells. Methods block, and may run on many threads at once."""

    def __init__(self, node: Node, bound: BoundSlots, claims: ClaimSpecs, units: UnitSpecs, files: RailFiles) -> None:
        self._node = node
        self._bound = bound
        self._claims = claims
        self._units = units
        self._files = files
        self._telling = threading.Lock()
        """Held from a look at a sandbox's rows until the specs say so: the last of two ADDs sees the rows of both."""

    def attached(self, rows: Sequence[Attachment], result: Mapping[str, Any], netns: int) -> None:
        """Tell of the devices that an ADD has brought into a pod, as it is to answer. Raises Unavailable.

        Those that earlier ADDs have brought in for the same sandbox are told of, too.
        """
        container_id, pod = rows[0].owner.container_id, rows[0].owner.pod
        if not any(map(told.asks, self._edits(container_id, pod))):
            return
        looked = {row.attachment_id: self._look(row, result, netns) for row in rows}
        self._node.ledger.note({i: {NOTED: found.document()} for i, found in looked.items() if found is not None})
        with self._telling:
            mine = self._rows(container_id)
            nics = [Nic.of(row, result) for row in mine]
            files = self._files.write(container_id, pod, self._asked(container_id, pod), nics, self._sets(pod))
            say = _Saying(nics, self._socket_ifname(mine, netns), files)
            self._tell(container_id, pod, say)
        for text in say.left_out:
            self._node.observer.not_told(pod, text)

    def detached(self, container_id: str, pod: PodRef) -> None:
        """Remove the files of a sandbox that has no device any more, and say no more of its pod's units.

        What was said of slots and claims goes with these.
        """
        if self._rows(container_id):
            return
        self._files.remove(container_id)
        with self._telling:
            if not any(_same(row.owner.pod, pod) for row in self._living()):  # else in another sandbox by now
                self._units.tell({unit: {} for unit, spec in self._specs_of(pod).items() if spec.told})

    def rewrite(self) -> Sequence[str]:
        """Write the files that are missing, remove those of nobody, and list the sandboxes. Raises Unavailable."""
        done = []
        found = self._files.container_ids()  # before the rows, which an ADD has before its files
        containers = {row.owner.container_id: row.owner.pod for row in self._node.ledger.attachments()}
        for container_id in sorted(found - containers.keys()):
            self._files.remove(container_id)
        for container_id, pod in containers.items():
            asked = self._asked(container_id, pod)
            if not asked or not self._files.missing(container_id, asked):
                continue
            with self._telling:  # an ADD may have written them meanwhile, of more than its rows tell yet
                rows = [r for r in self._node.ledger.attachments() if r.owner.container_id == container_id]
                is_whole = rows and all(row.state is AttachmentState.ATTACHED for row in rows)
                if is_whole and self._files.missing(container_id, asked):
                    self._files.write(container_id, pod, asked, [Nic.of(row) for row in rows], self._sets(pod))
                    done.append(container_id)
        return done

    # ------------------------------------------------------------------------------------------- what there is

    def _living(self) -> Iterator[Attachment]:
        return (row for row in self._node.ledger.attachments() if row.state is not AttachmentState.DETACHING)

    def _rows(self, container_id: str) -> Sequence[Attachment]:
        return [row for row in self._living() if row.owner.container_id == container_id]

    def _edits(self, container_id: str, pod: PodRef) -> Iterator[Mapping[str, Any]]:
        """List what containers of a sandbox get."""
        yield from (b.edits for b in self._node.ledger.bindings() if b.container_id == container_id)
        yield from (spec.edits for spec in self._specs_of(pod).values())
        for claim in self._claims_of(container_id):
            yield from (device.edits for device in claim.devices)

    def _asked(self, container_id: str, pod: PodRef) -> frozenset[str]:
        """List the variables of a sandbox's containers that name files."""
        return frozenset().union(*map(told.files_asked, self._edits(container_id, pod)))

    def _claims_of(self, container_id: str) -> Iterator[Claim]:
        for uid in dict.fromkeys(row.claim_uid for row in self._rows(container_id) if row.claim_uid):
            claim = self._node.ledger.claim(uid)
            if claim is not None:
                yield claim

    def _specs_of(self, pod: PodRef) -> Mapping[str, UnitSpec]:
        """Map a pod's units that were granted early to what is said of them."""
        grants = self._node.ledger.grants()
        return {g.unit_id: g.spec for g in grants if g.spec is not None and g.pod is not None and _same(g.pod, pod)}

    def _sets(self, pod: PodRef) -> Sequence[Sequence[str]]:
        """List the devices of a pod's rails that have several NICs."""
        grants = self._node.ledger.grants()
        return [g.devices for g in grants if g.others and g.pod is not None and _same(g.pod, pod)]

    def _look(self, row: Attachment, result: Mapping[str, Any], netns: int) -> RdmaFacts | None:
        """Find out the RDMA device of a row in its pod, and its GID; None if it has none."""
        host, device = self._node.host, row.device.partition("/")[0]
        try:
            found, where = rdma.moved(host, row, netns)
            if found is None:
                found, where = host.find_rdma(device) if is_pci_address(device) else None, None
        except HardwareError as error:
            log.warning("%s: nothing is told of its RDMA device: %s", row.device, error)
            return None
        if found is None:
            return None
        ports = roce_ports(host.root / "sys/class/infiniband" / found.name) if where is None else ()
        gid = _await_gid(ports, network_data(result, row.ifname).addresses, row.ifname)
        if gid is not None:
            return RdmaFacts(found.name, True, gid.port, gid.index, gid.address)
        return RdmaFacts(found.name, bool(ports) or self._is_ethernet(device))

    def _is_ethernet(self, device: str) -> bool:
        pci = self._node.snapshot.by_address.get(device)
        uplink = self._node.snapshot.pf_netdev(pci) if pci is not None else None
        return uplink is not None and uplink.link_layer is LinkLayer.ETHERNET

    def _socket_ifname(self, rows: Sequence[Attachment], netns: int) -> str:
        """Name the interface that the pod has from the cluster's network; empty if it has none."""
        chained = {row.owner.cni_ifname for row in rows} - {row.ifname for row in rows}
        name = min(chained, default=MAIN_IFNAME)
        return name if self._node.host.links.find(name, netns) is not None else ""

    # ---------------------------------------------------------------------------------------------- telling it

    def _tell(self, container_id: str, pod: PodRef, say: _Saying) -> None:
        """Write what is told: first into the books, then into the specs."""
        bindings = [b for b in self._node.ledger.bindings() if b.container_id == container_id and told.asks(b.edits)]
        self._bound.tell(container_id, {b.unit_id: say.of(b.edits).beside(b.edits) for b in bindings})
        specs = {unit: spec for unit, spec in self._specs_of(pod).items() if told.asks(spec.edits)}
        said = {unit: say.of(spec.edits).edits for unit, spec in specs.items()}
        self._units.tell({unit: edits for unit, edits in said.items() if edits != specs[unit].told})
        for claim in self._claims_of(container_id):
            self._tell_claim(claim, container_id, say)

    def _tell_claim(self, claim: Claim, container_id: str, say: _Saying) -> None:
        """Say it in a claim's spec. That is one for all pods of the claim, so it tells of none if there are several."""
        asking = {d.cdi_name: d.edits for d in claim.devices if d.cdi_name and told.asks(d.edits)}
        if any(r.claim_uid == claim.ref.uid and r.owner.container_id != container_id for r in self._living()):
            say.left_out[f"claim {claim.ref} is several pods', and its containers are told of no pod's addresses"] = (
                None
            )
            say = _Saying()
        said = {name: say.of(edits).beside(edits) for name, edits in asking.items()}
        changed = {name: edits for name, edits in said.items() if edits != asking[name]}
        if changed:
            self._node.ledger.set_claim_edits(claim.ref.uid, changed)
            self._claims.renew(partial(self._node.ledger.claim, claim.ref.uid))


@dataclass(frozen=True, slots=True)
class _Saying:
    """What is told of one pod."""

    nics: Sequence[Nic] = ()
    ifname: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    left_out: dict[str, None] = field(default_factory=dict)
    """Sentences, each once."""

    def of(self, edits: Mapping[str, Any]) -> Told:
        """Work out what joins some edits."""
        found = told.told(edits, self.nics, self.ifname, self.files)
        self.left_out.update(dict.fromkeys(found.left_out))
        return found


def _same(one: PodRef, other: PodRef) -> bool:
    return (one.namespace, one.name) == (other.namespace, other.name)


def _await_gid(ports: Sequence[Path], addresses: Sequence[str], ifname: str) -> Gid | None:
    """Wait for the GID of an interface's best address; of another one if that has none, None if none is its own."""
    best = {address.partition("/")[0] for address in best_first(addresses)[:1]}
    deadline = time.monotonic() + GID_SECONDS
    while ports and addresses:
        found = find_gids(ports, addresses, ifname)
        if {gid.address for gid in found} == best or time.monotonic() > deadline:
            return found[0] if len(found) == 1 else None
        time.sleep(POLL_SECONDS)
    return None
