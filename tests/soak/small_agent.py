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

from agent.config import Resource
from agent.errors import Unavailable
from agent.hardware.host import Host
from agent.hardware.machine import Machine
from agent.ledger import Ledger
from agent.model.allocation import LONGEST_PAUSE_SECONDS, PodRef, VfSettings
from agent.reconcile import Claim, Reconciler
from agent.sim.machine import RecordedVfControl, SimulatedMachine
from cni import holders, spool
from cni.attachment import Attachments, GrantedDevice
from cni.leases import LeaseBook
from cni.server import CniServer
from tests.soak import observe, slots
from tests.soak.points import Points

GRANTED = "granted.json"
"""In the node's folder: what kubelet says that pods hold, as {"pod": [[device, resource, network], …]}."""
AWAY = "kubelet-away"
RESOURCE = "rdma/vf"
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
        self._snapshot = host.scan()
        self.ledger = Ledger.open(self.folder / "state/ledger.db", self._snapshot.boot_id)
        self.holders = holders.Holders(
            holders.path_of(self.folder / SOCKET),
            holders.kernel_boot_id(),
            self.ledger,
            (Resource(RESOURCE, "vf"), slots.LATE),
            lambda: None,
        )
        self._stock = slots.stock_of(self._snapshot)
        self.binder = slots.make_binder(self.folder, self.ledger, lambda: self._stock)
        self.attachments = Attachments(
            *(host, self.ledger, lambda: self._snapshot, self._granted), busy_seconds=0.5, slots=self.binder
        )
        # Every pause of a lease that is owed is over at once: the state machine's time is not the clock's.
        self.attachments.leases = LeaseBook(self.ledger, clock=lambda: time.time() + LONGEST_PAUSE_SECONDS)
        self.server = CniServer(
            self.folder / SOCKET, self.attachments, obstacle=lambda: None, observe=lambda command: nullcontext()
        )
        self.counted: list[str] = []
        self.reconciler = Reconciler(
            self.ledger,
            self.attachments,
            claims=self._claims,
            devices_of_units=self._units,
            replay_spool=lambda: spool.replay(self.folder / "spool", self.server.answer),
            count=lambda action, reason: self.counted.append(f"{action}: {reason}"),
            snapshot=lambda: self._snapshot,
            ours=lambda: list(self._units()),
            slots=self.binder,
            tell_settled=self.holders.complete,
        )

    def start(self) -> None:
        """Heal, then serve."""
        self.attachments.leases.defer()
        asyncio.run(self.reconciler.look_around())
        self.reconciler.heal_attachments()
        self.server.start()
        self.attachments.leases.resume()

    def obey(self, order: Mapping[str, Any]) -> Any:
        """Do what the runtime's and kubelet's part of a test asks for, beside CNI."""
        match order["do"]:
            case "reconcile":
                self._snapshot = self._host.scan()
                self._stock = slots.stock_of(self._snapshot)
                self.counted.clear()
                asyncio.run(self.reconciler.run_once())
                return list(self.counted)
            case "grant":
                return self.ledger.grant(RESOURCE, {device: device for device in order["devices"]})
            case "grant slots":
                self.binder.forget(order["slots"])
                return self.ledger.grant(slots.LATE.name, dict.fromkeys(order["slots"], ""))
            case "nothing":
                return None
        raise ValueError(order)

    def _granted(self, pod: PodRef) -> Sequence[GrantedDevice]:
        found = self._told().get(pod.name, [])
        return tuple(GrantedDevice(device, RESOURCE, network) for device, network in found)

    async def _claims(self) -> Sequence[Claim]:
        self.holders.look()
        if (self.folder / AWAY).exists():
            raise Unavailable("kubelet is away")
        held = [(pod, RESOURCE, device) for pod, found in self._told().items() for device, _ in found]
        held += [(pod, slots.LATE.name, slot) for pod, found in slots.told(self.folder).items() for slot in found]
        return tuple(Claim(PodRef("default", pod), name, unit) for pod, name, unit in held)

    def _told(self) -> dict[str, Any]:
        try:
            document: dict[str, Any] = json.loads((self.folder / GRANTED).read_text())
        except FileNotFoundError:
            return {}
        return document

    def _units(self) -> Mapping[str, str]:
        return {device.address: device.address for device in self._snapshot.devices if device.is_vf}


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
