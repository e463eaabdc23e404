"""The status document: what the node offers, who holds what, and what is wrong. Pure.

The same document feeds the /status endpoint, the status page, `nodefabric status` and tests. It holds only what
changes when something happens, and no clock, so that two documents of one state are the same to the byte.
`docs/status-json.md` describes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.events import Event
from agent.ledger.reading import Books
from agent.metrics import Facts
from agent.model.allocation import Attachment, Grant, OwedLease, Quarantine
from agent.model.reasons import text_of
from agent.model.slots import is_slot_id
from agent.model.unit import OfferedUnit
from agent.obstacles import NO_POD_NEEDS
from agent.status import hardware

FORMAT = 2
"""Counts up when a key changes its meaning or goes; new keys may come without that."""


def build(
    facts: Facts,
    *,
    node: str,
    version: str,
    kinds: Mapping[str, str],
    obstacles: Mapping[str, str],
    events: Sequence[Event] = (),
) -> dict[str, Any]:
    """Make the document. `kinds` maps resource names to their kind, `obstacles` checks to what is wrong.

    `events` come newest first.
    """
    granted = {grant.unit_id: grant for grant in facts.grants}
    attached = {row.device for row in facts.attachments}
    rails = {unit.unit_id: gpu for units in facts.units.values() for unit in units if (gpu := _gpu_of(unit))}
    return {
        "format": FORMAT,
        "node": node,
        "version": version,
        "ready": obstacles.keys() <= NO_POD_NEEDS,
        "obstacles": dict(obstacles),
        "snapshot": {"generation": facts.snapshot.generation, "scanMilliseconds": round(facts.scan_milliseconds, 1)},
        "resources": [
            {
                "name": name,
                "kind": kinds.get(name, ""),
                "units": len(units),
                "healthy": sum(unit.health.healthy for unit in units),
                "granted": sum(unit.unit_id in granted for unit in units),
                "attached": len(attached.intersection(unit.device for unit in units)),
                "unhealthy": [
                    {"unit": unit.unit_id, "reason": unit.health.reason} for unit in units if not unit.health.healthy
                ],
            }
            for name, units in facts.units.items()
        ],
        "reasons": _reasons(facts.units),
        "hardware": hardware.describe(facts.snapshot),
        "offers": _offers(facts.units, kinds, granted),
        "slots": _slots(facts.units, granted),
        "grants": [
            _grant(grant, facts.containers.get(grant.unit_id), rails.get(grant.unit_id, "")) for grant in facts.grants
        ],
        "attachments": [_attachment(row) for row in facts.attachments],
        **_withheld(facts.quarantines, facts.owed_leases),
        "problems": [{"path": problem.path, "text": problem.text} for problem in facts.snapshot.problems],
        "events": [_event(event) for event in events],
    }


def without_agent(found: Books, *, node: str, version: str, problem: str) -> dict[str, Any]:
    """Make the document from the books alone. `problem` says what is wrong with the agent.

    What the hardware is like, and so the resources, only a running agent knows.
    """
    return {
        "format": FORMAT,
        "node": node,
        "version": version,
        "ready": False,
        "obstacles": {"agent": problem},
        "resources": [],
        "reasons": {},
        "hardware": dict(hardware.NOTHING),
        "offers": [],
        "slots": [],
        "grants": [_grant(grant) for grant in found.grants],
        "attachments": [_attachment(row) for row in found.attachments],
        **_withheld(found.quarantines, found.owed_leases),
        "problems": [],
        "events": [],
    }


@dataclass(slots=True)
class _Tally:
    """What is counted of the units of one resource on one device."""

    units: int = 0
    healthy: int = 0
    granted: int = 0
    bound: int = 0
    reasons: tuple[str, ...] = ()

    def count(self, unit: OfferedUnit, grant: Grant | None) -> None:
        """Count a unit."""
        self.units += 1
        self.healthy += unit.health.healthy
        self.granted += grant is not None
        self.bound += grant is not None and bool(grant.device)
        if not unit.health.healthy and unit.health.reason not in self.reasons:
            self.reasons = (*self.reasons, unit.health.reason)


def _offers(
    units: Mapping[str, Sequence[OfferedUnit]], kinds: Mapping[str, str], granted: Mapping[str, Grant]
) -> list[dict[str, Any]]:
    """Tell how many units each device has in each resource; slots, which have none yet, are told apart."""
    found: dict[tuple[str, str], _Tally] = {}
    for name, of_resource in units.items():
        for unit in of_resource:
            for device in filter(None, (unit.device, _gpu_of(unit))):
                found.setdefault((device, name), _Tally()).count(unit, granted.get(unit.unit_id))
    return [
        {
            "device": device,
            "resource": name,
            "kind": kinds.get(name, ""),
            "units": tally.units,
            "healthy": tally.healthy,
            "granted": tally.granted,
            "reasons": list(tally.reasons),
        }
        for (device, name), tally in found.items()
    ]


def _slots(units: Mapping[str, Sequence[OfferedUnit]], granted: Mapping[str, Grant]) -> list[dict[str, Any]]:
    """Count the slots of each resource and NUMA node, and how many of these have a device now."""
    found: dict[tuple[str, int], _Tally] = {}
    for name, of_resource in units.items():
        for unit in of_resource:
            if not unit.device or is_slot_id(unit.unit_id):
                found.setdefault((name, unit.numa_node), _Tally()).count(unit, granted.get(unit.unit_id))
    return [
        {
            "resource": name,
            "numaNode": numa_node if numa_node >= 0 else None,
            "units": tally.units,
            "healthy": tally.healthy,
            "granted": tally.granted,
            "bound": tally.bound,
            "reasons": list(tally.reasons),
        }
        for (name, numa_node), tally in found.items()
    ]


def _gpu_of(unit: OfferedUnit) -> str:
    """Name the GPU of a rail's unit, whose device is the NIC."""
    return str(getattr(unit, "gpu", ""))


def _reasons(units: Mapping[str, Sequence[OfferedUnit]]) -> dict[str, str]:
    """Explain the reason words that occur; empty for a word that nobody explains."""
    words = {str(unit.health.reason) for found in units.values() for unit in found if not unit.health.healthy}
    return {word: text_of(word) for word in sorted(words)}


def _withheld(quarantines: Sequence[Quarantine], owed_leases: Sequence[OwedLease]) -> dict[str, Any]:
    """Say what is withheld, and which addresses are still leased for nobody."""
    return {
        "quarantine": [{"device": q.device, "reason": q.reason, "since": q.since} for q in quarantines],
        "owedLeases": [
            {
                "container": lease.container_id,
                "ifname": lease.ifname,
                "plugin": ((lease.request.get("network") or {}).get("ipam") or {}).get("type", ""),
                "since": lease.since,
                "triedAt": lease.tried_at or None,
                "problem": lease.problem,
            }
            for lease in owed_leases
        ],
    }


def _grant(grant: Grant, container: str | None = None, gpu: str = "") -> dict[str, Any]:
    return {
        "unit": grant.unit_id,
        "resource": grant.resource_name,
        "device": grant.device,
        "pod": str(grant.pod) if grant.pod else None,
        "container": container,
        "since": grant.granted_at,
        **({"gpu": gpu} if gpu else {}),
    }


def _attachment(row: Attachment) -> dict[str, Any]:
    answer = row.result or {}
    index = next((i for i, found in enumerate(answer.get("interfaces", [])) if found.get("name") == row.ifname), None)
    return {
        "device": row.device,
        "mode": row.undo.mode,
        "netdev": row.undo.netdev,
        "resource": row.resource_name,
        "ifname": row.ifname,
        "addresses": [ip["address"] for ip in answer.get("ips", []) if ip.get("interface") == index],
        "pod": str(row.owner.pod),
        "container": row.owner.container_id,
        "state": row.state.value,
        "since": row.since,
    }


def _event(event: Event) -> dict[str, Any]:
    return {
        "number": event.number,
        "at": event.at,
        "kind": event.kind,
        "subject": event.subject,
        "text": event.text,
        "warning": event.warning,
        "count": event.count,
    }
