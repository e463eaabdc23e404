"""The status document: what the node offers, who holds what, and what is wrong.

Pure. The same document feeds the /status endpoint, `nodefabric status` and tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agent.metrics import Facts
from agent.model.allocation import Attachment, Grant

UNKNOWN_POD = "(not known yet)"


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
        "quarantine": [{"device": q.device, "reason": q.reason, "since": q.since} for q in facts.quarantines],
        "problems": [{"path": problem.path, "text": problem.text} for problem in facts.snapshot.problems],
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
        "netdev": row.undo.netdev,
        "resource": row.resource_name,
        "ifname": row.ifname,
        "addresses": [ip["address"] for ip in answer.get("ips", []) if ip.get("interface") == index],
        "pod": str(row.owner.pod),
        "container": row.owner.container_id,
        "state": row.state.value,
        "since": row.since,
    }


def text(document: Mapping[str, Any]) -> str:
    """Lay the document out for people."""
    lines = [
        f"node {document['node']}  nodefabric {document['version']}  {'ready' if document['ready'] else 'NOT READY'}"
    ]
    lines += [f"  {name}: {what}" for name, what in document["obstacles"].items()]
    lines += [
        "",
        *table(
            ("RESOURCE", "KIND", "UNITS", "HEALTHY", "GRANTED", "ATTACHED"),
            [
                (r["name"], r["kind"], r["units"], r["healthy"], r["granted"], r["attached"])
                for r in document["resources"]
            ],
        ),
    ]
    lines += (
        [
            "",
            *table(
                ("DEVICE", "RESOURCE", "POD", "INTERFACE", "ADDRESS", "STATE"),
                [
                    (a["device"], a["resource"], a["pod"], a["ifname"], ", ".join(a["addresses"]), a["state"])
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
        held = [(q["device"], q["reason"]) for q in document["quarantine"]]
        lines += ["", *table(("QUARANTINED", "REASON"), held)]
    lines += [f"cannot read {problem['path']}: {problem['text']}" for problem in document["problems"]]
    return "\n".join(lines)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lay out rows in columns as wide as their content."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
