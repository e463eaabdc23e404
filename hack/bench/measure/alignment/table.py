"""Tallies to a report, and a report to tables. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        **{name: round(value, 3) for name, value in more.items()},
        "nodes": {
            node: {
                **_shares(mine := [line for line in lines if line.node == node]),
                "nics": {line.nics: {**_shares([line]), "localities": _localities(line)} for line in mine},
            }
            for node in nodes
        },
    }


def table(lines: Sequence[Line], found: Mapping[str, Any]) -> Iterator[str]:
    """Lay the shares out for a terminal."""
    yield f"{'attained, %':38}" + "".join(f"{words:>16}" for _, words in WAYS)
    for line in lines:
        yield f"{line.node:20}{line.nics:18}" + "".join(f"{_percent(line, way):>16}" for way, _ in WAYS)
    yield f"{'all':38}" + "".join(f"{_shown(found[f'{way}_attained_pct']):>16}" for way, _ in WAYS)
    yield ""
    for name, value in found.items():
        if name != "nodes" and not any(name == f"{way}_attained_pct" for way, _ in WAYS):
            yield f"{name:38}{value:16}"


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
    return before + begin + "\n" + "\n".join(rows) + "\n" + end + after


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
