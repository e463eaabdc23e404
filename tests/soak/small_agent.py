"""An agent without kubelet's door: the parts around its books, its CNI socket and what prepares claims, as at a start.

It is made to be killed: a fresh one is up within milliseconds, because `zygote` forks it off. Orders come as JSON lines
over a socket.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Coroutine, Mapping
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from agent.errors import AgentError
from agent.hardware.host import Host
from agent.hardware.machine import Machine
from agent.ledger import Ledger
from agent.model.allocation import LONGEST_PAUSE_SECONDS, ClaimRef, VfSettings
from agent.model.unit_id import cdi_name
from agent.offer.offer import Offer
from agent.reconcile import claims
from agent.reconcile.view import View
from agent.state import Latest
from agent.wiring import Parts
from cni.call import Node
from cni.ipam.leases import LeaseBook
from cni.pod_devices import HeldDevices
from deviceplugin.dra.attributes import Facts, StableFacts, stable_facts
from deviceplugin.dra.devices import DraDevice, devices_of
from deviceplugin.dra.planner import Planner
from deviceplugin.dra.pods import Allocations, GpuAsker
from deviceplugin.dra.preparer import ClaimFiles, DeviceUsers, Patience, Preparer
from hack.sim.machine import RecordedVfControl, SimulatedMachine
from tests.agent.reconcile.scene import reconcile_once
from tests.node import granted, new_report
from tests.soak import observe
from tests.soak.configured import DRIVER, GRANTED, LATE, POOL, config, offer_of
from tests.soak.kubelet import Api, Kubelet
from tests.soak.points import Points

T = TypeVar("T")

SOCKET = "cni.sock"
PATIENCE = Patience(prepare=0.3, unprepare=0.3, poll=0.005, slow_poll=0.02)


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


class OldClaims:
    """Heals claims as if every one were old, and every pause over: the state machine's time is not the clock's."""

    name = claims.Claims.name

    def __init__(self, healer: claims.Claims) -> None:
        self._healer = healer

    def heal(self, view: View) -> None:
        """Heal at once."""
        self._healer._asked_at.clear()
        self._healer.heal(replace(view, asked_at=time.time() + 2 * claims.NEW_SECONDS))


class SmallAgent:
    """The parts of one agent, and the loop that kubelet is asked on, with a thread of its own."""

    def __init__(self, options: Options) -> None:
        self.folder = Path(options.folder)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="loop", daemon=True).start()
        self._host = _open_host(options)
        self._scans = Latest(replace(self._host.scan(), generation=1))
        self.ledger = Ledger.open(self.folder / "state/ledger.db", self._scans.value.boot_id)
        self._config, self._offer = Latest(config(self.folder)), Latest(Offer())
        self._catalog, self._facts = Latest(tuple[DraDevice, ...]()), Latest(Facts(StableFacts()))
        self._look()
        self.parts = self._do(self._put_together())
        self._preparer = self._make_preparer()

    async def _put_together(self) -> Parts:
        node = Node(self._host, self.ledger, self._scans)
        parts = Parts(self._config, node, self._offer, Kubelet(self.folder), new_report(), busy_seconds=0.5)
        parts.claim_reader.set(Api(self.folder))
        # Every pause of a lease that is owed is over at once: the state machine's time is not the clock's.
        detacher = parts.attachments.detacher
        detacher.leases = LeaseBook(self.ledger, clock=lambda: time.time() + LONGEST_PAUSE_SECONDS)
        healers = parts.reconciler.healers
        parts.reconciler.healers = tuple(OldClaims(h) if isinstance(h, claims.Claims) else h for h in healers)
        # Networks that name PFs have a pool here, too: the VFs that nobody has.
        setattr(HeldDevices, "offered", lambda held: {})  # noqa: B010
        return parts

    def _make_preparer(self) -> Preparer:
        api, kubelet = Api(self.folder), self.parts.asker
        planner = Planner(self._config, self._offer, self._catalog, self.ledger, GpuAsker(kubelet, api), api)
        files = ClaimFiles(self.parts.cdi_specs, self._config, self._catalog, self._facts)
        users = DeviceUsers(self.ledger, api, kubelet, self.parts.attachments)
        allocations = Allocations(kubelet, api, DRIVER, POOL)
        return Preparer(allocations, planner, self.ledger, files, users, PATIENCE)

    def start(self) -> None:
        """Heal, then serve."""
        leases = self.parts.attachments.leases
        leases.defer()
        self._do(self.parts.reconciler.begin())
        self._do(self.parts.specs.look())
        self.parts.server.start()
        leases.resume()

    def obey(self, order: Mapping[str, Any]) -> Any:
        """Do what the runtime's and kubelet's part of a test asks for, beside CNI. Tells what is wrong, if anything."""
        try:
            match order["do"]:
                case "reconcile":
                    self._scans.set(replace(self._host.scan(), generation=self._scans.value.generation + 1))
                    self._look()
                    self._do(reconcile_once(self.parts.reconciler))
                    return self._do(self.parts.specs.look())
                case "grant":
                    return self.parts.records.grant(granted(GRANTED.name, {d: d for d in order["devices"]}))
                case "grant slots":
                    return self.parts.records.grant(granted(LATE.name, dict.fromkeys(order["slots"], ())))
                case "prepare":
                    return [cdi_name("claim", hold.key) for hold in self._preparer.prepare(_ref(order))]
                case "unprepare":
                    self._preparer.unprepare(_ref(order))
                    return []
                case "nothing":
                    return None
        except AgentError as error:
            return {"error": str(error)}
        raise ValueError(order)

    def _look(self) -> None:
        """Offer what there is now."""
        offer = offer_of(self._scans.value)
        self._facts.set(Facts(stable_facts(offer, self._facts.value.stable)))
        self._catalog.set(devices_of(self._config.value, offer, self._facts.value))
        self._offer.set(offer)

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _ref(order: Mapping[str, Any]) -> ClaimRef:
    return ClaimRef(order["uid"], order["namespace"], order["name"])


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
