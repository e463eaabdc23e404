"""The command line as plain values: what shells complete and the reference lists, read from argparse. Pure."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

FOLDER_METAVAR, NODE_METAVAR = "FOLDER", "NODE"


@dataclass(frozen=True, slots=True)
class Argument:
    """An option, or an argument without a name."""

    names: tuple[str, ...]
    """`--output`, `-o`; empty for an argument without a name."""
    metavar: str
    """What stands for its value; empty for a switch."""
    text: str
    choices: tuple[str, ...] = ()
    takes: str = ""
    """What a value is: file, folder, node (a recorded node's name, or a file), or empty for other text."""
    is_required: bool = False
    how_many: str = ""
    """`?` for one or none, `+` for at least one, as argparse writes it; empty for one."""


@dataclass(frozen=True, slots=True)
class Described:
    """One command."""

    name: str
    text: str
    arguments: tuple[Argument, ...]


def describe(parser: argparse.ArgumentParser) -> tuple[Described, ...]:
    """List the commands of a parser in their order; what is hidden from help is left out."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return tuple(
        Described(name, command.description or "", arguments(command)) for name, command in commands.choices.items()
    )


def arguments(parser: argparse.ArgumentParser) -> tuple[Argument, ...]:
    """List the options and arguments of one parser, -h included."""
    return tuple(
        _argument(action)
        for action in parser._actions
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._SubParsersAction)
    )


def _argument(action: argparse.Action) -> Argument:
    is_switch = action.nargs == 0
    choices = tuple(map(str, action.choices)) if action.choices is not None else ()
    metavar = "" if is_switch else str(action.metavar or "|".join(choices) or action.dest.upper().replace("_", "-"))
    text = (action.help or "") % {**vars(action), "prog": "nodefabric"}
    return Argument(
        tuple(action.option_strings),
        metavar,
        text,
        choices,
        _takes(action, metavar),
        action.required,
        action.nargs if isinstance(action.nargs, str) else "",
    )


def _takes(action: argparse.Action, metavar: str) -> str:
    if metavar == NODE_METAVAR:
        return "node"
    if action.type is not Path:
        return ""
    return "folder" if metavar == FOLDER_METAVAR else "file"
