"""The node's rails: its adapters to the fabric, each with a number that it keeps. Pure.

Labels, attributes of claims' devices and networks all take the numbers from here. Rail r of one node is to be cabled to
the same leaf as rail r of any other, so a number must not move because an adapter is away: it is remembered by what the
card has in every boot, and stays its own as long as no other layout has come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from operator import attrgetter

from agent.model.device import PciDevice, Snapshot, is_accelerator
from agent.model.vf_identity import Rail, identities
from agent.placement import Distances


def rails_of(
    snapshot: Snapshot, distances: Distances, named: Sequence[str] = (), known: Sequence[Rail] = ()
) -> tuple[Rail, ...]:
    """Number the adapters, by number.

    Those that `named` lists, by interface or PCI address, in that order; one that is not found leaves a gap. Else those
    with an RDMA device that are nearest to a GPU, without GPUs all of these, by PCI address. `known` are the rails so
    far: one whose adapter is away stays until another one takes its number, and the others keep theirs meanwhile.
    """
    identity = identities(snapshot)
    cards = {device.address: device for device in snapshot.devices if not device.is_vf}

    def rail(number: int, device: PciDevice, before: Rail | None = None) -> Rail:
        netdev = device.netdev.name if device.netdev is not None else before.netdev if before is not None else ""
        card = identity(device) or (before.identity if before is not None else "")
        return Rail(number, device.address, card, netdev, is_named=bool(named))

    if named:
        found = [(number, *_by_name(name, cards, known)) for number, name in enumerate(named)]
        there = [rail(number, card, last) for number, card, last in found if card is not None]
        away = [replace(last, number=number, is_named=True) for number, card, last in found if card is None and last]
        return tuple(sorted((*there, *away), key=attrgetter("number")))
    known = [before for before in known if not before.is_named]
    fabric = sorted(card.address for card in cards.values() if card.rdma_devices and not is_accelerator(card))
    if distances.gpus:
        beside = nearest(fabric, distances).keys() | _presumed(snapshot)
        fabric = [port for port in fabric if port in beside]
    kept = _found_again(known, cards, identity)
    fresh = [address for address in fabric if address not in {card.address for card in kept.values()}]
    none_is_away = len(known) == sum(bool(card.rdma_devices) for card in kept.values())
    if fresh and none_is_away and len(fabric) >= len(known):
        return tuple(rail(number, cards[address]) for number, address in enumerate(fabric))
    fresh = _as_near(fresh, [card.address for card in kept.values()], distances)
    rails = {before.number: before for before in known}
    rails |= {number: rail(number, card, rails[number]) for number, card in kept.items()}
    free = (number for number in count() if number not in kept)
    rails |= {number: rail(number, cards[address]) for number, address in zip(free, fresh, strict=False)}
    return tuple(rails[number] for number in sorted(rails))


def _presumed(snapshot: Snapshot) -> frozenset[str]:
    """List the adapters that count as rails though their Data Direct function is not known.

    They are those of a model of which others have one, or all if none is known and none will be soon: a card that does
    not answer must not move the numbers of the others.
    """
    data_direct, cards = snapshot.data_direct, snapshot.by_address
    models = {cards[pf].device for pf in data_direct.of}
    if not (models or snapshot.adapter_ids_due):
        return data_direct.unknown
    return frozenset(pf for pf in data_direct.unknown if cards[pf].device in models)


def nearest(ports: Sequence[str], distances: Distances) -> dict[str, tuple[str, ...]]:
    """List, for each port that is a nearest one of some GPU, those GPUs, in the driver's order."""
    found: dict[str, list[str]] = {}
    for gpu in distances.gpus if ports else ():
        for port in distances.nearest(gpu, ports):
            found.setdefault(port, []).append(gpu)
    return {port: tuple(gpus) for port, gpus in found.items()}


def _as_near(fresh: list[str], rails: Sequence[str], distances: Distances) -> list[str]:
    """List those of new adapters that are as near to a GPU as rails are: others only stand in for one that is away."""
    if not (rails and distances.gpus):
        return fresh
    near = {port: min(distances.between(gpu, port) for gpu in distances.gpus) for port in (*fresh, *rails)}
    farthest = max(near[port] for port in rails)
    return [port for port in fresh if near[port] <= farthest]


def _by_name(name: str, cards: Mapping[str, PciDevice], known: Iterable[Rail]) -> tuple[PciDevice | None, Rail | None]:
    """Find an adapter that is listed, and what it was last. An interface that is away now is where it was."""
    last = next((rail for rail in known if name in (rail.netdev, rail.device)), None)
    has_it = (card for card in cards.values() if any(netdev.name == name for netdev in card.netdevs))
    there = cards.get(name) or next(has_it, None)
    if there is None and last is not None and (card := cards.get(last.device)) is not None and not card.netdevs:
        there = card
    return there, last


def _found_again(
    known: Iterable[Rail], cards: Mapping[str, PciDevice], identity: Callable[[PciDevice], str]
) -> dict[int, PciDevice]:
    """Map the numbers of rails whose card is there, or another one in its place, to that.

    What two cards have in common tells nothing.
    """
    names = {address: identity(card) for address, card in cards.items()}
    count_now, count_then = Counter(names.values()), Counter(rail.identity for rail in known)
    by_name = {name: cards[address] for address, name in names.items() if name and count_now[name] == 1}
    found = {
        rail.number: by_name[rail.identity]
        for rail in known
        if rail.identity in by_name and count_then[rail.identity] == 1
    }
    taken = {card.address for card in found.values()}
    in_place = {
        rail.number: cards[rail.device]
        for rail in known
        if rail.number not in found and rail.device in cards and rail.device not in taken
    }
    return found | in_place
