"""`nodefabric version`, and `nodefabric --version`."""

from __future__ import annotations

import argparse

from agent.commands.options import DONE, Command, add_output, show


def add(command: Command) -> None:
    """Add the command."""
    add_output(command("version", _version, "show the version"))


class ShowVersion(argparse.Action):
    """Look the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from agent.process.identity import agent_version

        print(f"nodefabric {agent_version()}")
        parser.exit(DONE)


def _version(options: argparse.Namespace) -> int:
    from agent.process.identity import agent_version

    show(options, {"version": agent_version()}, f"nodefabric {agent_version()}")
    return DONE
