"""What several commands have in common: options, the hardware they look at, and how they answer."""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agent.errors import ConfigError
from agent.model.printable import joined

if TYPE_CHECKING:
    from agent.hardware.host import Host
    from agent.model.device import Snapshot

DEFAULT_CONFIG = Path("/etc/nodefabric/config.yaml")
GPU_SECONDS = 30.0
"""How long a command waits for the GPUs."""

Run = Callable[[argparse.Namespace], int]


class Command(Protocol):
    def __call__(self, name: str, run: Run, text: str, /) -> argparse.ArgumentParser:
        """Add a command to the command line. `text` is its one line of help."""


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the configuration."""
    parser.add_argument(
        "--config", type=Path, default=DEFAULT_CONFIG, metavar="FILE", help="the configuration (default: %(default)s)"
    )


def add_host(parser: argparse.ArgumentParser) -> Any:
    """Add the options of commands that change what they find: a recorded node is only to look at."""
    where = parser.add_mutually_exclusive_group()
    text = "where /sys, /proc and /dev are (default: /)"
    where.add_argument("--root", type=Path, default=Path("/"), metavar="FOLDER", help=text)
    where.add_argument("--simulate", type=Path, metavar="FOLDER", help="a simulated node, as the demo makes one")
    return where


def add_hardware(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which node to look at."""
    text = "a recorded node instead of this machine: its name, or a file"
    add_host(parser).add_argument("--node", metavar="NODE", help=text)


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the option that asks for tables or for JSON."""
    text = "tables for people, or JSON for programs (default: %(default)s)"
    parser.add_argument("--output", "-o", choices=("text", "json"), default="text", help=text)


def open_host(options: argparse.Namespace, *, for_one_look: bool = False) -> Host:
    """Open the host that `add_host`'s options name. Close it when done.

    `for_one_look` waits for GPUs that take their time: without the driver's persistence mode, a second each and more.
    """
    if options.simulate is not None:
        from agent.sim.machine import SimulatedMachine

        if not (options.simulate / "gpus.json").is_file():
            raise ConfigError(str(options.simulate), ["is no simulated node: recorded ones are named with --node"])
        return SimulatedMachine.open(options.simulate)
    from agent.hardware.machine import Machine
    from agent.hardware.nvml_monitor import DEFAULT_PACE, Pace

    if not (options.root / "sys").is_dir():
        raise ConfigError(str(options.root), ["has no folder sys: name one that holds sys, proc and dev with --root"])
    api_server = _address(os.environ.get("KUBERNETES_SERVICE_HOST", ""))
    pace = Pace(first=GPU_SECONDS, overdue=GPU_SECONDS) if for_one_look else DEFAULT_PACE
    return Machine.open(options.root, api_server=api_server, gpu_pace=pace)


@contextmanager
def open_looked_at(options: argparse.Namespace) -> Iterator[Host]:
    """Open this machine, another root, a simulated node or a recorded one, as `add_hardware`'s options say."""
    if options.node is None:
        host = open_host(options, for_one_look=True)
        try:
            yield host
        finally:
            host.close()
        return
    from agent.sim import recorded
    from agent.sim.machine import SimulatedMachine

    with tempfile.TemporaryDirectory(prefix="nodefabric-") as folder:
        node = recorded.load(recorded.named(options.node))
        SimulatedMachine.create(Path(folder) / "node", node, with_links=False)
        simulated = SimulatedMachine.open(Path(folder) / "node")
        try:
            yield simulated
        finally:
            simulated.close()


@contextmanager
def scanned(options: argparse.Namespace) -> Iterator[Snapshot]:
    """Scan what `open_looked_at` opens."""
    with open_looked_at(options) as host:
        yield host.scan()


def show(options: argparse.Namespace, document: Any, text: str) -> None:
    """Answer in the form that `add_output`'s option asks for; `text` is made of lines by `joined`, or is one."""
    print(json.dumps(document, indent=1) if options.output == "json" else joined(text.split("\n")))


def _address(text: str) -> str | None:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:  # a host's name, or nothing
        return None
