"""Tallies to a report, and a report to tables. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from measure.alignment.node_health import Soonness
from measure.alignment.score import Tally
from measure.alignment.stream import BURSTS, EVEN, PLAYS

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
TOLD = "early_pairing_told"
"""Early pairing that knows how many GPUs and NICs containers will ask for: what is attainable."""
OURS = ("late_binding", "early_pairing")
CLAIMS = "claims"
"""What is played with claims: the GPU that each device names, and what the scheduler and late binding make of it."""
PAIRED = tuple(play.name for play in PLAYS if not play.other_plugin)
"""Plays in which early pairing hands out both, GPUs and NICs."""
BEGIN, END = "<!-- alignment: begin -->", "<!-- alignment: end -->"


@dataclass(frozen=True, slots=True)
class Line:
    """What was played on one node with one kind of NICs."""

    node: str
    nics: str
    plays: Mapping[str, Mapping[str, Tally]]
    """By play and way; a way that cannot be had there is missing."""
    documented: Mapping[str, Mapping[str, Tally]] = field(default_factory=dict)
    """The same for our ways, judged by documented pairs; by the play CLAIMS, what claims get."""
    undocumented: bool | None = None
    """Whether no document tells which NIC belongs to which GPU; None if the node has no pairs file."""
    said_unknown: bool = False
    """Whether the agent says that nearness is not known on this node."""

    @property
    def tallies(self) -> Mapping[str, Tally]:
        """By way, where each pod has as many NICs as GPUs."""
        return self.plays[EVEN.name]


def report(lines: Sequence[Line], more: Mapping[str, float]) -> dict[str, Any]:
    """Work the report out: over all nodes, and the same for each."""
    nodes = dict.fromkeys(line.node for line in lines)
    return {
        **_worst(lines),
        **documented(lines),
        **_shares(lines),
        "plays": _plays(lines),
        **rounded(more),
        "nodes": {
            node: {
                **_shares(mine := [line for line in lines if line.node == node]),
                **documented(mine),
                "nics": {
                    line.nics: {**_shares([line]), "plays": _plays([line]), "localities": _localities(line)}
                    for line in mine
                },
            }
            for node in nodes
        },
    }


def documented(lines: Sequence[Line]) -> dict[str, Any]:
    """Give the least shares of documented pairs that were attained, and how many nodes have none and say so."""
    even = (EVEN.name, BURSTS.name)
    late = _least_documented(lines, OURS[0], [play.name for play in PLAYS])
    early, claims = _least_documented(lines, OURS[1], even), _least_documented(lines, CLAIMS, [CLAIMS])
    named = {line.node: line for line in lines if line.undocumented is not None}.values()
    return {
        "documented_pct": min((share for share in (late, early, claims) if share is not None), default=None),
        "documented_late_pct": late,
        "documented_early_even_pct": early,
        "documented_claims_pct": claims,
        "documented_nodes": len({line.node for line in lines if line.documented}),
        "unknown_nodes": sum(line.undocumented is True for line in named),
        "unknown_said": sum(line.said_unknown for line in named),
    }


def _least_documented(lines: Sequence[Line], way: str, plays: Sequence[str]) -> float | None:
    tallies = [line.documented.get(play, {}).get(way) for line in lines for play in plays]
    return _down(min((t.percent for t in tallies if t is not None and t.percent is not None), default=None))


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
    yield f"{'late / early (told beforehand), %':38}" + "".join(f"{play.name:>20}" for play in PLAYS)
    for line in lines:
        yield f"{line.node:20}{line.nics:18}" + "".join(f"{_cell(line, play.name):>20}" for play in PLAYS)
    yield ""
    yield f"{'milliseconds':20}{'choice, p99':>14}{'event to list':>16}  event"
    for node, figures in found["nodes"].items():
        choice, soon, event = _times(figures)
        yield f"{node:20}{choice:>14}{soon:>16}  {event}"
    yield ""
    for name, value in found.items():
        if name not in ("nodes", "plays") and not any(name == f"{way}_attained_pct" for way, _ in WAYS):
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
        "| node | a NIC is one of | " + " | ".join(play.name for play in PLAYS) + " |",
        "|---|---|" + "--:|" * len(PLAYS),
        *(
            f"| {line.node} | {line.nics} | " + " | ".join(_cell(line, play.name) for play in PLAYS) + " |"
            for line in lines
        ),
        "",
        "| node | documents tell | late binding | early pairing at 1:1 | claims | the agent says |",
        "|---|---|--:|--:|--:|---|",
        *(f"| {' | '.join(_judged(node, figures, lines))} |" for node, figures in found["nodes"].items()),
        "",
        "| node | a choice (99th percentile), ms | from event to list (median), ms | the event |",
        "|---|--:|--:|---|",
        *(f"| {' | '.join((node, *_times(figures)))} |" for node, figures in found["nodes"].items()),
    ]
    return before + begin + "\n" + "\n".join(rows) + "\n" + end + after


def _judged(node: str, figures: Mapping[str, Any], lines: Sequence[Line]) -> Iterator[str]:
    """Spell what documents tell of a node, and how the agent does by that."""
    line = next(line for line in lines if line.node == node)
    yield node
    yield "pairs" if line.documented else "no pairs" if line.undocumented else "–"
    for what in ("late", "early_even", "claims"):
        yield _shown(figures[f"documented_{what}_pct"])
    yield "not known" if line.said_unknown else "known"


def _times(figures: Mapping[str, Any]) -> tuple[str, str, str]:
    """Spell how long things take on a node: a choice, and the way of an event to the list."""
    choice, soon = figures.get("placement_p99_ms"), figures.get("health_event_to_list_ms")
    measured = "health_event_to_list_ms" in figures
    event = figures.get("health_event") or ("no NIC was shown a fault" if measured else "not measured")
    return "–" if choice is None else f"{choice:.1f}", "–" if soon is None else f"{soon:.0f}", event


def _worst(lines: Sequence[Line]) -> dict[str, Any]:
    """Give the worst shares over all nodes, kinds of NICs and plays, and early pairing's over all pairs."""
    even = (EVEN.name, BURSTS.name)
    return {
        "worst_late_pct": _least(lines, "late_binding", [play.name for play in PLAYS]),
        "worst_early_pct": _least(lines, "early_pairing", PAIRED),
        "worst_early_even_pct": _least(lines, "early_pairing", even),
        "worst_early_told_pct": _least(lines, TOLD, PAIRED),
        "early_all_plays_pct": _pooled(lines, "early_pairing", PAIRED),
        "early_told_all_plays_pct": _pooled(lines, TOLD, PAIRED),
    }


def _plays(lines: Sequence[Line]) -> dict[str, dict[str, float | None]]:
    return {
        play.name: {f"{way}_pct": _pooled(lines, way, [play.name]) for way in (*OURS, TOLD)}
        | {f"worst_{way}_pct": _least(lines, way, [play.name]) for way in OURS}
        for play in PLAYS
    }


def _tallies(lines: Sequence[Line], way: str, plays: Sequence[str]) -> list[Tally]:
    return [line.plays[p][way] for line in lines for p in plays if p in line.plays and way in line.plays[p]]


def _least(lines: Sequence[Line], way: str, plays: Sequence[str]) -> float | None:
    found = [tally.percent for tally in _tallies(lines, way, plays) if tally.percent is not None]
    return _down(min(found, default=None))


def _pooled(lines: Sequence[Line], way: str, plays: Sequence[str]) -> float | None:
    return _down(sum(_tallies(lines, way, plays), Tally()).percent)


def _down(percent: float | None) -> float | None:
    """Round down: 100 is all of them."""
    return None if percent is None else int(percent * 100) / 100


def _cell(line: Line, play: str) -> str:
    """Spell out late and early, and what early would be if it were told beforehand."""
    ways = line.plays.get(play, {})
    late, early, told = (_shown(ways[way].percent if way in ways else None) for way in (*OURS, TOLD))
    return f"{late} / {early}" + (f" ({told})" if told != early else "")


def _shares(lines: Sequence[Line]) -> dict[str, Any]:
    shares: dict[str, Any] = {"pairs": sum(line.tallies["early_pairing"].pairs for line in lines)}
    for way in (*(way for way, _ in WAYS), UNREAD):
        shares[f"{way}_attained_pct"] = _pooled(lines, way, [EVEN.name])
    for way in OURS:
        tally = sum(_tallies(lines, way, [EVEN.name]), Tally())
        share = _down(100 * tally.attained_of_any / tally.pairs) if tally.pairs else None
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
    return "–" if percent is None else f"{int(percent * 10) / 10:g}"
