"""Which grants kubelet does not know of, knows otherwise, or names by an address that moved. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from agent.model.allocation import Grant, PodRef
from agent.model.slots import is_slot_id

UNCLAIMED_SECONDS = 60.0
"""How old a grant must be before its absence from PodResources means that no pod has it."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What kubelet says that a pod holds."""

    pod: PodRef
    resource_name: str
    unit_id: str
    container: str = ""
    """Its container that has the unit."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A pod of which a sandbox's network was taken down."""

    pod: PodRef
    at: float
    """When its DEL came, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class TakeOver:
    """A pod has a unit that is not in the books."""

    claim: Claim
    device: str


@dataclass(frozen=True, slots=True)
class Bind:
    """A unit's pod is known now, or is another one."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class Release:
    """No pod has the unit."""

    unit_id: str


@dataclass(frozen=True, slots=True)
class Move:
    """The unit stands for a device that has another address now."""

    unit_id: str
    device: str
    reason: str


Action = TakeOver | Bind | Release | Move


def decide(
    grants: Sequence[Grant],
    claims: Sequence[Claim],
    *,
    offered: Mapping[str, str] | None,
    attached: Collection[str],
    moved: Mapping[str, str],
    asked_at: float,
    unclaimed_before: float,
    ended: Sequence[Ended] = (),
) -> tuple[Action, ...]:
    """Compare the grants with kubelet's word, which is the authority on who holds a unit.

    `offered` maps unit IDs to devices, None before the first offer; `attached` are devices in pods, whose
    grants stay whatever kubelet has forgotten: one that has restarted while the API server is away knows
    no pods, though they run. `moved` maps addresses of the last boot to where those VFs are now. Kubelet was asked
    at `asked_at`: of what was granted since it has said nothing. What it does not count to a pod any more is free if
    the grant is old, or known to be that of a pod that has `ended`: of a new one kubelet may tell late.
    """
    granted = {grant.unit_id: grant for grant in grants}
    actions: list[Action] = []
    for claim in claims:
        grant = granted.get(claim.unit_id)
        if grant is not None and grant.granted_at >= asked_at:
            continue
        if grant is None and offered is not None and claim.unit_id in offered:
            actions.append(TakeOver(claim, offered[claim.unit_id]))
        elif grant is not None and (grant.pod is None or _differs(grant.pod, claim.pod)):
            actions.append(Bind(claim))
    claimed = {claim.unit_id for claim in claims}
    gone = {
        grant.unit_id
        for grant in grants
        if grant.unit_id not in claimed
        and grant.device not in attached
        and (grant.granted_at < unclaimed_before or any(_is_of(grant, one, asked_at) for one in ended))
    }
    actions += [Release(unit) for unit in sorted(gone)]
    if offered is not None:
        kept = [grant for grant in grants if grant.unit_id not in gone and grant.device not in attached]
        actions += _moves(kept, claims, offered, moved)
    return tuple(actions)


def _moves(
    grants: Sequence[Grant], claims: Sequence[Claim], offered: Mapping[str, str], moved: Mapping[str, str]
) -> list[Move]:
    """List the grants whose device is elsewhere.

    A unit that is offered is what kubelet takes it for, whatever was there in the last boot: the container
    was told this address. One that is not offered any more, since its address is gone, follows its VF to
    where that is now, unless somebody else was given that.
    """
    moves = []
    taken = {offered[c.unit_id] for c in claims if c.unit_id in offered} | {
        offered[g.unit_id] for g in grants if g.unit_id in offered
    }
    for grant in grants:
        if grant.unit_id in offered:
            # A slot's device is chosen for its pod; an offer only repeats it, a moment later.
            if offered[grant.unit_id] != grant.device and not is_slot_id(grant.unit_id):
                moves.append(Move(grant.unit_id, offered[grant.unit_id], "offered-elsewhere"))
            continue
        target = moved.get(grant.device)
        if target is not None and target not in taken:
            taken.add(target)
            moves.append(Move(grant.unit_id, target, "renumbered"))
    return moves


def _is_of(grant: Grant, ended: Ended, asked_at: float) -> bool:
    """Tell whether a grant was a pod's that ended before kubelet was asked. Its name may be another pod's by now."""
    if grant.pod is None or _differs(grant.pod, ended.pod) or not grant.granted_at < ended.at <= asked_at:
        return False
    return "" in (grant.pod.uid, ended.pod.uid) or grant.pod.uid == ended.pod.uid


def _differs(known: PodRef, claimed: PodRef) -> bool:
    """PodResources knows no UID, so only names can be compared."""
    return (known.namespace, known.name) != (claimed.namespace, claimed.name)
