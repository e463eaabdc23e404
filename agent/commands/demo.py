"""`nodefabric demo`: the main job on a simulated node."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from agent.commands.options import Command
from agent.errors import ConfigError
from cni.install.commands import DEFAULT_RELAY


def add(command: Command) -> None:
    """Add the command."""
    parser = command("demo", _demo, "show the main job on a simulated node")
    parser.add_argument(
        "--node",
        default="h100-8gpu",
        metavar="NODE",
        help="modelled or recorded node with GPUs and VFs to simulate: its name, or a file (default: %(default)s)",
    )
    text = "the CNI relay (default: %(default)s)"
    parser.add_argument("--relay", type=Path, default=DEFAULT_RELAY, metavar="FILE", help=text)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)


def _demo(options: argparse.Namespace) -> int:
    from agent.sim import demo

    if not options.relay.is_file():
        raise ConfigError(
            str(options.relay),
            ["is not there: `make demo` builds the CNI relay and names it; else name it with --relay"],
        )
    if not os.access(options.relay, os.X_OK):
        raise ConfigError(str(options.relay), ["is no program: name the CNI relay with --relay"])
    if not options.inside:
        demo.enter_namespaces(["--node", options.node, "--relay", str(options.relay)])
    return demo.run(options.node, options.relay)
