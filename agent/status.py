"""The status document: what the node offers, who holds what, and what is wrong.

Pure. The same document feeds the /status endpoint, `nodefabric status` and tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agent.ledger.reading import Books
from agent.metrics import Facts
from agent.model.allocation import Attachment, Grant, OwedLease, Quarantine

UNKNOWN_POD = "(not known yet)"
SHOWN_ID = 12


def build(
    facts: Facts, *, node: str, version: str, kinds: Mapping[str, str], obstacles: Mapping[str, str]
) -> dict[str, Any]:
    """Make the document. `kinds` maps resource names to their kind, `obstacles` checks to what is wrong."""
    granted = {grant.unit_id: grant for grant in facts.grants}
    attached = {row.device for row in facts.attachments}
    return {
        "node": node,
        "version": version,
        "ready": not obstacles,
        "obstacles": dict(obstacles),
        "snapshot": {"generation": facts.snapshot.generation, "scanMilliseconds": round(facts.scan_milliseconds, 1)},
        "resources": [
            {
                "name": name,
                "kind": kinds.get(name, ""),
                "units": len(units),
                "healthy": sum(unit.health.healthy for unit in units),
                "granted": sum(unit.unit_id in granted for unit in units),
                "attached": sum(unit.device in attached for unit in units) if kinds.get(name) == "vf" else 0,
                "unhealthy": [
                    {"unit": unit.unit_id, "reason": unit.health.reason} for unit in units if not unit.health.healthy
                ],
            }
            for name, units in facts.units.items()
        ],
        "grants": [_grant(grant) for grant in facts.grants],
        "attachments": [_attachment(row) for row in facts.attachments],
        **books(facts.quarantines, facts.owed_leases),
        "problems": [{"path": problem.path, "text": problem.text} for problem in facts.snapshot.problems],
    }


def without_agent(found: Books, *, node: str, version: str, problem: str) -> dict[str, Any]:
    """Make the document from the books alone. `problem` says what is wrong with the agent.

    What the hardware is like, and so the resources, only a running agent knows.
    """
    return {
        "node": node,
        "version": version,
        "ready": False,
        "obstacles": {"agent": problem},
        "resources": [],
        "grants": [_grant(grant) for grant in found.grants],
        "attachments": [_attachment(row) for row in found.attachments],
        **books(found.quarantines, found.owed_leases),
        "problems": [],
    }


def books(quarantines: Sequence[Quarantine], owed_leases: Sequence[OwedLease]) -> dict[str, Any]:
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


def _grant(grant: Grant) -> dict[str, Any]:
    return {
        "unit": grant.unit_id,
        "resource": grant.resource_name,
        "device": grant.device,
        "pod": str(grant.pod) if grant.pod else None,
        "since": grant.granted_at,
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


def text(document: Mapping[str, Any], now: float) -> str:
    """Lay the document out for people. `now` is in seconds since the epoch."""
    lines = [
        f"node {document['node']}  nodefabric {document['version']}  {'ready' if document['ready'] else 'NOT READY'}"
    ]
    lines += [f"  {name}: {what}" for name, what in document["obstacles"].items()]
    offered = [
        (r["name"], r["kind"], r["units"], r["healthy"], r["granted"], r["attached"]) for r in document["resources"]
    ]
    if offered:
        lines += ["", *table(("RESOURCE", "KIND", "UNITS", "HEALTHY", "GRANTED", "ATTACHED"), offered)]
    lines += (
        [
            "",
            *table(
                ("DEVICE", "RESOURCE", "POD", "INTERFACE", "ADDRESS", "STATE", "FOR"),
                [
                    (
                        *(a["device"], a["resource"], a["pod"], a["ifname"]),
                        *(", ".join(a["addresses"]), a["state"], ago(now - a["since"])),
                    )
                    for a in document["attachments"]
                ],
            ),
        ]
        if document["attachments"]
        else ["", "no device is in a pod"]
    )
    if document["grants"]:
        rows = [(g["unit"], g["resource"], g["pod"] or UNKNOWN_POD) for g in document["grants"]]
        lines += ["", *table(("GRANTED UNIT", "RESOURCE", "POD"), rows)]
    failing = [(u["unit"], r["name"], u["reason"]) for r in document["resources"] for u in r["unhealthy"]]
    if failing:
        lines += ["", *table(("UNHEALTHY UNIT", "RESOURCE", "REASON"), failing)]
    if document["quarantine"]:
        held = [(q["device"], ago(now - q["since"]), q["reason"]) for q in document["quarantine"]]
        lines += ["", *table(("QUARANTINED", "FOR", "REASON"), held)]
    if document["owedLeases"]:
        owed = [
            (
                o["container"][:SHOWN_ID],
                o["ifname"],
                o["plugin"],
                ago(now - o["since"]),
                o["problem"] or "not tried yet",
            )
            for o in document["owedLeases"]
        ]
        lines += ["", *table(("LEASES OWED: CONTAINER", "INTERFACE", "PLUGIN", "FOR", "PROBLEM"), owed)]
    lines += [f"cannot read {problem['path']}: {problem['text']}" for problem in document["problems"]]
    return "\n".join(lines)


def ago(seconds: float) -> str:
    """Spell a time span in its largest unit: 45s, 12m, 5h, 3d."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lay out rows in columns as wide as their content."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
