"""`nodefabric doctor`: what on this node would keep pods from working, and what to do."""

from __future__ import annotations

import argparse
from pathlib import Path

from agent import config as configuration
from agent.commands.exits import DONE, FINDINGS
from agent.commands.options import Command, add_config, add_host, add_output, open_host, show
from agent.errors import ConfigError


def add(command: Command) -> None:
    """Add the command."""
    parser = command("doctor", _doctor, "check this node, and say what to do about each finding")
    add_config(parser)
    add_host(parser)
    add_output(parser)


def _doctor(options: argparse.Namespace) -> int:
    from agent.doctor import findings
    from agent.doctor.checkup import examine
    from agent.doctor.collect import collect

    config, problems = None, tuple[str, ...]()
    try:
        config = configuration.load(options.config)
    except ConfigError as error:
        problems = tuple(error.problems)
    host = open_host(options, for_one_look=True)
    try:
        root = options.root if options.simulate is None else Path(host.root)
        is_here = options.root == Path("/")
        found = examine(collect(root, host.scan(), config, options.config, problems, ask_agent=is_here))
    finally:
        host.close()
    show(options, findings.as_document(found), findings.as_text(found))
    return DONE if findings.is_sound(found) else FINDINGS
