"""The status document laid out for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agent.model.printable import joined, one_line

SHOWN_ID = 12
MOST_UNITS = 8
"""So many unhealthy units of one reason have a line each; more are counted."""
UNHEALTHY = "Unhealthy"
"""Such units have a block of their own."""
SLOT_COUNTS = ("units", "healthy", "granted", "bound")

Row = tuple[object, ...]


def text(document: Mapping[str, Any], now: float) -> str:
    """Lay the document out for people. `now` is in seconds since the epoch."""
    lines = [
        f"node {document['node']}  nodefabric {document['version']}  {'ready' if document['ready'] else 'NOT READY'}"
    ]
    lines += [f"  {name}: {what}" for name, what in document["obstacles"].items()]
    lines += _driver(document.get("dra"))
    lines += _block(("RESOURCE", "KIND", "UNITS", "HEALTHY", "GRANTED", "ATTACHED"), _resources(document))
    head = ("DEVICE", "RESOURCE", "HELD", "INTERFACE", "ADDRESS", "STATE", "FOR")
    lines += _block(head, _held(document, now)) or ["", "no pod has a device"]
    lines += _block(("SLOTS OF", "NUMA", "UNITS", "HEALTHY", "GRANTED", "BOUND"), _slots(document))
    failing = [row for r in document["resources"] for row in _failing(r, document["reasons"])]
    lines += _block(("UNHEALTHY UNIT", "RESOURCE", "REASON", "WHICH MEANS"), failing)
    left_out = [
        (each["what"], each["resource"] or "-", each["text"], each["remedy"])
        for each in document.get("notOffered", ())
        if each["reason"] != UNHEALTHY
    ]
    lines += _block(("NOT OFFERED", "BY", "WHY", "WHAT TO DO"), left_out)
    held = [(q["device"], ago(now - q["since"]), q["reason"]) for q in document["quarantine"]]
    lines += _block(("QUARANTINED", "FOR", "REASON"), held)
    lines += _block(("LEASES OWED: CONTAINER", "INTERFACE", "PLUGIN", "FOR", "PROBLEM"), _owed(document, now))
    lines += [f"cannot read {problem['path']}: {problem['text']}" for problem in document["problems"]]
    return joined(lines)


def events_text(events: Sequence[Mapping[str, Any]], now: float) -> str:
    """Lay the document's events out for people, the newest first."""
    rows = [
        (
            *(ago(now - e["at"]), "!" if e["warning"] else "", e["kind"], e["subject"]),
            e["text"] + (f" ({e['count']} times)" if e["count"] > 1 else ""),
        )
        for e in events
    ]
    return joined(table(("AGO", "", "KIND", "WHAT", "EVENT"), rows)) if rows else "nothing has happened yet"


def ago(seconds: float) -> str:
    """Spell a time span in its largest unit: 45s, 12m, 5h, 3d."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lay out rows in columns as wide as their content."""
    cells = [list(head), *([one_line(str(cell)) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _block(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lay out a table with an empty line before it; nothing without rows."""
    return ["", *table(head, rows)] if rows else []


def _resources(document: Mapping[str, Any]) -> list[Row]:
    keys = ("name", "kind", "units", "healthy", "granted", "attached")
    return [tuple(resource[key] for key in keys) for resource in document["resources"]]


def _held(document: Mapping[str, Any], now: float) -> list[Row]:
    return [
        (
            *(h["device"], h["resource"], h["how"], h["ifname"]),
            *(", ".join(h["addresses"]), h["state"], ago(now - h["since"])),
        )
        for h in document["held"]
    ]


def _driver(dra: Mapping[str, Any] | None) -> list[str]:
    """Say in one line how the DRA driver stands, where there is one."""
    if dra is None:
        return []
    known = "registered with kubelet" if dra["registered"] else f"NOT REGISTERED with kubelet: {dra['problem']}"
    slices = "slices not known yet" if dra["slices"] is None else f"{_count(dra['slices'], 'slice')} published"
    healthy = sum(found["count"] for found in dra["devices"] if found["health"] == "healthy")
    devices = f"{_count(sum(found['count'] for found in dra['devices']), 'device')}, {healthy} healthy"
    told = f"DRA driver {dra['driver']}: {known}; {slices}; {devices}"
    return [f"{told}; the cluster leaves out {', '.join(dra['dropped'])}" if dra["dropped"] else told]


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _slots(document: Mapping[str, Any]) -> list[Row]:
    return [
        (s["resource"], "-" if s["numaNode"] is None else s["numaNode"], *(s[key] for key in SLOT_COUNTS))
        for s in document["slots"]
    ]


def _owed(document: Mapping[str, Any], now: float) -> list[Row]:
    return [
        (o["container"][:SHOWN_ID], o["ifname"], o["plugin"], ago(now - o["since"]), o["problem"] or "not tried yet")
        for o in document["owedLeases"]
    ]


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
