"""`nodefabric completion`: scripts with which shells complete this command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from agent.commands.described import arguments, describe
from agent.commands.exits import DONE
from agent.commands.options import Command
from agent.commands.shells import SHELLS


def add(command: Command, whole: Callable[[], argparse.ArgumentParser]) -> None:
    """Add the command. `whole` gives the parser with all commands."""
    parser = command("completion", lambda options: _completion(options, whole()), "print a completion script")
    parser.add_argument("shell", choices=tuple(SHELLS), help="the shell it is for")


def _completion(options: argparse.Namespace, whole: argparse.ArgumentParser) -> int:
    from agent.sim import recorded

    print(SHELLS[options.shell](describe(whole), arguments(whole), recorded.names()), end="")
    return DONE
