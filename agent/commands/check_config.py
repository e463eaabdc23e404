"""`nodefabric check-config`: what is wrong with a configuration, and what it selects."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from agent import config as configuration
from agent.commands.exits import DONE
from agent.commands.options import Command, add_hardware, add_output, scanned, show

SHOWN_DEVICES = 8
"""So many are named per line; the JSON names all."""


def add(command: Command) -> None:
    """Add the command."""
    parser = command("check-config", _check_config, "check a configuration and show what it selects on this node")
    parser.add_argument("file", type=Path, metavar="FILE", help="the configuration, YAML")
    add_hardware(parser)
    add_output(parser)


def _check_config(options: argparse.Namespace) -> int:
    from agent.startup import check
    from deviceplugin.explanation import explain

    config = configuration.load(options.file)
    with scanned(options) as snapshot:
        check(config, snapshot)
        found = [explain(resource, snapshot) for resource in config.resources]
    lines = [f"{options.file} is sound"]
    for resource in found:
        lines.append(
            f"{resource.resource_name} ({resource.kind}): {len(resource.devices)} of {len(resource.candidates)}"
        )
        lines += [f"  {match.field} {match.text}: {_some(match.devices)}" for match in resource.selectors]
        lines.append(f"  takes {_some(resource.devices)}")
    if not found:
        lines.append("it has no resources: the agent would offer nothing")
    show(options, {"resources": [asdict(resource) for resource in found]}, "\n".join(lines))
    return DONE


def _some(devices: Sequence[str]) -> str:
    rest = len(devices) - SHOWN_DEVICES
    return ", ".join([*devices[:SHOWN_DEVICES], *([f"and {rest} more"] if rest > 0 else [])]) or "nothing"
