"""What CNI does with devices: ADD here, DEL in `detach`, healing in `heal`, CHECK, GC and STATUS in `check`.

ADD finds out what a call wants, frees it of a former owner, and brings it into the pod. The *attaching* row is written
before anything is touched; whatever fails afterwards, the mode's `leave` brings the device back from the row.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent.config.routing import NO_ROUTING
from agent.edits import device_info
from agent.errors import AgentError, DeviceBusy, EnvironmentInvalid, HardwareError, RequestInvalid
from agent.hardware import netns as namespaces
from agent.hardware.host import Child, Link
from agent.hardware.netlink.announce import Announcer
from agent.ledger import Ledger
from agent.model.allocation import Attachment, AttachmentState, Owner, PodRef, is_place
from agent.model.device import Snapshot
from agent.model.unit_id import UnitId
from cni import check, result
from cni.add_facts import FactsWriter
from cni.call import BEGUN, Add, Call, LeasingNetwork, Node, pf_in_pod, request_of
from cni.call_limits import NotWanted, Rules, Turns
from cni.detach import Detacher
from cni.found_vfs import NETNS_FOLDERS, Finder
from cni.heal import HEAL_SECONDS, Healer, PodKnown, ReleaseRequest, owner_alive, release
from cni.ipam.leases import LeaseBook
from cni.migrate.adoption import Adopter
from cni.modes import nic, rdma
from cni.modes.choice import MODES
from cni.modes.mode import InterfaceFacts, Planned, Target
from cni.netconf import NetConf
from cni.permission import Permission
from cni.pod_devices import HeldDevices
from cni.slots.binder import Binder
from cni.targets import Pool, Targets

BUSY_SECONDS = 5.0
"""How long ADD waits for the device's former owner to let go."""
POLL_SECONDS = 0.05
MAX_ADDING = 96
"""So many ADDs that have a device, or wait for one, are in flight at once; those of one network at most half of it.

Any may take minutes: for an address, a device, another's work on it, a driver. Others of pods that have nothing of ours
need none of these turns.
"""
Ended = Callable[[PodRef, float | None], object]
"""Hears that a DEL has come for a pod; if it lay on disk before, since when (seconds since the epoch)."""
RDMA = "rdma"
"""Type of the plugin that is chained after the one that brings the interface, and moves its RDMA device.

It demands that the system keeps RDMA devices apart. Here the RDMA device goes along with the interface already, in the
call before. So ADD passes the result on, after a look at whether the pod has what the chain was written for; DEL and
CHECK leave all to the call before.
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """How long to wait, how many at once, and where things are."""

    busy_seconds: float = BUSY_SECONDS
    """How long an ADD waits for its device's former owner."""
    heal_seconds: float = HEAL_SECONDS
    """How long healing waits for a device."""
    max_adding: int = MAX_ADDING
    """So many ADDs with a device are in flight at once."""
    netns_folders: Sequence[Path] = NETNS_FOLDERS
    """Where the runtime binds its pods' namespaces."""


USUAL = Settings()


@dataclass(slots=True)
class _Work:
    """One ADD that has devices to bring in."""

    call: Call
    owner: Owner
    netns: int
    add: Add
    brought: list[_BroughtIn] = field(default_factory=list)
    """What is in the pod so far."""
    taken: dict[str, float] = field(default_factory=dict)
    """What each step took so far, in seconds."""
    since: float = field(default_factory=time.perf_counter)

    def end(self, step: str) -> None:
        """End a step, which lasts from the end of the one before. One that comes more than once adds up."""
        now = time.perf_counter()
        self.taken[step] = self.taken.get(step, 0.0) + now - self.since
        self.since = now


@dataclass(frozen=True, slots=True)
class _BroughtIn:
    """A device in the pod."""

    row: Attachment
    facts: InterfaceFacts
    leases: result.Leases


class Attachments:
    """Devices in pods, on the ledger and the hardware. Methods block and may run on many threads at once."""

    def __init__(
        self, node: Node, held: HeldDevices, slots: Binder, facts: FactsWriter, settings: Settings = USUAL
    ) -> None:
        """`held` finds what pods hold, `slots` chooses devices late, `facts` tells containers."""
        self._node = node
        self._slots = slots
        self._facts = facts
        self._busy_seconds = settings.busy_seconds
        self._on_end: tuple[Ended, ...] = ()
        self.detacher = Detacher(node)
        self.close = self.detacher.close
        self.heal = Healer(node, self.detacher, settings.heal_seconds).heal
        self.finder = Finder(node, held, netns_folders=settings.netns_folders)
        self.adopter = Adopter(node, netns_folders=settings.netns_folders)
        rules = Rules(settings.max_adding, untrusted=settings.max_adding * 3 // 4)
        self._turns = Turns("ADDs under way", rules, self.detacher.leases.trust)
        self._targets = Targets(node, held, slots, Pool(node, held), Permission(node, held), self._turns)
        self._announcer = Announcer()
        self._own_netns = namespaces.own()
        self._beginning = threading.Lock()
        """Held from a look at the rows of other devices until the own is there."""

    def add(self, call: Call) -> Mapping[str, Any]:
        """Attach the call's devices and return the CNI result. The same ADD again answers the same."""
        if call.conf.kind == RDMA:
            return _rdma_passed_on(self._node, call)
        assert call.netns is not None  # `cni.server` sees to it
        # Before kubelet is asked, which takes its time: a DEL that comes meanwhile finds no row.
        with (
            self.detacher.in_flight.add(call.container_id, call.ifname) as add,
            self._targets.of(call, add) as targets,
        ):
            if not targets:
                return _passed_through(call, add)
            owner = Owner(call.container_id, call.ifname, call.pod, namespaces.identity(call.netns))
            if owner.netns == self._own_netns:
                raise EnvironmentInvalid(
                    f"CNI_NETNS {call.netns_path} is the namespace of the host, which must not get a pod's"
                    " interfaces, addresses and routes: the process that it names may have ended, and another have"
                    " its number"
                )
            networks = {_network_of(target.conf) for target in targets}
            work = _Work(call, owner, call.netns, add)
            with (
                self._turns.hold("ADD", *networks, namespace=call.pod.namespace),
                self._once_free(work, targets) as answered,
            ):
                return answered if answered is not None else self._attach(work, targets)

    def watch_ends(self, listener: Ended) -> None:
        """Call a listener at each DEL of a pod, on the thread that carries it out."""
        self._on_end = (*self._on_end, listener)

    @property
    def leases(self) -> LeaseBook:
        """What pods have leased, and what is owed."""
        return self.detacher.leases

    def delete(self, call: Call) -> None:
        """Promise to detach what this container and interface own. Nothing owned is success."""
        if call.conf.kind != RDMA and not self.detacher.is_out_of_date(call):
            if not self._node.ledger.attachments_of(call.container_id, call.ifname):
                self.adopter.adopt_of(call.container_id, call.ifname)
            self.detacher.delete(call)
            self._slots.unbind(call.container_id, call.ifname)
            self._facts.detached(call.container_id, call.pod)
            if call.pod.name:
                for listener in self._on_end:
                    listener(call.pod, call.spooled_at)

    def check(self, call: Call) -> None:
        """Compare what was set up with what is. Raises AttachmentError that lists the differences."""
        if call.conf.kind != RDMA:
            check.check(self._node.host, self._node.ledger, self.leases, call)

    def collect(self, call: Call) -> None:
        """GC: detach what this network holds for containers that the runtime no longer lists."""
        check.collect(self._node.ledger, self.detacher, call)
        self.leases.collect(call)

    def status(self, call: Call) -> None:
        """Raise AgentError if the network, as far as its configuration tells, could take no pod now."""
        check.status(self._node.host, call.conf)
        self.leases.status(call)

    def release(self, wish: ReleaseRequest, pod_known: PodKnown) -> str:
        """Let go of a device by the operator's word, and tell what was done. Raises AgentError."""
        return release(self._node, self.detacher, wish, pod_known)

    # ------------------------------------------------------------------------------------------- former owners

    @contextmanager
    def _once_free(self, work: _Work, targets: Sequence[Target]) -> Iterator[Mapping[str, Any] | None]:
        """Hold the devices as soon as no former owner has any of them. Yields what the same ADD was answered before.

        Raises DeviceBusy if a former owner keeps one.
        """
        deadline = time.monotonic() + self._busy_seconds
        devices = {target.device for target in targets}
        while True:
            with self._node.locks.hold(devices):
                answered = self._answered_before(work.owner, devices)
                busy = self._free(work.owner, targets) if answered is None else None
                if busy is None:
                    yield answered
                    return
            if time.monotonic() > deadline or work.add.overtaken:
                raise DeviceBusy(busy)
            time.sleep(POLL_SECONDS)  # without the locks: the former owner's DEL needs them

    def _answered_before(self, owner: Owner, devices: Set[str]) -> Mapping[str, Any] | None:
        rows = self._node.ledger.attachments_of(owner.container_id, owner.cni_ifname)
        if not rows:
            return None
        same = {row.device for row in rows} == devices
        if same and all(row.state is AttachmentState.ATTACHED and row.owner.netns == owner.netns for row in rows):
            return rows[0].result
        raise DeviceBusy(f"an earlier ADD of {owner.container_id} {owner.cni_ifname} is still being undone")

    def _free(self, owner: Owner, targets: Sequence[Target]) -> str | None:
        """Clean up after former owners that are gone. Tell what is in the way if one is not."""
        former = [(row, t) for t in targets if (row := self._node.ledger.attachment_on(t.device)) is not None]
        for row, _ in former:
            _refuse_second_interface(owner, row)
        for row, target in former:
            if (busy := self._free_of(row, target)) is not None:
                return busy
        return None

    def _free_of(self, row: Attachment, target: Target) -> str | None:
        if row in self.detacher.leaving:
            return f"{row.device} is on its way back from container {row.owner.container_id}"
        if row.state is not AttachmentState.DETACHING and owner_alive(self._node, row):
            held = f"{row.device} is still held by pod {row.owner.pod} (container {row.owner.container_id})"
            if row.claim_uid and row.claim_uid == target.claim_uid:
                return f"{held} by the same claim, and cannot be in two pods: use a template, a claim per pod"
            return held
        log.info("finishing the clean-up of %s, left by container %s", row.device, row.owner.container_id)
        self.detacher.undo(row)
        return None

    # ---------------------------------------------------------------------------------------------- the devices

    def _attach(self, work: _Work, targets: Sequence[Target]) -> Mapping[str, Any]:
        """Bring one device after the other into the pod; if anything fails, all of them are brought back."""
        with ExitStack() as undo:
            for target in targets:
                work.brought.append(self._bring_in(work, target, undo))
            brought = work.brought
            answer = _answer(work.call, brought)
            if self._facts.config.value.tells or any(target.claim_uid for target in targets):
                self._facts.attached([one.row for one in brought], answer, work.netns)
            if work.add.close():  # from here on a DEL finds the rows
                raise _overtaken(work.call)
            self._node.ledger.finish_attach([one.row.attachment_id for one in brought], answer)
            work.end("books")
            undo.pop_all()
        self._node.timed(work.taken)
        for one in brought:
            if one.facts.in_kernel and one.leases.ips:
                self._announcer.start(work.netns, one.facts.name, one.leases.addresses)
        return answer

    def _bring_in(self, work: _Work, target: Target, undo: ExitStack) -> _BroughtIn:
        """Bring a device into the pod, and note at once how that is undone."""
        host, mode = self._node.host, MODES[target.mode]
        planned = mode.plan(host, self._node.scans.value, target)
        # Containers get the files that a unit's, slot's or claim's device has in its pod, where it has a CDI name.
        own = [h for h in self._node.ledger.holds_on(target.device) if h.spec is not None and not h.claim_uid]
        follows = bool(target.claim_uid or own)
        if follows:
            planned = replace(planned, any_node=True)
        work.end("plan")
        with self._beginning:
            _refuse_shared(self._node.ledger, self._node.scans.value, work.owner, target, planned)
            row = self._node.ledger.begin_attach(
                work.owner,
                ifname=target.ifname,
                device=target.device,
                resource_name=target.resource_name,
                undo=planned.undo,
                netns_path=work.call.netns_path,
                request=request_of(work.call, target.conf) | {BEGUN: work.add.begun},
                claim_uid=target.claim_uid,
                unit_id=target.unit_id,
                durable=target.conf.ipam is not None,
            )
        undo.callback(self._undo_failed_add, row, work)
        work.end("books")
        facts = mode.enter(host, planned, work.netns)
        if follows:
            self._facts.entered(row, work.netns)
        else:
            self._require_promised_node(row, work.netns)
        work.end("device")
        self._write_device_info(target.conf, row, facts)
        return _BroughtIn(row, facts, self._give_addresses(work, target, row, facts))

    def _write_device_info(self, conf: NetConf, row: Attachment, facts: InterfaceFacts) -> None:
        if conf.device_info_file is not None and facts.pci_id == row.device:
            about = device_info.describe(self._node.scans.value, row.device, filter(None, [row.undo.rdma]))
            device_info.write_attached(conf.device_info_file, about)

    def _give_addresses(self, work: _Work, target: Target, row: Attachment, facts: InterfaceFacts) -> result.Leases:
        """Lease addresses where the network has them. A program that drives the device sets its own."""
        conf = target.conf
        leases = result.Leases()
        if conf.ipam is not None:
            try:
                leases = self.detacher.leases.take(row, lambda: not work.add.overtaken)
            except NotWanted as error:
                raise _overtaken(work.call) from error
            work.end("ipam")
        elif conf.routing is NO_ROUTING:
            return leases
        if facts.in_kernel:
            leases = self._configure(work, conf, row, leases)
            work.end("addresses")
        return leases

    def _configure(self, work: _Work, conf: NetConf, row: Attachment, leases: result.Leases) -> result.Leases:
        """Give an interface its addresses, routes and whatever its network says. Return what the answer tells."""
        links, here = self._node.host.links, work.owner.netns
        rows = [
            other
            for other in self._node.ledger.attachments()
            if other.owner.netns == here and other.state is AttachmentState.ATTACHED and other.undo.mode != "vfio"
        ]
        if conf.routing is NO_ROUTING and not rows and not work.brought:
            links.configure(row.ifname, work.netns, leases.addresses, leases.kernel_routes())
            return leases
        from cni import routing

        others = [routing.Placed.of(other) for other in rows]
        others += (routing.Placed.of(one.row, one.leases) for one in work.brought)
        return routing.configure(links, work.netns, routing.Placed.of(row, leases), others)

    def _require_promised_node(self, row: Attachment, netns: int) -> None:
        """Raise HardwareError for a device with another verbs node than its container was promised.

        A mode sees to it for its own steps. But numbers change at other pods' moves and failed ADDs, too, and kubelet
        keeps to what Allocate answered once, however often it makes the pod's sandbox again.
        """
        promised = self._facts.verbs_nodes.get(row.device)
        if promised is not None and self._node.ledger.holds_on(row.device):
            rdma.require_node(self._node.host, row, netns, promised)

    def _undo_failed_add(self, row: Attachment, work: _Work) -> None:
        # The row is not marked first: it may be a full disk that brought us here, and an *attaching*
        # row that no ADD works on says as much. Where the pod is ending it does not wait for an IPAM plugin either.
        try:
            self.detacher.undo(row, work.netns, leases_later=work.add.overtaken)
        except AgentError as error:
            log.error("%s stays in the books as half attached: %s", row.device, error)


def _rdma_passed_on(node: Node, call: Call) -> Mapping[str, Any]:
    """Pass the previous result on. Raises RequestInvalid or HardwareError where the pod has no RDMA device.

    In shared mode every pod sees all RDMA devices, and the chain asks for nothing that is not there.
    """
    conf, ledger = call.conf, node.ledger
    if conf.prev_result is None:
        raise RequestInvalid("prevResult is missing: chain type rdma after sriov, ib-sriov or nodefabric")
    if not node.scans.value.rdma_exclusive:
        return conf.prev_result
    rows = ledger.attachments_of(call.container_id, call.ifname)
    bound = ledger.hold(conf.device) if conf.device is not None and UnitId.parse(conf.device).is_slot else None
    named = None if conf.device is None or is_place(conf.device) else conf.device
    device = bound.device if bound is not None and bound.devices else named
    mine = [row for row in rows if device in (None, row.device)]
    if not mine:
        raise HardwareError(
            f"{device or call.ifname} was brought into the pod by another plugin, and its RDMA device stayed in"
            " the host: let type sriov, ib-sriov or nodefabric bring it, which take the RDMA device along"
        )
    without = [row.device for row in mine if row.undo.rdma is None]
    if without:
        raise HardwareError(
            f"{', '.join(without)} came into the pod without an RDMA device: load its RDMA driver (mlx5_ib, irdma"
            " …), or take type rdma out of the chain"
        )
    return conf.prev_result


def _passed_through(call: Call, add: Add) -> Mapping[str, Any]:
    """Answer for a pod that no interface is for. What was chosen for its slots ends with a DEL all the same."""
    if call.conf.prev_result is None:
        raise RequestInvalid(
            "deviceID is missing: name a VF, let Multus do so, or chain this plugin after the pod's network"
        )
    if add.close():
        raise _overtaken(call)
    return call.conf.prev_result


def _overtaken(call: Call) -> DeviceBusy:
    return DeviceBusy(f"DEL of {call.container_id} {call.ifname} came while its ADD was under way")


def _network_of(conf: NetConf) -> Hashable:
    """Return which network a device joins, where it counts whose calls wait."""
    return conf.name if conf.ipam is None else LeasingNetwork.of(conf.name, conf.ipam)


def _answer(call: Call, brought: Sequence[_BroughtIn]) -> Mapping[str, Any]:
    made = [(one.facts, one.leases) for one in brought]
    interfaces = [
        ({"name": f.name, "mac": f.mac, "mtu": f.mtu, "sandbox": call.netns_path, "pciID": f.pci_id}, leases)
        for f, leases in made
    ]
    return result.build(call.conf.cni_version, call.conf.prev_result, interfaces)


# -------------------------------------------------------------------------------------- what other pods have

SORTS = ("macvlan", "ipvlan")
"""Kinds of children of which an interface carries one alone."""


def _refuse_second_interface(owner: Owner, row: Attachment) -> None:
    """Refuse a device that the same sandbox has under another interface: no waiting can help."""
    if row.owner.container_id == owner.container_id != "" and row.owner != owner:
        raise RequestInvalid(
            f"{row.device} is in this pod already, attached by the call for {row.owner.cni_ifname}: let either"
            " the chained plugin or Multus attach the pod's VFs, not both"
        )


def _refuse_shared(ledger: Ledger, snapshot: Snapshot, owner: Owner, target: Target, planned: Planned) -> None:
    """Refuse to take an adapter away that pods have a part of: its VFs, or what was made upon its interface.

    From another namespace it could not give back what it enforces on VFs, and the pod with it would rule them.
    The kernel shows an interface's uppers in its own namespace only. So a VF waits, too, while another pod has
    its adapter, and so does what is to be made upon an interface that is about to move.
    """
    row = pf_in_pod(ledger, snapshot, target.device, owner.container_id)
    if row is not None:
        raise DeviceBusy(f"{target.device} is ruled by {row.device}, which pod {row.owner.pod} has")
    if "kind" in planned.undo.extra and planned.link is not None:
        row = ledger.attachment_on(nic.device_of(planned.link))
        if row is not None and row.state is not AttachmentState.DETACHING:
            raise DeviceBusy(f"{planned.link.name} is on its way into pod {row.owner.pod}")
    if planned.child is not None and planned.link is not None and planned.child.kind in SORTS:
        _refuse_mixed(ledger, planned.child, planned.link)
    if target.mode != "nic":
        return
    assert planned.link is not None
    for row in ledger.attachments():
        facts = snapshot.by_address.get(row.device)
        is_vf = facts is not None and facts.physfn == target.device
        if is_vf or ("kind" in row.undo.extra and row.undo.netdev == planned.link.name):
            raise DeviceBusy(f"{planned.link.name} is needed by {row.device}, which pod {row.owner.pod} has")


def _refuse_mixed(ledger: Ledger, child: Child, parent: Link) -> None:
    """Refuse what the kernel would refuse without a reason, or do at the cost of others.

    An interface carries macvlans or ipvlans. All ipvlans upon it have one mode: the last one made would change it for
    all (drivers/net/ipvlan/ipvlan_main.c, ipvlan_link_new).
    """
    for row in ledger.attachments():
        kind, mode = row.undo.extra.get("kind"), row.undo.extra.get("ipvlan_mode")
        if kind not in SORTS or row.undo.netdev != parent.name or row.state is AttachmentState.DETACHING:
            continue
        if kind != child.kind or mode not in (None, child.mode):
            held = f"{kind}s" if mode is None else f"ipvlans of mode {mode}"
            wanted = child.kind if kind != child.kind else f"{child.kind} of mode {child.mode}"
            raise DeviceBusy(
                f"{parent.name} carries {held}, one of pod {row.owner.pod} among them, so it can carry no {wanted}:"
                " give all networks upon it one mode, or the one of them another master"
            )
