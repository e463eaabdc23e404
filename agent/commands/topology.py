"""`nodefabric topology`: how near GPUs and NICs are to each other."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from agent.commands.options import (
    DEFAULT_CONFIG,
    DONE,
    Command,
    add_config,
    add_hardware,
    add_output,
    legible,
    scanned,
    show,
)
from agent.errors import ConfigError


def add(command: Command) -> None:
    """Add the command."""
    parser = command("topology", _topology, "show how near GPUs and NICs are to each other")
    parser.add_argument("--vfs", action="store_true", help="a row and a column for each VF, not only for its PF")
    parser.add_argument(
        "--svg", action="store_true", help="draw the PCIe tree instead, as an SVG file on standard output"
    )
    add_config(parser)
    add_hardware(parser)
    add_output(parser)


def _topology(options: argparse.Namespace) -> int:
    from agent.process.identity import node_name
    from agent.report import chart, svg

    if options.svg and (options.output != "text" or options.vfs):
        raise ConfigError("command line", ["--svg draws the PCIe tree: it goes with neither --output json nor --vfs"])
    file = _topology_file(options)
    with scanned(options, file) as snapshot:
        for problem in snapshot.problems:
            if problem.path == str(file):
                print(f"{problem.path}: {problem.text}", file=sys.stderr)
        if options.svg:
            print(svg.draw(snapshot, options.node or node_name()), end="")
        else:
            shown = chart.as_document(snapshot, with_vfs=options.vfs)
            show(options, shown, chart.as_text(snapshot, with_vfs=options.vfs))
    return DONE


def _topology_file(options: argparse.Namespace) -> Path | None:
    """Name the file that the agent goes by. A node file has none of this machine's, unless a file is named."""
    if options.config == DEFAULT_CONFIG and (options.node is not None or not options.config.exists()):
        return None
    return legible(options.config).placement.topology_file
