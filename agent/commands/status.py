"""`nodefabric status` and `events`: what the running agent says; status also reads its books without it."""

from __future__ import annotations

import argparse
import time
from typing import Any

from agent.commands.options import DONE, NO_ANSWER, Command, add_config, add_output, legible, show
from agent.config import Config
from agent.errors import Unavailable


def add(command: Command) -> None:
    """Add the commands."""
    parser = command("status", _status, "show what the running agent offers, who holds what, and what is wrong")
    add_config(parser)
    add_output(parser)
    parser = command("events", _events, "show what happened lately, the newest first")
    add_config(parser)
    add_output(parser)


def _status(options: argparse.Namespace) -> int:
    from agent.report import status, status_text

    config = legible(options.config)
    try:
        document, outcome = status.ask(config.endpoints), DONE
    except Unavailable as error:
        document, outcome = _from_books(config, error), NO_ANSWER
    show(options, document, status_text.text(document, time.time()))
    return outcome


def _from_books(config: Config, error: Unavailable) -> dict[str, Any]:
    """Return what the books hold, while no agent answers."""
    from agent.ledger import database
    from agent.process.identity import agent_version, node_name
    from agent.report import status

    problem = f"does not run; this is what its ledger holds ({config.ledger_path})"
    if isinstance(error, status.Waiting):
        problem = f"{error}; this is what its ledger holds ({config.ledger_path})"
    elif not config.ledger_path.exists():
        problem = f"does not run, and has left no ledger here ({config.ledger_path})"
    if database.is_locked(config.state_dir):
        problem = f"runs, but does not answer; this is what its ledger holds: {error}"
    found = database.read_books(config.ledger_path)
    return status.without_agent(found, node=node_name(), version=agent_version(), problem=problem)


def _events(options: argparse.Namespace) -> int:
    from agent.report import status, status_text

    events = status.ask(legible(options.config).endpoints)["events"]
    show(options, {"events": events}, status_text.events_text(events, time.time()))
    return DONE
