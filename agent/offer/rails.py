"""The node's rails: its adapters to the fabric, each with a number that it keeps. Pure.

Labels, attributes of claims' devices and networks all take the numbers from here. Rail r of one node is to be cabled to
the same leaf as rail r of any other, so a number must not move because an adapter is away or has no VFs yet: it is
remembered by what the card has in every boot, and stays its own.

An adapter that its firmware splits into several PFs, each for a fabric of its own, is one rail with several planes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count

from agent.model.device import VENDOR, PciDevice, Snapshot, is_accelerator
from agent.model.vf_identity import Rail, RailKey, identities
from agent.placement import Distances

NOBODY: frozenset[str] = frozenset()
_SPLIT = frozenset((0x1023, 0x1025, 0x1027))
"""ConnectX-8 and later (device IDs: Linux, drivers/net/ethernet/mellanox/mlx5/core/main.c). The two ports of an earlier
adapter are cabled to two leaves of one fabric as often as to two fabrics, and stay rails of their own."""

_PRESUMED = ("",)
"""The GPU beside an adapter of which it is not known: see `_presumed`."""

NamedRails = Sequence[Sequence[str]]
"""For each rail its planes, by interface or PCI address."""


def rails_of(
    snapshot: Snapshot,
    distances: Distances,
    named: NamedRails = (),
    known: Sequence[Rail] = (),
    taken: Collection[str] = NOBODY,
    *,
    is_new: bool = False,
) -> tuple[Rail, ...]:
    """Number the adapters, by number and plane.

    Those that `named` lists, in that order; one that is not found leaves a gap. Else those with an RDMA device that are
    nearest to a GPU, without GPUs all of these, by PCI address: of those `taken` by resources, if any is. `known` are
    the rails so far. A settled number stays with its card while that is there, taken or not; an adapter that has none
    gets the least number that no card here has. All are numbered again when one more comes and none is away only while
    no number is settled, or the node `is_new`: its adapters appear one after the other. Numbers from while no adapter
    was taken, or vital product data was due, go when these have come.
    """
    identity = identities(snapshot)
    cards = {device.address: device for device in snapshot.devices if not device.is_vf}
    fabric = sorted(card.address for card in cards.values() if card.rdma_devices and not is_accelerator(card))
    counted = [port for port in fabric if port in taken]
    may_settle = bool(counted) and not snapshot.adapter_ids_due

    def rail(key: RailKey, device: PciDevice, before: Rail | None = None) -> Rail:
        netdev = device.netdev.name if device.netdev is not None else before.netdev if before is not None else ""
        card = identity(device) or (before.identity if before is not None else "")
        is_settled = may_settle or (before is not None and before.is_settled)
        return Rail(key[0], device.address, card, netdev, is_named=bool(named), plane=key[1], is_settled=is_settled)

    if named:
        names = {(number, plane): name for number, mine in enumerate(named) for plane, name in enumerate(mine)}
        listed = {key: _by_name(name, cards, known) for key, name in names.items()}
        there = {key: rail(key, card, last) for key, (card, last) in listed.items() if card is not None}
        away = {key: last for key, (card, last) in listed.items() if card is None and last is not None}
        stale = {key: replace(last, number=key[0], plane=key[1], is_named=True) for key, last in away.items()}
        return _in_order(there | stale)
    known = [before for before in known if not before.is_named and (before.is_settled or not may_settle)]
    # At a start VFs come later, and so does what vital product data says.
    waits = not may_settle and any(before.is_settled for before in known)
    fabric = counted or fabric
    found = _found_again(known, cards, identity)
    here = {card.address for card in found.values()}
    if distances.gpus:
        # A rail whose VFs are still to come is as near as it is with them.
        beside = nearest(sorted(here.union(fabric)), distances).keys() | _presumed(snapshot)
        fabric = [port for port in fabric if port in beside]
    fresh = [port for port in fabric if port not in here]
    may_move = not waits and (is_new or not any(before.is_settled for before in known))
    none_is_away = len(known) == sum(bool(card.rdma_devices) for card in found.values())
    if fresh and may_move and none_is_away and len(fabric) >= len(known):
        groups = _planes(fabric, snapshot, distances)
        keys = {(number, plane): port for number, mine in enumerate(groups) for plane, port in enumerate(mine)}
        return _in_order({key: rail(key, cards[port]) for key, port in keys.items()})
    if len(found) < len(known):
        fresh = _as_near(fresh, sorted(here), distances)
    rails = {before.key: before for before in known}
    rails |= {key: rail(key, card, rails[key]) for key, card in found.items()}
    groups = _planes(sorted(here.union(fabric)), snapshot, distances)
    for address in fresh:
        mine = next(group for group in groups if address in group)
        mates = sorted(key[0] for key, card in found.items() if card.address in mine)
        used = {key[0] for key in (rails if waits else found)}
        number = mates[0] if mates else next(n for n in count() if n not in used)
        plane = next(p for p in count() if (number, p) not in found)
        found[number, plane] = cards[address]
        rails = {key: each for key, each in rails.items() if key[0] != number or key in found}
        rails[number, plane] = rail((number, plane), cards[address])
    return _in_order(rails)


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


def planes_in(rails: Iterable[Rail]) -> Mapping[str, tuple[str, ...]]:
    """Map each adapter that is one plane of several to all planes of its rail; also those that are away."""
    of: dict[int, list[str]] = {}
    for rail in rails:
        of.setdefault(rail.number, []).append(rail.device)
    return {device: tuple(mine) for mine in of.values() if len(mine) > 1 for device in mine}


def _in_order(rails: Mapping[RailKey, Rail]) -> tuple[Rail, ...]:
    return tuple(rails[key] for key in sorted(rails))


def _planes(ports: Sequence[str], snapshot: Snapshot, distances: Distances) -> tuple[tuple[str, ...], ...]:
    """Group ports by rail: those of one adapter that belong to one GPU and no other, by function; any other is alone.

    Functions of one adapter have the same keyword V3, where that was read; else they are of one PCI device.
    """
    ids = {_device(address): adapter for address, adapter in snapshot.adapter_ids if adapter}
    adapter = {port: ids.get(_device(port), _device(port)) for port in ports}
    near = {port: distances.nearest(port, distances.gpus) for port in ports}
    unknown = snapshot.data_direct.unknown
    of_adapter = {adapter[port]: near[port] for port in ports if port not in unknown}
    found: dict[tuple[str, ...], list[str]] = {}
    for port in ports:
        card = snapshot.by_address[port]
        gpus = near[port] if port not in unknown else of_adapter.get(adapter[port], _PRESUMED)
        is_split = card.vendor == VENDOR and card.device in _SPLIT and len(gpus) == 1
        found.setdefault((adapter[port], *gpus) if is_split else (port,), []).append(port)
    return tuple(map(tuple, found.values()))


def _device(address: str) -> str:
    """Name the PCI device that a function is of."""
    return address.rpartition(".")[0]


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
) -> dict[RailKey, PciDevice]:
    """Map the rails whose card is there, or another one in its place, to that.

    What two cards have in common tells nothing.
    """
    names = {address: identity(card) for address, card in cards.items()}
    count_now, count_then = Counter(names.values()), Counter(rail.identity for rail in known)
    by_name = {name: cards[address] for address, name in names.items() if name and count_now[name] == 1}
    found = {
        rail.key: by_name[rail.identity]
        for rail in known
        if rail.identity in by_name and count_then[rail.identity] == 1
    }
    taken = {card.address for card in found.values()}
    in_place = {
        rail.key: cards[rail.device]
        for rail in known
        if rail.key not in found and rail.device in cards and rail.device not in taken
    }
    return found | in_place
