"""`nodefabric events`: what happened lately, as the running agent remembers it."""

from __future__ import annotations

import argparse
import time

from agent.commands.options import DONE, Command, add_config, add_output, asking, show
from agent.commands.status import ask


def add(command: Command) -> None:
    """Add the command."""
    parser = command("events", _events, "show what happened lately, the newest first")
    add_config(parser)
    add_output(parser)


def _events(options: argparse.Namespace) -> int:
    from agent.report import status

    with asking(options.config) as config:
        events = ask(config.endpoints)["events"]
    show(options, {"events": events}, status.events_text(events, time.time()))
    return DONE
