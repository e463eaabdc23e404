"""Tallies to a report, and a report to tables. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from measure.alignment.node_health import Soonness
from measure.alignment.score import Tally

WAYS = (
    ("late_binding", "late binding"),
    ("early_pairing", "early pairing"),
    ("greedy", "greedy nearest"),
    ("numa_only", "NUMA only"),
    ("kubelet_default", "kubelet alone"),
)
"""Key in the report, and words for people; the best first."""
UNREAD = "early_pairing_unread"
"""Early pairing that hears of no pod's end but through kubelet's calls."""
MIXED = "early_pairing_mixed_burst"
"""Early pairing where some pods ask for one kind only, and many come at once."""
OURS = ("late_binding", "early_pairing")
BEGIN, END = "<!-- alignment: begin -->", "<!-- alignment: end -->"


@dataclass(frozen=True, slots=True)
class Line:
    """What was played on one node with one kind of NICs."""

    node: str
    nics: str
    tallies: Mapping[str, Tally]
    """By way; one that cannot be had there is missing."""


def report(lines: Sequence[Line], more: Mapping[str, float]) -> dict[str, Any]:
    """Work the report out: over all nodes, and the same for each."""
    nodes = dict.fromkeys(line.node for line in lines)
    return {
        **_shares(lines),
        **rounded(more),
        "nodes": {
            node: {
                **_shares(mine := [line for line in lines if line.node == node]),
                "nics": {line.nics: {**_shares([line]), "localities": _localities(line)} for line in mine},
            }
            for node in nodes
        },
    }


def rounded(figures: Mapping[str, float]) -> dict[str, float]:
    """Round to microseconds."""
    return {name: round(value, 3) for name, value in figures.items()}


def told(health: Soonness | None) -> dict[str, Any]:
    """Tell how soon faults of a node were in the list; None where none could be shown."""
    if health is None:
        return {"health_event_to_list_ms": None, "health_event": None}
    return {"health_event_to_list_ms": round(health.milliseconds, 3), "health_event": health.fault}


def table(lines: Sequence[Line], found: Mapping[str, Any]) -> Iterator[str]:
    """Lay the shares out for a terminal."""
    yield f"{'attained, %':38}" + "".join(f"{words:>16}" for _, words in WAYS)
    for line in lines:
        yield f"{line.node:20}{line.nics:18}" + "".join(f"{_percent(line, way):>16}" for way, _ in WAYS)
    yield f"{'all':38}" + "".join(f"{_shown(found[f'{way}_attained_pct']):>16}" for way, _ in WAYS)
    yield ""
    yield f"{'milliseconds':20}{'choice, p99':>14}{'event to list':>16}  event"
    for node, figures in found["nodes"].items():
        choice, soon, event = _times(figures)
        yield f"{node:20}{choice:>14}{soon:>16}  {event}"
    yield ""
    for name, value in found.items():
        if name != "nodes" and not any(name == f"{way}_attained_pct" for way, _ in WAYS):
            yield f"{name:52}{'–' if value is None else value:>16}"


def markdown(document: str, lines: Sequence[Line], found: Mapping[str, Any]) -> str:
    """Put the table into a document, between its marks. Raises ValueError without them."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document has no {BEGIN} and {END}")
    rows = [
        "| node | a NIC is one of | pairs | " + " | ".join(words for _, words in WAYS) + " |",
        "|---|---|--:|" + "--:|" * len(WAYS),
        *(
            f"| {line.node} | {line.nics} | {line.tallies['early_pairing'].pairs} | "
            + " | ".join(_percent(line, way) for way, _ in WAYS)
            + " |"
            for line in lines
        ),
        f"| **all** | | {found['pairs']} | "
        + " | ".join(f"**{_shown(found[f'{way}_attained_pct'])}**" for way, _ in WAYS)
        + " |",
    ]
    rows += [
        "",
        "| node | a choice (99th percentile), ms | from event to list (median), ms | the event |",
        "|---|--:|--:|---|",
        *(f"| {' | '.join((node, *_times(figures)))} |" for node, figures in found["nodes"].items()),
    ]
    return before + begin + "\n" + "\n".join(rows) + "\n" + end + after


def _times(figures: Mapping[str, Any]) -> tuple[str, str, str]:
    """Spell how long things take on a node: a choice, and the way of an event to the list."""
    choice, soon = figures.get("placement_p99_ms"), figures.get("health_event_to_list_ms")
    measured = "health_event_to_list_ms" in figures
    event = figures.get("health_event") or ("no NIC was shown a fault" if measured else "not measured")
    return "–" if choice is None else f"{choice:.1f}", "–" if soon is None else f"{soon:.0f}", event


def _shares(lines: Sequence[Line]) -> dict[str, Any]:
    shares: dict[str, Any] = {"pairs": sum(line.tallies["early_pairing"].pairs for line in lines)}
    for way in (*(way for way, _ in WAYS), UNREAD, MIXED):
        mine = [line.tallies[way] for line in lines if way in line.tallies]
        pairs = sum(tally.pairs for tally in mine)
        shares[f"{way}_attained_pct"] = round(100 * sum(t.attained for t in mine) / pairs, 2) if pairs else None
    for way in OURS:
        mine = [line.tallies[way] for line in lines if way in line.tallies]
        pairs = sum(tally.pairs for tally in mine)
        share = round(100 * sum(t.attained_of_any for t in mine) / pairs, 2) if pairs else None
        shares[f"{way}_attained_without_regard_to_nvlink_pct"] = share
    return shares


def _localities(line: Line) -> dict[str, dict[str, int]]:
    return {
        way: {where.name: tally.localities[where] for where in sorted(tally.localities)}
        for way, tally in line.tallies.items()
    }


def _percent(line: Line, way: str) -> str:
    tally = line.tallies.get(way)
    return _shown(None if tally is None else tally.percent)


def _shown(percent: float | None) -> str:
    """Round down: 100 is all of them."""
    return "–" if percent is None else f"{int(percent * 10) / 10:g}"
