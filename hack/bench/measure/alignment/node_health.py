"""From a kernel event to kubelet's list on one modelled node: the agent as a process, over its real sockets.

The NICs are those that pods are played on. A PF's link goes and comes, and all its VFs with it; where no NIC hangs on
a PF's link, the driver of a NIC is unbound and bound. Links must last for no time here (`downSeconds: 0`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hack.sim.machine import SimulatedMachine
from hack.sim.stage import Stage
from measure import faults
from measure.alignment.scenarios import GPU, NIC, WHOLE, Scenario
from measure.faults import Fault
from measure.figures import quantile
from measure.health import RELAY
from measure.lists import Lists

EVENTS = 12
"""On each node, at most: with the agent's start that takes some eight seconds."""
ALL_SECONDS = 150.0
"""After so long no further node is begun."""


@dataclass(frozen=True, slots=True)
class Soonness:
    """How soon the list told of faults of one kind."""

    fault: str
    milliseconds: float
    """The median."""


class NodeHealth:
    """Measures one node after the other, for a bounded time in all."""

    def __init__(self, say: Callable[[str], None], events: int, relay: Path = RELAY) -> None:
        self._say = say
        self._events = min(events, EVENTS)
        self._relay = relay
        self._began = time.monotonic()

    def measure(self, file: Path, scenario: Scenario) -> Soonness | None:
        """Measure on a node file; None if no NIC of the scenario can be shown a fault, or the time is over."""
        if time.monotonic() > self._began + ALL_SECONDS:
            self._say(f"health, {scenario.node}: left out, as the nodes before took {ALL_SECONDS:g} s")
            return None
        # In a socket's path are 107 characters: a folder with a short name.
        with tempfile.TemporaryDirectory(prefix="nf-bench-", dir="/var/tmp") as folder:
            stage = Stage(Path(folder), self._relay)
            try:
                return self._measure(stage, file, scenario)
            except BaseException:
                self._say(stage.log_ends())
                raise
            finally:
                stage.close()

    def _measure(self, stage: Stage, file: Path, scenario: Scenario) -> Soonness | None:
        machine = stage.build_node(file, with_links=False)
        stage.start_kubelet()
        stage.write_config(configuration(scenario))
        stage.start_agent()
        stage.await_ready()
        lists = Lists(stage.folder / "kubelet/device-plugins", NIC, all_healthy=False)
        try:
            # The unit of an HCA's share is called by its device and a number.
            healthy = [nic for nic in scenario.devices if not any(unit.startswith(nic) for unit in lists.sick)]
            kind, found = faults_of(machine, healthy)
            if not found:
                self._say(f"health, {scenario.node}: no NIC could be shown a fault")
                return None
            self._say(f"health, {scenario.node}: {self._events} times {kind} goes or comes")
            return Soonness(kind, quantile(faults.sample(lists, found, self._events), 0.5))
        finally:
            lists.close()


def faults_of(machine: SimulatedMachine, nics: Sequence[str]) -> tuple[str, list[Fault]]:
    """List what can happen to these NICs (VFs or whole adapters), and say what it is; nothing if nothing can."""
    snapshot = machine.scan()
    devices = [snapshot.by_address[nic] for nic in nics]
    pfs = {pf.address: pf for device in devices if (pf := snapshot.parent(device)) is not None}
    links = [
        faults.link(machine, pf, sum(device.physfn == pf.address for device in devices))
        for pf in pfs.values()
        if pf.netdev is not None and pf.netdev.carrier
    ]
    if links:
        return "a PF's link", links
    return "a NIC's driver", [faults.driver(machine, device) for device in devices if device.driver is not None]


def configuration(scenario: Scenario) -> Mapping[str, Any]:
    """Make the agent's configuration for the pods of a scenario."""
    whole = scenario.nics == WHOLE
    shares, kind = ({"shares": 1}, "hca") if whole else ({}, "vf")
    nic = {"name": NIC, "kind": kind, "select": {"pciAddresses": list(scenario.devices)}, **shares}
    return {"resources": [nic, {"name": GPU, "kind": "gpu"}], "health": {"downSeconds": 0, "upSeconds": 0}}
