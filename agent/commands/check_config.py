"""`nodefabric check-config`: what is wrong with a configuration, and what it selects."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.commands.exits import DONE, MATCHES_NOTHING, WRONG_INPUT
from agent.commands.options import Command, add_hardware, add_output, scanned, show
from agent.commands.sources import add_sources, sources
from agent.model.printable import joined

if TYPE_CHECKING:
    from agent.model.device import Snapshot
    from deviceplugin.explanation import Explanation

SHOWN_DEVICES = 8
"""So many are named per line; the JSON names all."""


def add(command: Command) -> None:
    """Add the command."""
    parser = command("check-config", _check_config, "check a configuration and show what it selects on this node")
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help="the configuration; of any shape")
    add_sources(parser)
    add_hardware(parser)
    add_output(parser)


def _check_config(options: argparse.Namespace) -> int:
    from agent.startup import network_problems
    from deviceplugin.explanation import explain_all

    config = sources(options, options.file).load()
    with scanned(options) as snapshot:
        problems = network_problems(config, snapshot)
        found = explain_all(config.resources, snapshot)
        protected = {entry: _called(entry, snapshot) for entry in config.cni.protect}
    problems += [str(overlap) for overlap in found.mistakes]
    document = {
        "sound": not problems,
        "problems": problems,
        "warnings": list(config.warnings),
        "overlaps": [asdict(overlap) for overlap in found.overlaps],
        "resources": [asdict(resource) for resource in found.resources],
        "protected": protected,
    }
    show(options, document, joined(_lines(config.source, document, found.resources)))
    if problems:
        return WRONG_INPUT
    return MATCHES_NOTHING if any(not (r.devices and r.units) for r in found.resources) else DONE


def _called(name: str, snapshot: Snapshot) -> list[str]:
    """List the adapters and VFs of this name, or at this address."""
    return [d.address for d in snapshot.devices if name in (d.address, *(n.name for n in d.netdevs))]


def _lines(source: str, document: dict[str, Any], resources: Sequence[Explanation]) -> list[str]:
    lines = [f"{source} is sound" if document["sound"] else f"{source} is wrong:"]
    lines += [f"  {problem}" for problem in document["problems"]]
    lines += [f"warning: {warning}" for warning in document["warnings"]]
    for resource in resources:
        count = f"{len(resource.devices)} of {len(resource.candidates)} devices"
        units = f"{len(resource.units)} {'unit' if len(resource.units) == 1 else 'units'}"
        lines.append(f"{resource.resource_name} ({resource.kind}): {count}, {units}")
        lines += [
            f"  {match.field} {match.text}".rstrip() + f": {_some(match.devices)}" for match in resource.selectors
        ]
        for each in resource.exclusions:
            why = f"{each.field} alone leaves out" if "." in each.field else "no alternative takes"
            lines.append(f"  {why} {_some(each.devices)}")
        for owner in dict.fromkeys(lost.owner for lost in resource.lost):
            lines.append(
                f"  {owner} has already {_some([lost.device for lost in resource.lost if lost.owner == owner])}"
            )
        lines.append(f"  takes {_some(resource.devices)}")
    for name, devices in document["protected"].items():
        lines.append(f"cni.protect {name}: {_some(devices) if devices else 'no adapter of this node'}")
    if not resources:
        lines.append("it has no resources: the agent would offer nothing")
    return lines


def _some(devices: Sequence[str]) -> str:
    rest = len(devices) - SHOWN_DEVICES
    return ", ".join([*devices[:SHOWN_DEVICES], *([f"and {rest} more"] if rest > 0 else [])]) or "nothing"
