"""Which networks the node's devices join, where these are templates: for checks, `check-config` and `doctor`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple
from typing import Any

from agent.config import Config
from agent.config.networks import Network
from agent.config.template import Place, filled, problems, templates_in
from agent.offer.offer import Offer


def template_problems(config: Config, offer: Offer) -> Iterator[str]:
    """List what the templates of networks come to on this node that cannot be used: path and why."""
    for i, network in enumerate(config.networks):
        for where, text in problems(network, places_of(network, config, offer)):
            yield f"networks[{i}]{where and '.'}{where}: {text}"


def places_of(network: Network, config: Config, offer: Offer) -> tuple[Place, ...]:
    """List places of devices that may join a network, one for each that it tells apart. None if it has no templates."""
    found: dict[Place, Place] = {}
    for place in _places(network, config, offer):
        if _tells(place, network):
            found.setdefault(place.only(network.words), place)
    return tuple(found[each] for each in sorted(found, key=_order))


def planes_joined(network: Network, config: Config, offer: Offer) -> Mapping[int, tuple[Place, ...]]:
    """Map each rail of which several planes join a network to a place on each of these planes."""
    found: dict[int, dict[int, Place]] = {}
    for place in _places(network, config, offer):
        if place.rail is not None and place.plane is not None:
            found.setdefault(place.rail, {}).setdefault(place.plane, place)
    return {rail: tuple(mine[plane] for plane in sorted(mine)) for rail, mine in found.items() if len(mine) > 1}


def _order(place: Place) -> tuple[tuple[bool, Any], ...]:
    return tuple((value is not None, value) for value in astuple(place))


def strangers(network: Network, config: Config, offer: Offer) -> tuple[str, ...]:
    """List adapters whose devices cannot join a network, since it asks for what they have not, such as a rail."""
    places = _places(network, config, offer)
    return tuple(sorted({place.adapter for place in places if not _tells(place, network)}))


def told(network: Network, place: Place) -> tuple[tuple[str, Any], ...]:
    """List what the templates of a network come to at a place: path and value."""
    return tuple((path, filled(text, place)) for path, text in templates_in(network.keys))


def _places(network: Network, config: Config, offer: Offer) -> tuple[Place, ...]:
    joined = {r.name: config.network_of(r.name) for r in config.resources if network.name in r.networks.values()}
    if not network.words or not joined:
        return ()
    sets = {d: unit.devices for mine in offer.units.values() for unit in mine if unit.further for d in unit.devices}
    mine = ((joined[name], device) for device, name in offer.network_devices.items() if name in joined)
    places = ((each, offer.place(device, sets.get(device, ()))) for each, device in mine)
    return tuple(place for each, place in places if each and (to := each.named_for(place)) and to.name == network.name)


def _tells(place: Place, network: Network) -> bool:
    return all(getattr(place, word) not in (None, "") for word in network.words)
