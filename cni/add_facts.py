"""ADD tells containers of their devices once these are in the pod: in CDI specs and files, see `agent.edits.add_facts`.

What was found out goes into the rows, then the files are written, then the edits in the books, then the specs. The
containers are created after ADD, so an agent that is killed in between leaves an ADD that the next one, or DEL, undoes.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agent.config import Config
from agent.edits.add_facts import (
    NOTED,
    Nic,
    NodeFacts,
    RdmaFacts,
    added_edits,
    files_asked,
    nccl_topology,
    paired,
    rails_document,
    wants_facts,
)
from agent.edits.cdi import SpecFiles
from agent.edits.claim_metadata import requests_with_files
from agent.edits.specs import Specs, file_of
from agent.errors import AgentError, HardwareError
from agent.hardware.lldp import Neighbour
from agent.hardware.sysfs.rdma import Gid, best_first, find_gids, roce_ports
from agent.kubelet.podresources import AsksKubelet
from agent.model.allocation import Attachment, AttachmentState, Claim, Hold, PodRef, Spec, network_data
from agent.model.device import LinkLayer, is_pci_address
from agent.offer.offer import Offer
from agent.state import Latest
from cni.call import Node
from cni.modes import rdma

GID_SECONDS = 1.0
"""How long the kernel may take to enter an address into the table of GIDs."""
POLL_SECONDS = 0.01
MAIN_IFNAME = "eth0"
"""What runtimes call a pod's interface to the cluster's network."""

log = logging.getLogger(__name__)


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
        node = NodeFacts(offer.snapshot, offer.distances, numbers, self._leaves.value, offer.plane_of)
        gpus = self._gpus(pod, node)
        rails = paired(nics, gpus, node)
        texts = {
            "NODEFABRIC_RAILS": json.dumps(rails_document(rails, node), indent=1) + "\n",
            "NCCL_TOPO_FILE": nccl_topology(rails, gpus, node),
        }
        for variable in sorted(asked):
            self._files[variable].write(_START + container_id, texts[variable])
        return {variable: str(self._files[variable].path(_START + container_id)) for variable in asked}

    def missing(self, container_id: str, asked: Iterable[str]) -> bool:
        """Return whether one that is asked for is not there."""
        return any(not self._files[variable].path(_START + container_id).exists() for variable in asked)

    def remove(self, container_id: str) -> None:
        """Remove those of a sandbox. What is not there is removed already. Raises Unavailable."""
        for files in self._files.values():
            files.remove(_START + container_id)

    def container_ids(self) -> frozenset[str]:
        """List the sandboxes that have files."""
        return frozenset(name.removeprefix(_START) for files in self._files.values() for name in files.names())

    def _gpus(self, pod: PodRef, node: NodeFacts) -> Sequence[str]:
        """List a pod's GPUs in the driver's order, as far as kubelet knows them."""
        try:
            found = self._kubelet.pod(pod) if node.distances.gpus and pod.name else None
        except AgentError as error:
            log.warning("the GPUs of pod %s are not known, so its files tell of none: %s", pod, error)
            return ()
        gpus: set[str] = set()
        for container in found.containers if found is not None else ():
            gpus.update(
                node.distances.gpus_of(container.units, files=partial(self._kubelet.files, pod, container.name))
            )
        return [gpu for gpu in node.distances.gpus if gpu in gpus]


_START = "sandbox-"


class FactsWriter:
    """Writes specs and files at ADD. Methods block, and may run on many threads at once."""

    def __init__(
        self,
        config: Latest[Config],
        node: Node,
        specs: Specs,
        files: RailFiles,
        verbs_nodes: Mapping[str, str],
    ) -> None:
        self.config = config
        self._node = node
        self._specs = specs
        self._files = files
        self.verbs_nodes = verbs_nodes
        """Device → the verbs node that its container gets, as far as its grant said."""
        self._writing = threading.Lock()
        """Held from a look at a sandbox's rows until the specs say so: the last of two ADDs sees the rows of both."""

    def entered(self, row: Attachment, netns: int) -> None:
        """Have the CDI specs of what a device came by name the character devices that it has in its pod.

        Containers are created later, so they get those that it has now. Raises HardwareError if it has none any more,
        Unavailable if a spec cannot be written.
        """

        while there := self._renumbered(row, netns):

            def decide(there: Mapping[str, tuple[Spec, Spec]] = there) -> Mapping[str, Spec]:
                now = {key: hold.spec for key in there if (hold := self._node.ledger.hold(key)) is not None}
                return {key: new for key, (old, new) in there.items() if now.get(key) == old}

            if self._specs.change(decide):
                log.info("%s has other character devices in its pod: its CDI spec says so", row.device)
        # The books may have said so before: an ADD fails whose files cannot be written, and its pod's next one comes.
        mine = (hold for hold in self._node.ledger.holds_on(row.device) if hold.claim_uid == row.claim_uid)
        self._specs.sync(dict.fromkeys(file_of(hold) for hold in mine if hold.spec is not None))

    def _renumbered(self, row: Attachment, netns: int) -> Mapping[str, tuple[Spec, Spec]]:
        """Map the holds whose specs name other devices to what these say, and what they should. Asks the kernel."""
        found = {}
        for hold in self._node.ledger.holds_on(row.device):
            spec = hold.spec
            if spec is None or hold.claim_uid != row.claim_uid:
                continue
            mine = {"deviceNodes": spec.nodes[row.device]} if row.device in spec.nodes else spec.edits
            edits = rdma.renumbered(self._node.host, row, netns, mine)
            if edits is not mine:
                nodes = edits["deviceNodes"]
                found[hold.key] = spec, spec.with_nodes(row.device, nodes) if spec.nodes else replace(spec, edits=edits)
        return found

    def _describe(self, rows: Sequence[Attachment], result: Mapping[str, Any]) -> None:
        """Have the files that describe claims' devices say what these are in the pod of some rows, as ADD is to answer.

        A share that several pods have has another interface in each, and one file for all: it is described in none.
        Raises Unavailable if a file cannot be written.
        """
        for uid in dict.fromkeys(row.claim_uid for row in rows if row.claim_uid):
            claim = self._node.ledger.claim(uid)
            if claim is not None and requests_with_files(claim):
                with self._writing:
                    self._specs.metadata.add_networks(uid, self._networks(claim, rows, result))

    def _networks(
        self, claim: Claim, rows: Sequence[Attachment], result: Mapping[str, Any]
    ) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
        """Map each request, and each of its devices that is in the pod of some rows, to what it is there."""
        pod = rows[0].owner.pod
        of_others = {
            row.parent for row in self._living() if row.claim_uid == claim.ref.uid and not row.owner.pod.is_same(pod)
        }
        mine = {row.parent: network_data(result, row.ifname).document() for row in rows}
        wanted, found = requests_with_files(claim), dict[str, dict[str, Mapping[str, Any]]]()
        for device in claim.devices:
            if device.request in wanted and device.device in mine and not device.admin:
                data = mine[device.device] if device.device not in of_others else {}
                found.setdefault(device.request, {})[device.device_name] = data
        return found

    def attached(self, rows: Sequence[Attachment], result: Mapping[str, Any], netns: int) -> None:
        """Write the facts of the devices that an ADD has brought into a pod, as it is to answer. Raises Unavailable.

        The rows are of one pod, whose namespace is given. Those that earlier ADDs have brought in for the same sandbox
        are written, too.
        """
        if any(row.claim_uid for row in rows):
            self._describe(rows, result)
        if not self.config.value.tells:
            return
        container_id, pod = rows[0].owner.container_id, rows[0].owner.pod
        if not any(wants_facts(hold.edits) for hold in self._holds(container_id, pod)):
            return
        looked = {row.attachment_id: self._look(row, result, netns) for row in rows}
        self._node.ledger.note({i: {NOTED: found.document()} for i, found in looked.items() if found is not None})
        with self._writing:
            mine = self._rows(container_id)
            nics = [Nic.of(row, result) for row in mine]
            files = self._files.write(container_id, pod, self._asked(container_id, pod), nics, self._sets(pod))
            added = partial(added_edits, nics=nics, socket_ifname=self._socket_ifname(mine, netns), files=files)
            left_out: dict[str, None] = {}
            self._specs.change(lambda: self._with_facts(container_id, pod, added, left_out))
        for text in left_out:
            self._node.observer.not_told(pod, text)

    def detached(self, container_id: str, pod: PodRef) -> None:
        """Remove the files of a sandbox that has no device any more, and the facts in specs of its pod's units.

        Those of slots and claims go with these.
        """
        if not self.config.value.tells or self._rows(container_id):
            return
        self._files.remove(container_id)
        with self._writing:
            if any(row.owner.pod.names == pod.names for row in self._living()):
                return  # it is in another sandbox by now

            def decide() -> Mapping[str, Spec]:
                specs = {hold.key: hold.spec for hold in self._units_of(pod) if hold.spec is not None}
                return {key: spec.with_added({}) for key, spec in specs.items() if spec.added}

            self._specs.change(decide)

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
            with self._writing:  # an ADD may have written them meanwhile, of more than its rows tell yet
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

    def _holds(self, container_id: str, pod: PodRef) -> Sequence[Hold]:
        """List what the containers of a sandbox have, and get something by CDI for."""
        ledger = self._node.ledger
        uids = dict.fromkeys(row.claim_uid for row in self._rows(container_id) if row.claim_uid)
        claims = (claim for uid in uids if (claim := ledger.claim(uid)) is not None)
        slots, units = ledger.bound_slots(container_id), self._units_of(pod)
        return [hold for hold in (*slots, *units, *(h for c in claims for h in c.devices)) if hold.spec is not None]

    def _asked(self, container_id: str, pod: PodRef) -> frozenset[str]:
        """List the variables of a sandbox's containers that name files."""
        return frozenset().union(*(files_asked(hold.edits) for hold in self._holds(container_id, pod)))

    def _units_of(self, pod: PodRef) -> Iterator[Hold]:
        """List a pod's units whose devices were chosen at their grants."""
        holds = (hold for hold in self._node.ledger.holds() if not hold.is_slot)
        return (hold for hold in holds if hold.pod is not None and hold.pod.names == pod.names)

    def _sets(self, pod: PodRef) -> Sequence[Sequence[str]]:
        """List the devices of a pod's rails that have several NICs."""
        return [hold.devices for hold in self._units_of(pod) if len(hold.devices) > 1]

    def _look(self, row: Attachment, result: Mapping[str, Any], netns: int) -> RdmaFacts | None:
        """Find out the RDMA device of a row in its pod, and its GID; None if it has none."""
        host, device = self._node.host, row.parent
        try:
            found, where = rdma.moved(host, row, netns)
            if found is None:
                found, where = host.find_rdma(device) if is_pci_address(device) else None, None
        except HardwareError as error:
            log.warning("%s: the facts of its RDMA device are left out: %s", row.device, error)
            return None
        if found is None:
            return None
        ports = roce_ports(host.root / "sys/class/infiniband" / found.name) if where is None else ()
        gid = _await_gid(ports, network_data(result, row.ifname).addresses, row.ifname)
        if gid is not None:
            return RdmaFacts(found.name, True, gid.port, gid.index, gid.address)
        return RdmaFacts(found.name, bool(ports) or self._is_ethernet(device))

    def _is_ethernet(self, device: str) -> bool:
        pci = self._node.scans.value.by_address.get(device)
        uplink = self._node.scans.value.pf_netdev(pci) if pci is not None else None
        return uplink is not None and uplink.link_layer is LinkLayer.ETHERNET

    def _socket_ifname(self, rows: Sequence[Attachment], netns: int) -> str:
        """Name the interface that the pod has from the cluster's network; empty if it has none."""
        chained = {row.owner.cni_ifname for row in rows} - {row.ifname for row in rows}
        name = min(chained, default=MAIN_IFNAME)
        return name if self._node.host.links.find(name, netns) is not None else ""

    # ---------------------------------------------------------------------------------------------- writing it

    def _with_facts(
        self,
        container_id: str,
        pod: PodRef,
        added: Callable[[Mapping[str, Any]], tuple[Mapping[str, Any], list[str]]],
        left_out: dict[str, None],
    ) -> Mapping[str, Spec]:
        """Say the specs that are to have other facts than they have; sentences on what they lack join `left_out`.

        All pods of a claim share its spec, so nothing pod-specific is written if there are several pods.
        """
        changed: dict[str, Spec] = {}
        more: Mapping[str, Any]
        for hold in self._holds(container_id, pod):
            if (spec := hold.spec) is None or not wants_facts(spec.edits):
                continue
            if hold.claim_uid and self._is_of_others(hold.claim_uid, container_id):
                claim = self._node.ledger.claim(hold.claim_uid)
                name = claim.ref if claim is not None else hold.claim_uid
                more, lacks = {}, [f"claim {name} is several pods', and its containers learn no pod's addresses"]
            else:
                more, lacks = added(spec.edits)
            left_out.update(dict.fromkeys(lacks))
            new = spec.with_added(more)
            if new != spec:
                changed[hold.key] = new
        return changed

    def _is_of_others(self, claim_uid: str, container_id: str) -> bool:
        return any(r.claim_uid == claim_uid and r.owner.container_id != container_id for r in self._living())


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
