"""An agent without kubelet's side: the books, the hands, the CNI door and the reconciler, opened as at a start.

It is made to be killed: a fresh one is up within milliseconds, because `zygote` forks it off. What it
does at its start is what `agent.main` does, in that order. Orders come as JSON lines over a socket.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

from agent.config import Config, Resource
from agent.edits.cdi import SlotSpecs
from agent.hardware.host import Host
from agent.hardware.machine import Machine
from agent.kubelet.podresources import HeldUnit
from agent.ledger import Ledger
from agent.model.allocation import LONGEST_PAUSE_SECONDS, VfSettings
from agent.model.device import Snapshot
from agent.offer.offer import Offer
from agent.offer.units import plain_offer
from agent.reconcile.reconciler import Reconciler
from agent.state import Latest
from cni import pods_file, spool
from cni.attachment import Attachments, Settings
from cni.call import Node
from cni.ipam.leases import LeaseBook
from cni.server import CniServer
from cni.slots.binder import Binder
from cni.slots.bound import Bindings, BoundSlots
from hack.sim.machine import RecordedVfControl, SimulatedMachine
from tests.agent.reconcile.outside import Answers
from tests.agent.reconcile.scene import reconcile_once
from tests.soak import observe
from tests.soak.claims import SPECS, ClaimParts, GrantsAndClaims, granted_or_not, ref_of
from tests.soak.kubelet import LATE, RESOURCE, Kubelet
from tests.soak.points import Points

SOCKET = "cni.sock"


class StepByStep(RecordedVfControl):
    """VF settings that are made one after the other, as a kernel takes them, so that a crash can come between."""

    def apply(self, pf_netdev: str, vf_index: int, settings: VfSettings) -> None:
        """Set those fields that are not None."""
        for field in fields(VfSettings):
            if (value := getattr(settings, field.name)) is not None:
                super().apply(pf_netdev, vf_index, VfSettings(**{field.name: value}))


@dataclass(frozen=True)
class Options:
    """How a small agent is to start."""

    folder: str
    die_at: int | None = None
    """A fault point during the start."""
    note_points: bool = False
    """Whether the points of the start are to be told."""
    is_real: bool = False
    """Whether the hardware is this machine's, and not the simulation in the folder."""
    watched: bool = True
    """Whether points are counted at all, which takes time."""

    def document(self) -> dict[str, Any]:
        """Return all fields, as JSON holds them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class SmallAgent:
    """The parts of one agent."""

    def __init__(self, options: Options) -> None:
        self.folder = Path(options.folder)
        host = self._host = _open_host(options)
        self._snapshot = Latest(host.scan())
        self.ledger = Ledger.open(self.folder / "state/ledger.db", self._snapshot.value.boot_id)
        self.holders = pods_file.PodsFile(
            pods_file.path_of(self.folder / SOCKET),
            pods_file.kernel_boot_id(),
            self.ledger,
            Latest(Config(resources=(Resource(RESOURCE, "vf"), LATE), kubelet_dir=self.folder)),
        )
        self._kubelet = Kubelet(self.folder)
        self._stock = Latest(_stock_of(self._snapshot.value))
        late = Latest(Config(resources=(LATE,), kubelet_dir=self.folder / "kubelet"))
        self.bound = BoundSlots(late, self.ledger, SlotSpecs(self.folder / SPECS))
        self.binder = Binder(late, self.ledger, self.bound, self._stock, self._kubelet, busy_seconds=0.5)
        node = Node(host, self.ledger, self._snapshot)
        self.claims = ClaimParts(self.folder, node, self._snapshot)
        grants = GrantsAndClaims(answer=self._kubelet.granted, claims=self.claims.of_pods, facts=self.claims.facts)
        self.attachments = Attachments(node, grants, self.binder, Settings(busy_seconds=0.5))
        # Every pause of a lease that is owed is over at once: the state machine's time is not the clock's.
        self.attachments.detacher.leases = LeaseBook(self.ledger, clock=lambda: time.time() + LONGEST_PAUSE_SECONDS)
        self.server = CniServer(
            self.folder / SOCKET, self.attachments, condition=lambda: None, observe=lambda command: nullcontext()
        )
        self.outside = Answers(
            pods=self.claims.listed,
            units=self._units,
            ours=lambda: list(self._units()),
            held_units=self._held_units,
            replay=lambda: spool.Spool(self.folder / "spool").replay(self.server.answer),
        )
        settled = Latest(False)
        settled.subscribe(self.holders.complete)
        bindings = Bindings(self.ledger, self.bound, self._snapshot, self.outside)
        others = (bindings, self.claims.healer(self.outside))
        self.reconciler = Reconciler(self.ledger, self.attachments, self._snapshot, self.outside, settled, others)

    def start(self) -> None:
        """Heal, then serve."""
        self.attachments.leases.defer()
        asyncio.run(self.reconciler.look_around())
        self.reconciler.heal_attachments()
        self.server.start()
        self.claims.serve(self.attachments)
        self.attachments.leases.resume()

    def obey(self, order: Mapping[str, Any]) -> Any:
        """Do what the runtime's and kubelet's part of a test asks for, beside CNI."""
        match order["do"]:
            case "reconcile":
                self._snapshot.set(self._host.scan())
                self._stock.set(_stock_of(self._snapshot.value))
                self.claims.look()
                self.outside.counted.clear()
                asyncio.run(reconcile_once(self.reconciler))
                return [f"{action}: {reason}" for action, reason in self.outside.counted]
            case "grant":
                return granted_or_not(self.ledger.grant, RESOURCE, {device: device for device in order["devices"]})
            case "grant slots":
                self.bound.forget(order["slots"])
                return self.ledger.grant(LATE.name, dict.fromkeys(order["slots"], ""))
            case "prepare":
                return self.claims.prepare(ref_of(order))
            case "unprepare":
                return self.claims.unprepare(ref_of(order))
            case "nothing":
                return None
        raise ValueError(order)

    async def _held_units(self) -> Sequence[HeldUnit]:
        self.holders.look()
        return self._kubelet.held_units()

    def _units(self) -> Mapping[str, str]:
        return {device.address: device.address for device in self._snapshot.value.devices if device.is_vf}


def _stock_of(snapshot: Snapshot) -> Offer:
    """List what there is to choose from: all VFs of a snapshot."""
    return Offer(snapshot, pools=plain_offer((LATE,), snapshot).pools)


def _open_host(options: Options) -> Host:
    if options.is_real:
        return Machine.open()
    folder = Path(options.folder)
    return replace(SimulatedMachine.open(folder), vf_control=StepByStep(folder / "vf-settings.json"))


def live(options: Options, orders: socket.socket, epitaph: int) -> None:
    """Start an agent, and obey until the other end closes the connection."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(threadName)s: %(message)s")
    logging.info("an agent starts, process %d, %s", os.getpid(), options)
    points = Points(epitaph, lambda: observe.everything(Path(options.folder)))
    if options.watched:
        points.install()
    if options.note_points or options.die_at is not None:
        points.arm(options.die_at)
    agent = SmallAgent(options)
    agent.start()
    started = points.disarm()
    with orders.makefile("rw") as lines:

        def tell(what: Any) -> None:
            with points.silence():
                lines.write(json.dumps(what) + "\n")
                lines.flush()

        tell([astuple(p) for p in started])
        for line in lines:
            order = json.loads(line)
            if order["do"] == "arm":
                points.arm(order["at"])
                tell(None)
            elif order["do"] == "disarm":
                tell([astuple(p) for p in points.disarm()])
            else:
                tell(agent.obey(order))
