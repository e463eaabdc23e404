"""What several commands have in common: options, what these name, how they answer, and with which status they end."""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agent.config import Config, Flags, load_legible
from agent.config.compat import SRIOV_PREFIX
from agent.config.files import Sources
from agent.errors import ConfigError
from agent.model.printable import joined, one_line

if TYPE_CHECKING:
    from agent.hardware.host import Host
    from agent.hardware.recorded import RecordedNode
    from agent.model.device import Snapshot


DEFAULT_CONFIG = Path("/etc/nodefabric/config.yaml")
GPU_SECONDS = 30.0
"""How long a command waits for the GPUs."""
RESOLVER_SECONDS = 3.0
"""How long a start waits for the API server's address where the cluster gives a name."""

DONE, FAILED, WRONG_INPUT, NO_ANSWER, IN_USE, MATCHES_NOTHING = 0, 1, 2, 3, 4, 5
FINDINGS = FAILED
"""doctor found something that keeps pods from working."""
INTERRUPTED = 130
"""128 and the number of SIGINT, as shells have it."""
EXIT_STATUSES = (
    "Exit statuses: 0 done, 1 something failed, 2 the configuration or the command line is wrong,"
    " 3 the agent does not answer, 4 a pod may still use the device,"
    " 5 a resource selects nothing on this node."
)

Run = Callable[[argparse.Namespace], int]


Command = Callable[[str, Run, str], argparse.ArgumentParser]
"""Adds a command to the command line: its name, what it does, and its one line of help."""


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the configuration."""
    parser.add_argument(
        "--config", type=Path, default=DEFAULT_CONFIG, metavar="FILE", help="the configuration (default: %(default)s)"
    )


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Add the options for configurations of device plugins that the agent stands in for."""
    sriov, shared = "sriov-network-device-plugin", "k8s-rdma-shared-dev-plugin"
    others = parser.add_argument_group("configurations of other device plugins, besides our own or alone")
    others.add_argument("--sriov-config", type=Path, metavar="FILE", help=f"of {sriov}: /etc/pcidp/config.json")
    text = f"of {shared}: /k8s-rdma-shared-dev-plugin/config.json"
    others.add_argument("--rdma-shared-config", type=Path, metavar="FILE", help=text)
    text = f"prefix of {sriov}'s resources that name none (default: %(default)s)"
    others.add_argument("--resource-prefix", default=SRIOV_PREFIX, metavar="PREFIX", help=text)
    others.add_argument("--use-cdi", action="store_true", help="hand their devices out by CDI, as their flag does")


def sources(options: argparse.Namespace, own: Path | None) -> Sources:
    """Say which files the options name. Raises ConfigError if that is none.

    Our own file need not be there at its usual place if another one is named.
    """
    flags = Flags(options.resource_prefix, options.use_cdi)
    others = options.sriov_config, options.rdma_shared_config
    if own == DEFAULT_CONFIG and any(others) and not own.exists():
        own = None
    found = Sources(own, *others, flags)
    if not found.files:
        raise ConfigError("command line", ["name a configuration: FILE, --sriov-config or --rdma-shared-config"])
    return found


def legible(path: Path) -> Config:
    """Read what is right of a configuration, and show what is wrong: the agent may go by an earlier version.

    Raises ConfigError if there is no such file.
    """
    config, wrong = load_legible(path)
    for problem in wrong.problems if wrong is not None else ():
        print(one_line(f"{path}: {problem}"), file=sys.stderr)
    return config


def add_host(parser: argparse.ArgumentParser) -> Any:
    """Add the options of commands that change what they find: a node file is only to look at."""
    where = parser.add_mutually_exclusive_group()
    text = "where /sys, /proc and /dev are (default: /)"
    where.add_argument("--root", type=Path, default=Path("/"), metavar="FOLDER", help=text)
    return where


def add_hardware(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which node to look at."""
    text = "a modelled or recorded node instead of this machine: its name, or a file"
    add_host(parser).add_argument("--node", metavar="NODE", help=text)


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the option that asks for tables or for JSON."""
    text = "tables for people, or JSON for programs (default: %(default)s)"
    parser.add_argument("--output", "-o", choices=("text", "json"), default="text", help=text)


def open_host(options: argparse.Namespace, *, for_one_look: bool = False) -> Host:
    """Open the host that `add_host`'s options name, or that the caller of `main` opens. Close it when done.

    `for_one_look` waits for GPUs that take their time: without the driver's persistence mode, a second each and more.
    """
    if options.open_host is not None:
        return cast("Host", options.open_host())
    from agent.hardware.machine import Machine
    from agent.hardware.nvml.monitor import DEFAULT_TIMES, Times

    if not (options.root / "sys").is_dir():
        raise ConfigError(str(options.root), ["has no folder sys: name one that holds sys, proc and dev with --root"])
    api_server = _address(os.environ.get("KUBERNETES_SERVICE_HOST", ""))
    times = Times(first=GPU_SECONDS, overdue=GPU_SECONDS) if for_one_look else DEFAULT_TIMES
    return Machine.open(options.root, api_server=api_server, gpu_times=times)


@contextmanager
def open_looked_at(options: argparse.Namespace) -> Iterator[Host | RecordedNode]:
    """Open this machine, another root or a recorded node, as `add_hardware`'s options say."""
    if options.node is None:
        host = open_host(options, for_one_look=True)
        try:
            yield host
        finally:
            host.close()
        return
    from agent.hardware import recorded

    with tempfile.TemporaryDirectory(prefix="nodefabric-") as folder:
        yield recorded.RecordedNode.lay_out(recorded.load(recorded.named(options.node)), Path(folder))


@contextmanager
def scanned(options: argparse.Namespace, topology_file: Path | None) -> Iterator[Snapshot]:
    """Scan what `open_looked_at` opens; devices stand where the configuration's topology file says."""
    from agent.hardware.adapter_ids import with_adapter_ids
    from agent.hardware.sysfs.scan import with_nccl_topology

    with open_looked_at(options) as host:
        yield with_nccl_topology(with_adapter_ids(host.scan(), host.root), topology_file)


def show(options: argparse.Namespace, document: Any, text: str) -> None:
    """Answer in the form that `add_output`'s option asks for; `text` is made of lines by `joined`, or is one."""
    print(json.dumps(document, indent=1) if options.output == "json" else joined(text.split("\n")))


def _address(text: str) -> str | None:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return _resolved(text) if text else None


def _resolved(name: str) -> str | None:
    """Return the first address of a host's name, None without an answer in time."""
    found: list[str] = []

    def ask() -> None:
        with suppress(OSError, UnicodeError):
            found.extend(str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))

    asking = threading.Thread(target=ask, name=f"address of {name}", daemon=True)
    asking.start()
    asking.join(RESOLVER_SECONDS)
    return found[0] if found else None
