"""`nodefabric pause-gpus`: let GPUs be reset."""

from __future__ import annotations

import argparse
import sys

from agent.commands.options import DONE, Command, add_config, add_output, asking, show
from agent.model.printable import one_line
from agent.process import logs


def add(command: Command) -> None:
    """Add the command."""
    from agent.operator.gpu_pause import DEFAULT_SECONDS

    parser = command("pause-gpus", _pause, "let go of the NVIDIA driver for a while, so that GPUs can be reset")
    parser.add_argument(
        "gpus", metavar="GPU", nargs="+", help="a GPU that will be reset: UUID, PCI address or number; it starts anew"
    )
    parser.add_argument(
        "--seconds", type=float, default=DEFAULT_SECONDS, help="for how long (default: %(default)g); 0 ends a pause"
    )
    add_config(parser)
    add_output(parser)


def _pause(options: argparse.Namespace) -> int:
    from agent.operator.gpu_pause import pause

    logs.configure(sys.stderr, "WARNING", "auto")
    with asking(options.config) as config:
        done = pause(config, options.gpus, options.seconds)
    show(options, {"gpus": options.gpus, "seconds": options.seconds, "done": done}, one_line(done))
    return DONE
