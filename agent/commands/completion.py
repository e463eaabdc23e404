"""`nodefabric completion`: scripts with which shells complete this command line, written by shtab."""

from __future__ import annotations

import argparse

from agent.commands.options import DONE, Command

SHELLS = ("bash", "zsh", "fish")


def add(command: Command, whole: argparse.ArgumentParser) -> None:
    """Add the command. `whole` is the parser that has all of them in the end."""

    def completion(options: argparse.Namespace) -> int:
        print(script(whole, options.shell), end="")
        return DONE

    parser = command("completion", completion, "print a completion script")
    parser.add_argument("shell", choices=SHELLS, help="the shell it is for")


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Write the script for one shell."""
    import shtab

    _say_what_values_are(parser)
    return shtab.complete(parser, shell)


def _say_what_values_are(parser: argparse.ArgumentParser) -> None:
    """Give each option what shtab completes its value with, by its metavar."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _say_what_values_are(command)
        elif action.metavar in ("FOLDER", "FILE", "SOCKET", "NODE"):
            action.complete = shtab.DIRECTORY if action.metavar == "FOLDER" else shtab.FILE  # type: ignore[attr-defined]
