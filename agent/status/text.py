"""The status document laid out for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

UNKNOWN_POD = "(not known yet)"
SHOWN_ID = 12
MOST_UNITS = 8
"""So many unhealthy units of one reason have a line each; more are counted."""
SLOT_COUNTS = ("units", "healthy", "granted", "bound")


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
        rows = [
            (g["unit"], g["resource"], _behind(g), g["pod"] or UNKNOWN_POD, ago(now - g["since"]))
            for g in document["grants"]
        ]
        lines += ["", *table(("GRANTED UNIT", "RESOURCE", "DEVICE", "POD", "FOR"), rows)]
    if document["slots"]:
        slots = [
            (s["resource"], "-" if s["numaNode"] is None else s["numaNode"], *(s[key] for key in SLOT_COUNTS))
            for s in document["slots"]
        ]
        lines += ["", *table(("SLOTS OF", "NUMA", "UNITS", "HEALTHY", "GRANTED", "BOUND"), slots)]
    failing = [row for r in document["resources"] for row in _failing(r, document["reasons"])]
    if failing:
        lines += ["", *table(("UNHEALTHY UNIT", "RESOURCE", "REASON", "WHICH MEANS"), failing)]
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


def events_text(events: Sequence[Mapping[str, Any]], now: float) -> str:
    """Lay the document's events out for people, the newest first."""
    rows = [
        (ago(now - e["at"]), "!" if e["warning"] else "", e["kind"], e["subject"], e["text"] + _times(e["count"]))
        for e in events
    ]
    return "\n".join(table(("AGO", "", "KIND", "WHAT", "EVENT"), rows)) if rows else "nothing has happened yet"


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


def _behind(grant: Mapping[str, Any]) -> str:
    """Name the device behind a granted unit, unless the unit is called like it."""
    return "" if grant["device"] in grant["unit"] else str(grant["device"])


def _failing(resource: Mapping[str, Any], meaning: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """List the unhealthy units of a resource, many with one reason in one line."""
    by_reason: dict[str, list[str]] = {}
    for unit in resource["unhealthy"]:
        by_reason.setdefault(unit["reason"], []).append(unit["unit"])
    rows = []
    for reason, units in by_reason.items():
        shown = units if len(units) <= MOST_UNITS else [f"{units[0]} and {len(units) - 1} more"]
        rows += [(unit, resource["name"], reason, meaning.get(reason, "")) for unit in shown]
    return rows


def _times(count: int) -> str:
    return f" ({count} times)" if count > 1 else ""
