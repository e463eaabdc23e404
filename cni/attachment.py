"""What CNI does with devices: ADD in `attach`, DEL in `detach`, healing in `heal`, CHECK, GC and STATUS in `check`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.errors import HardwareError, RequestInvalid
from agent.model.allocation import Attachment, PodRef, is_place
from agent.model.unit_id import UnitId
from cni import check
from cni.add_facts import FactsWriter
from cni.attach import BUSY_SECONDS, MAX_ADDING, Attacher
from cni.call import Call, Node, Slots
from cni.call_limits import Rules, Turns
from cni.detach import Detacher
from cni.found_vfs import NETNS_FOLDERS, Finder
from cni.heal import HEAL_SECONDS, Healer, PodKnown, ReleaseRequest, nobody_to_ask, release
from cni.ipam.leases import LeaseBook
from cni.migrate import sriov_state
from cni.migrate.adoption import Adopter
from cni.permission import Permission
from cni.pod_devices import HeldDevices
from cni.targets import Pool, Targets

Ended = Callable[[PodRef, float | None], object]
"""Hears that a DEL has come for a pod; if it lay on disk before, since when (seconds since the epoch)."""
RDMA = "rdma"
"""Type of the plugin that is chained after the one that brings the interface, and moves its RDMA device.

It demands that the system keeps RDMA devices apart. Here the RDMA device goes along with the interface already, in the
call before. So ADD passes the result on, after a look at whether the pod has what the chain was written for; DEL and
CHECK leave all to the call before.
"""


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
    foreign_state: Path = sriov_state.STATE
    """Where the replaced plugins keep their state, and …"""
    foreign_run: Path = sriov_state.RUN
    """… their locks."""


USUAL = Settings()


class Attachments:
    """Devices in pods, on the ledger and the hardware. Methods block and may run on many threads at once."""

    def __init__(
        self, node: Node, held: HeldDevices, slots: Slots, facts: FactsWriter, settings: Settings = USUAL
    ) -> None:
        """`held` finds what pods hold, `slots` chooses devices late, `facts` tells containers."""
        self._node = node
        self._slots = slots
        self._facts = facts
        self._on_end: tuple[Ended, ...] = ()
        self.detacher = Detacher(node)
        self._healer = Healer(node, self.detacher, settings.heal_seconds)
        self.finder = Finder(node, held, netns_folders=settings.netns_folders)
        self.adopter = Adopter(
            node, state=settings.foreign_state, run=settings.foreign_run, netns_folders=settings.netns_folders
        )
        rules = Rules(settings.max_adding, untrusted=settings.max_adding * 3 // 4)
        turns = Turns("ADDs under way", rules, self.detacher.leases.trust)
        targets = Targets(node, held, slots, Pool(node, held), Permission(node, held), turns)
        self._attacher = Attacher(node, targets, self.detacher, facts, turns, settings.busy_seconds)

    def watch_ends(self, listener: Ended) -> None:
        """Call a listener at each DEL of a pod, on the thread that carries it out."""
        self._on_end = (*self._on_end, listener)

    @property
    def leases(self) -> LeaseBook:
        """What pods have leased, and what is owed."""
        return self.detacher.leases

    def close(self, seconds: float = 1.0) -> bool:
        """Wait a bounded time for devices on their way back; the rest is found at the next start.

        Returns whether all are back.
        """
        return self.detacher.close(seconds)

    def add(self, call: Call) -> Mapping[str, Any]:
        """Attach the call's devices and return the CNI result. The same ADD again answers the same."""
        return self._pass_on(call) if call.conf.kind == RDMA else self._attacher.add(call)

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

    def heal(self, device: str, pod_known: PodKnown = nobody_to_ask) -> str | None:
        """Finish what a crash, a lost DEL or a reboot left of an attachment, as `Healer.heal` does."""
        return self._healer.heal(device, pod_known)

    def await_detached(self, rows: Iterable[Attachment], seconds: float) -> tuple[Attachment, ...]:
        """Wait a bounded time for devices on their way back. Return the rows of those that are not back."""
        return self.detacher.await_detached(rows, seconds)

    def release(self, wish: ReleaseRequest, pod_known: PodKnown) -> str:
        """Let go of a device by the operator's word, and tell what was done. Raises AgentError."""
        return release(self._node, self.detacher, wish, pod_known)

    def _pass_on(self, call: Call) -> Mapping[str, Any]:
        """Pass the previous result on. Raises RequestInvalid or HardwareError where the pod has no RDMA device.

        In shared mode every pod sees all RDMA devices, and the chain asks for nothing that is not there.
        """
        conf, ledger = call.conf, self._node.ledger
        if conf.prev_result is None:
            raise RequestInvalid("prevResult is missing: chain type rdma after sriov, ib-sriov or nodefabric")
        if not self._node.snapshot.rdma_exclusive:
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
