"""`nodefabric check-config` and `config-schema`: what is wrong with a configuration, what it selects, may hold."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.commands.options import (
    DONE,
    MATCHES_NOTHING,
    WRONG_INPUT,
    Command,
    add_hardware,
    add_output,
    add_sources,
    scanned,
    show,
    sources,
)
from agent.errors import LedgerError
from agent.model.printable import joined

if TYPE_CHECKING:
    from agent.config import Config
    from agent.model.device import Snapshot
    from agent.model.vf_identity import Rail
    from agent.offer.explanation import Account
    from agent.offer.offer import Offer

SHOWN_DEVICES = 16
"""So many are named per line; the JSON names all."""

_FATES = {"Unhealthy": "unhealthy:", **dict.fromkeys(("NoNic", "NoGpu", "TooFew"), "unused:")}
"""Reason → what becomes of devices that the resource takes all the same."""


def add(command: Command) -> None:
    """Add the commands."""
    parser = command("check-config", _check_config, "check a configuration and show what it selects on this node")
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help="the configuration; of any shape")
    add_sources(parser)
    add_hardware(parser)
    add_output(parser)
    command("config-schema", _config_schema, "print the JSON Schema of a configuration")


def _check_config(options: argparse.Namespace) -> int:
    from agent.offer.explanation import cautions, explain_all
    from agent.offer.selection import overlap_problems
    from agent.offer.units import plain_offer
    from agent.process.startup import network_problems

    config = sources(options, options.file).load()
    rails, why_not = _known_rails(options, config)
    with scanned(options, config.placement.topology_file) as snapshot:
        problems = network_problems(config, snapshot, rails)
        offer = plain_offer(config.resources, snapshot, named_rails=config.topology.rails, known_rails=rails)
        unlike = [str(caution) for caution in cautions(config, offer)]
        found = explain_all(config.resources, offer)
        protected = {entry: _called(entry, snapshot) for entry in config.cni.protect}
        slices = _for_claims(config, offer)
        networks = _by_templates(config, offer)
    problems += overlap_problems(config.resources, snapshot)
    document = {
        "sound": not problems,
        "problems": problems,
        "warnings": [*config.warnings, *unlike],
        "overlaps": [asdict(overlap) for overlap in found.overlaps],
        "resources": [
            {**asdict(resource), "left_out": [each.document() for each in resource.left_out]}
            for resource in found.resources
        ],
        "notOffered": [each.document() for each in found.left_out],
        "slices": slices,
        "networks": networks,
        "railsAsOfFirstStart": why_not,
        "protected": protected,
    }
    show(options, document, joined(_lines(config.source, document, found, snapshot)))
    if problems:
        return WRONG_INPUT
    return MATCHES_NOTHING if any(not (r.devices and r.units) for r in found.resources) else DONE


def _for_claims(config: Config, offer: Offer) -> Mapping[str, Sequence[str]]:
    """List, for each resource that is offered to claims, the devices that the scheduler sees."""
    if not config.offers_dra:
        return {}
    from deviceplugin.dra.attributes import Facts, StableFacts, stable_facts
    from deviceplugin.dra.devices import devices_of

    devices = devices_of(config, offer, Facts(stable_facts(offer, StableFacts())))
    return {each.name: [d.name for d in devices if d.resource_name == each.name] for each in config.claimable}


def _known_rails(options: argparse.Namespace, config: Config) -> tuple[tuple[Rail, ...], str | None]:
    """Read how the agent has numbered this node's rails, and say why if nobody knows though it counts."""
    from agent.ledger.database import read_rails

    if options.node is not None:
        return (), None
    try:
        return read_rails(options.root / config.ledger_path.relative_to("/")), None
    except LedgerError as error:
        return (), None if config.topology.rails else str(error)


def _by_templates(config: Config, offer: Offer) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """List, for each network that is a template, what comes of it on this node."""
    from agent.offer.explanation import places_of, planes_joined, texts_at

    found: dict[str, Sequence[Mapping[str, Any]]] = {}
    for network in config.networks:
        if network.words:
            planes = planes_joined(network, config, offer) if network.words.isdisjoint(("plane", "pf")) else {}
            found[network.name] = [
                {
                    "rail": place.rail,
                    "plane": place.plane,
                    "pf": place.pf,
                    "adapter": place.adapter,
                    "planes": {each.plane: each.pf or each.adapter for each in planes.get(place.rail or 0, ())},
                    "values": dict(texts_at(network, place)),
                }
                for place in places_of(network, config, offer)
            ]
    return found


def _called(name: str, snapshot: Snapshot) -> list[str]:
    """List the adapters and VFs of this name, or at this address."""
    return [d.address for d in snapshot.devices if name in (d.address, *(n.name for n in d.netdevs))]


def _lines(source: str, document: dict[str, Any], found: Account, snapshot: Snapshot) -> list[str]:
    from agent.model.printable import grouped, some

    lines = [f"{source} is sound" if document["sound"] else f"{source} is wrong:"]
    lines += [f"  {problem}" for problem in document["problems"]]
    lines += [f"warning: {warning}" for warning in document["warnings"]]
    for resource in found.resources:
        count = f"{len(resource.devices)} of {len(resource.candidates)} devices"
        in_slices = document["slices"].get(resource.resource_name)
        offered = _number(resource.units, "unit") if in_slices is None else _number(in_slices, "device") + " in slices"
        lines.append(f"{resource.resource_name} ({resource.kind}): {count}, {offered}")
        lines.append(f"  takes {grouped(resource.devices, snapshot, SHOWN_DEVICES) or 'nothing'}")
        lines += [f"  {_FATES.get(each.why, 'leaves out')} {each}" for each in resource.left_out if each.resource]
        if in_slices:
            lines.append(f"  the scheduler sees {some(in_slices, SHOWN_DEVICES)}")
    for name, places in document["networks"].items():
        lines.append(f"network {name}: {_number(places, 'network')}")
        for each in places:
            where = "" if each["rail"] is None else f"rail {each['rail']}, "
            values = ", ".join(f"{path} {value}" for path, value in each["values"].items())
            planes = " and ".join(f"{plane} {name}" for plane, name in each["planes"].items())
            lines.append(f"  {where}{f'planes {planes}' if planes else each['pf'] or each['adapter']}: {values}")
    if document["networks"] and (why := document["railsAsOfFirstStart"]) is not None:
        lines.append(f"rails are numbered as a first start of the agent would: {why}")
    for name, devices in document["protected"].items():
        lines.append(
            f"cni.protect {name}: {grouped(devices, snapshot, SHOWN_DEVICES) if devices else 'no adapter of this node'}"
        )
    lines += [f"not offered: {each}" for each in found.left_out if not each.resource]
    if not found.resources:
        lines.append("it has no resources: the agent would offer nothing")
    return lines


def _number(things: Sequence[str], what: str) -> str:
    return f"{len(things)} {what}" + ("" if len(things) == 1 else "s")


def _config_schema(options: argparse.Namespace) -> int:
    from agent.config.schema import json_schema

    print(json.dumps(json_schema(), indent=1))
    return DONE
