"""Why a resource has the devices that it has, told condition by condition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from agent.config import Resource, Select
from agent.config.contradictions import selectors_of
from agent.offer.assignment import Assignment, Overlap, assign, errors
from agent.offer.left_out import LeftOut, left_out, left_out_by
from agent.offer.offer import Offer
from agent.offer.selectors import Candidate, conditions, offered_candidates


@dataclass(frozen=True, slots=True)
class SelectorMatch:
    """What one entry of a selector field finds by itself."""

    field: str
    """Path in the resource, such as `select.pf[0]`."""
    text: str
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a resource has the devices that it has."""

    resource_name: str
    kind: str
    candidates: tuple[str, ...]
    """Every device of the kind on this node."""
    selectors: tuple[SelectorMatch, ...]
    lost: tuple[Overlap, ...]
    """What it selects, but an earlier resource has."""
    devices: tuple[str, ...]
    """Those that it gets."""
    unused: tuple[str, ...]
    """Those of them that make no rail."""
    units: tuple[str, ...]
    """Under which IDs they are offered."""
    left_out: tuple[LeftOut, ...]
    """The devices of the node that it does not offer, by reason."""


@dataclass(frozen=True, slots=True)
class Account:
    """What a whole configuration comes to on a node."""

    resources: tuple[Explanation, ...]
    overlaps: tuple[Overlap, ...]
    mistakes: tuple[Overlap, ...]
    """Of these, the ones that must not be; the others are the custom of another project's configuration."""
    left_out: tuple[LeftOut, ...]
    """The devices of the node that no resource offers, by reason."""


def explain_all(resources: Sequence[Resource], offer: Offer) -> Account:
    """Tell what each resource finds on this node, and what it gets: `offer` is the plain one of these resources."""
    assignment = assign(resources, offer.snapshot)
    reasons = left_out_by(resources, offer)
    return Account(
        tuple(_explain(each, assignment, offer, reasons.get(each.name, ())) for each in resources),
        assignment.overlaps,
        errors(resources, assignment.overlaps),
        left_out(resources, offer),
    )


def _explain(resource: Resource, assignment: Assignment, offer: Offer, reasons: tuple[LeftOut, ...]) -> Explanation:
    found: list[Candidate] = []
    matches: list[SelectorMatch] = []
    for path, kind, select in selectors_of(resource):
        of_kind = [c for _, c in offered_candidates(resource, kind, offer.snapshot)]
        found += of_kind
        matches += _matches(path, select, of_kind)
    mine = offer.pools.get(resource.name) or offer.offered[resource.name]
    used = {device for unit in mine for device in (*unit.devices, unit.gpu)}
    taken = [each.candidate for each in assignment.taken[resource.name]]
    return Explanation(
        resource_name=resource.name,
        kind=resource.kind,
        candidates=tuple(c.label for c in found),
        selectors=tuple(matches),
        lost=tuple(overlap for overlap in assignment.overlaps if overlap.loser == resource.name),
        devices=tuple(each.label for each in taken),
        unused=tuple(each.label for each in taken if resource.kind == "rail" and each.device not in used),
        units=tuple(unit.unit_id for unit in offer.offered[resource.name]),
        left_out=reasons,
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


def _labels(found: Iterable[Candidate], holds: Callable[[Candidate], bool]) -> tuple[str, ...]:
    return tuple(c.label for c in found if holds(c))
