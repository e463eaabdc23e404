"""`nodefabric release` and `pause-gpus`: give back a device that is stuck, and let GPUs be reset."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from agent.commands.options import DONE, Command, add_config, add_host, add_output, legible, open_host, show
from agent.model.printable import one_line
from agent.process import logs


def add(command: Command) -> None:
    """Add the commands."""
    from agent.operator.gpu_pause import DEFAULT_SECONDS

    parser = command("release", _release, "give a device back that is stuck or in quarantine")
    parser.add_argument("device", metavar="DEVICE", help="PCI address, or name of the interface in the host")
    parser.add_argument("--reason", required=True, metavar="TEXT", help="why; it is logged")
    parser.add_argument("--force", action="store_true", help="also take it from a pod, or forget what does not come")
    add_config(parser)
    add_host(parser)
    add_output(parser)
    parser = command("pause-gpus", _pause, "let go of the NVIDIA driver for a while, so that GPUs can be reset")
    parser.add_argument(
        "gpus",
        metavar="GPU",
        nargs="+",
        help="UUID, PCI address or number; errors of before are forgotten",
    )
    parser.add_argument(
        "--seconds", type=float, default=DEFAULT_SECONDS, help="for how long (default: %(default)g); 0 ends a pause"
    )
    add_config(parser)
    add_output(parser)


def _release(options: argparse.Namespace) -> int:
    from agent.operator.release import release
    from cni.heal import ReleaseRequest

    logs.configure(sys.stderr, "WARNING", "auto")
    wish = ReleaseRequest(options.device, options.reason, options.force)
    done = release(legible(options.config), wish, partial(open_host, options))
    show(options, {"device": options.device, "done": done}, one_line(done))
    return DONE


def _pause(options: argparse.Namespace) -> int:
    from agent.operator.gpu_pause import pause

    logs.configure(sys.stderr, "WARNING", "auto")
    done = pause(legible(options.config), options.gpus, options.seconds)
    show(options, {"gpus": options.gpus, "seconds": options.seconds, "done": done}, one_line(done))
    return DONE
