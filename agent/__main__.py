"""The command line: which commands there are, and with which status each error ends."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from agent.commands import run
from agent.commands.options import (
    DEFAULT_CONFIG,
    DONE,
    EXIT_STATUSES,
    FAILED,
    IN_USE,
    INTERRUPTED,
    NO_ANSWER,
    WRONG_INPUT,
    Run,
    show,
)
from agent.errors import AgentError, ConfigError, InUse, RequestInvalid, Unavailable
from agent.model.printable import one_line, unknown

if TYPE_CHECKING:
    from agent.hardware.host import Host

__all__ = ["DEFAULT_CONFIG", "main"]

STATUS_OF = ((Unavailable, NO_ANSWER), (InUse, IN_USE), (RequestInvalid, WRONG_INPUT))


def main(arguments: Sequence[str] | None = None, open_host: Callable[[], Host] | None = None) -> int:
    """Run one command and return its exit status. `open_host` opens another host than the options name."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--version"]:
        words = ["version"]
    parser, commands = _parser_and_commands(for_agent=words[:1] == ["run"])
    if not words:
        parser.error(f"name a command, or --help; known are: {', '.join(sorted(commands))}")
    if not words[0].startswith("-") and words[0] not in commands:
        parser.error(f"{one_line(words[0])} {unknown(words[0], commands, 'command')}")
    options = parser.parse_args(words, argparse.Namespace(open_host=open_host))
    try:
        return int(options.run(options))
    except ConfigError as error:
        for problem in error.problems:
            _complain(f"{error.source}: {problem}")
        if error.source == str(DEFAULT_CONFIG) and not os.access(DEFAULT_CONFIG, os.R_OK):
            _complain("the agent's own is looked for there: run this as root on its node, or name one with --config")
        return WRONG_INPUT
    except AgentError as error:
        _complain(f"nodefabric: {error}")
        return next((status for kind, status in STATUS_OF if isinstance(error, kind)), FAILED)
    except PermissionError as error:
        _complain(f"nodefabric: {error.filename}: {error.strerror}: run this as root")
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # who read us has read enough
        return FAILED


def _complain(text: str) -> None:
    print(one_line(text), file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    return _parser_and_commands(for_agent=False)[0]


def _parser_and_commands(*, for_agent: bool) -> tuple[argparse.ArgumentParser, Collection[str]]:
    """Make the parser and the names of its commands; the others cost an agent that starts its time."""
    parser = argparse.ArgumentParser(
        prog="nodefabric", description="Kubernetes node agent for RDMA, SR-IOV and GPUs", epilog=EXIT_STATUSES
    )
    parser.add_argument("--version", action="store_true", help="show the version and end")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Run, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    run.add(command)
    if for_agent:
        return parser, commands.choices
    from agent.commands import check_config, completion, doctor, release, status, topology, uninstall
    from agent.commands.options import add_output
    from cni.install import commands as commands_of_cni

    for module in (status, release, topology, check_config, doctor):
        module.add(command)
    commands_of_cni.add(command)
    uninstall.add(command)
    completion.add(command, parser)
    add_output(command("version", _version, "show the version"))
    return parser, commands.choices


def _version(options: argparse.Namespace) -> int:
    from agent.process.identity import agent_version

    show(options, {"version": agent_version()}, f"nodefabric {agent_version()}")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
