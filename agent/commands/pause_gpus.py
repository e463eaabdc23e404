"""`nodefabric pause-gpus`: let GPUs be reset."""

from __future__ import annotations

import argparse
import sys

from agent import config as configuration
from agent import logs
from agent.commands.exits import DONE
from agent.commands.options import Command, add_config, add_output, show
from agent.errors import Unavailable
from agent.model.printable import one_line


def add(command: Command) -> None:
    """Add the command."""
    from agent.gpu_pause import DEFAULT_SECONDS

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
    from agent.gpu_pause import pause

    logs.configure(sys.stderr, "WARNING", "auto")
    config, wrong = configuration.load_legible(options.config)
    try:
        done = pause(config, options.gpus, options.seconds)
    except Unavailable as error:
        if wrong is not None:  # a running agent may have refused it
            raise wrong from error
        raise
    show(options, {"gpus": options.gpus, "seconds": options.seconds, "done": done}, one_line(done))
    return DONE
