"""`nodefabric topology`: how near GPUs and NICs are to each other."""

from __future__ import annotations

import argparse

from agent.commands.exits import DONE
from agent.commands.options import Command, add_hardware, add_output, scanned, show


def add(command: Command) -> None:
    """Add the command."""
    parser = command("topology", _topology, "show how near GPUs and NICs are to each other")
    add_hardware(parser)
    add_output(parser)


def _topology(options: argparse.Namespace) -> int:
    from agent.topology import matrix

    with scanned(options) as snapshot:
        show(options, matrix.as_document(snapshot), matrix.as_text(snapshot))
    return DONE
