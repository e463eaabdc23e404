"""Why a resource has the devices that it has, told condition by condition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from agent.config import Resource, Select
from agent.config.contradictions import selectors_of
from agent.model.device import Snapshot
from agent.offer.assignment import Assignment, Overlap, assign, errors
from agent.offer.offer import Unit
from agent.offer.selectors import Candidate, Condition, conditions, offered_candidates, takes
from agent.offer.units import Inputs, make_offer


@dataclass(frozen=True, slots=True)
class SelectorMatch:
    """What one entry of a selector field finds by itself."""

    field: str
    """Path in the resource, such as `select.pf[0]`."""
    text: str
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Exclusion:
    """What of the candidates one selector field leaves out, though every other field would take it."""

    field: str
    """Path in the resource, such as `select.drivers`."""
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a resource has the devices that it has."""

    resource_name: str
    kind: str
    candidates: tuple[str, ...]
    """Every device of the kind on this node."""
    selectors: tuple[SelectorMatch, ...]
    exclusions: tuple[Exclusion, ...]
    lost: tuple[Overlap, ...]
    """What it selects, but an earlier resource has."""
    devices: tuple[str, ...]
    """Those that it gets."""
    units: tuple[str, ...]
    """Under which IDs they are offered."""


@dataclass(frozen=True, slots=True)
class Account:
    """What a whole configuration comes to on a node."""

    resources: tuple[Explanation, ...]
    overlaps: tuple[Overlap, ...]
    mistakes: tuple[Overlap, ...]
    """Of these, the ones that must not be; the others are the custom of another project's configuration."""


def explain_all(resources: Sequence[Resource], snapshot: Snapshot) -> Account:
    """Tell what each resource finds on this node, and what it gets."""
    assignment = assign(resources, snapshot)
    units = make_offer(Inputs(resources, snapshot, assignment)).offered
    return Account(
        tuple(_explain(each, assignment, tuple(units[each.name]), snapshot) for each in resources),
        assignment.overlaps,
        errors(resources, assignment.overlaps),
    )


def _explain(
    resource: Resource,
    assignment: Assignment,
    units: tuple[Unit, ...],
    snapshot: Snapshot,
) -> Explanation:
    found: list[Candidate] = []
    matches: list[SelectorMatch] = []
    exclusions: list[Exclusion] = []
    for path, kind, select in selectors_of(resource):
        mine = [c for _, c in offered_candidates(resource, kind, snapshot)]
        groups = conditions(select)
        found += mine
        matches += _matches(path, select, mine)
        exclusions += [
            Exclusion(f"{path}.{_field(group)}" if _field(group) else path, excluded)
            for group in groups
            if (excluded := _labels(mine, partial(_only_excludes, group, groups)))
        ]
    return Explanation(
        resource_name=resource.name,
        kind=resource.kind,
        candidates=tuple(c.label for c in found),
        selectors=tuple(matches),
        exclusions=tuple(exclusions),
        lost=tuple(overlap for overlap in assignment.overlaps if overlap.loser == resource.name),
        devices=tuple(taken.candidate.label for taken in assignment.taken[resource.name]),
        units=tuple(unit.unit_id for unit in units),
    )


def _matches(path: str, select: Select, mine: list[Candidate]) -> list[SelectorMatch]:
    """Spell out each entry; those of alternatives with the alternative's number."""
    found = []
    for group in conditions(select):
        for condition in group:
            where = f"{path}{condition.field}" if condition.field.startswith("[") else f"{path}.{condition.field}"
            found.append(SelectorMatch(where, condition.text, _labels(mine, condition.holds)))
    for i, other in enumerate(select.any_of):
        found += _matches(f"{path}[{i}]", other, mine)
    return found


def _only_excludes(
    group: tuple[Condition, ...], groups: tuple[tuple[Condition, ...], ...], candidate: Candidate
) -> bool:
    others = tuple(other for other in groups if other is not group)
    return takes(others, candidate) and not takes((group,), candidate)


def _field(group: tuple[Condition, ...]) -> str:
    return group[0].field.partition("[")[0]


def _labels(found: Iterable[Candidate], holds: Callable[[Candidate], bool]) -> tuple[str, ...]:
    return tuple(c.label for c in found if holds(c))
