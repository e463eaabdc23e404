"""The commands that put nodefabric's plugin on a host, keep it there, and take it away."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from agent.config.networks import REPLACED
from agent.errors import ConfigError, InstallFailed, Unavailable
from agent.process import logs
from agent.process.sockets import is_served
from agent.process.supervision import Volumes
from cni.install import chain
from cni.install import installation as install
from cni.install.installation import Installation

DEFAULT_RELAY = Path("/usr/local/libexec/nodefabric/nodefabric-cni")
DEFAULT_TARGET = Path("/opt/cni/bin")
DEFAULT_CONFIGURATIONS = Path("/etc/cni/net.d")
WAIT_SECONDS = 60.0
AGENT_PAUSE_SECONDS = 0.2

log = logging.getLogger(__name__)
Added = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


def add(command: Added) -> None:
    """Add the commands to a command line."""
    text = "put the CNI relay where the container runtime looks for plugins, and into its network if asked"
    parser = command("install-cni", _install, text)
    text = "the program (default: %(default)s)"
    parser.add_argument("--relay", type=Path, default=DEFAULT_RELAY, metavar="FILE", help=text)
    _add_places(parser)
    parser.add_argument(
        "--replace",
        type=_names,
        default=(),
        metavar="NAME,…",
        help=f"make these names ({', '.join(REPLACED)}) links to the relay; others' programs need --force",
    )
    parser.add_argument(
        "--chain", action="store_true", help="put the plugin last into the network that the runtime takes first"
    )
    parser.add_argument("--watch", action="store_true", help="do not end: put back what another program removes")
    parser.add_argument(
        "--wait-for",
        type=Path,
        metavar="SOCKET",
        help="chain once an agent listens there; without --watch within 60 s",
    )

    parser = command("remove-cni", _remove, "take the plugin out of the networks and the relay away")
    _add_places(parser)


def _add_places(parser: argparse.ArgumentParser) -> None:
    text = "plugin folder (default: %(default)s)"
    parser.add_argument("--target", type=Path, default=DEFAULT_TARGET, metavar="FOLDER", help=text)
    parser.add_argument(
        "--conf-dir",
        type=Path,
        default=DEFAULT_CONFIGURATIONS,
        metavar="FOLDER",
        help="network configurations (default: %(default)s)",
    )
    parser.add_argument(
        "--instance",
        default=os.environ.get("NODEFABRIC_INSTANCE", install.DEFAULT_INSTANCE),
        help="whose installation this is (default: %(default)s)",
    )
    parser.add_argument(
        "--force", action="store_true", help="take over another instance's installation; set aside others' programs"
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def _install(options: argparse.Namespace) -> int:
    wanted = Installation(options.relay, options.target, options.replace, options.instance, options.force)
    if options.chain and not options.conf_dir.is_dir():
        raise ConfigError(str(options.conf_dir), ["is no folder: name the one that the runtime uses with --conf-dir"])
    changed = install.install(wanted)
    print(f"{options.target}: {_said('installed', changed, 'this relay is there already')}")
    if options.watch:
        logs.configure(sys.stderr, "INFO", "auto")
        signal.signal(signal.SIGTERM, _end)
    if options.chain and options.wait_for is not None:
        _await_agent(options.wait_for, None if options.watch else WAIT_SECONDS)
    if options.watch:
        _watch(options, wanted)
    if options.chain:
        plan = chain.chain(options.conf_dir)
        if plan.network is None:
            raise InstallFailed(
                f"{options.conf_dir} holds no network to join yet: install the cluster network first, or use --watch"
            )
        print(f"{options.conf_dir / plan.network}: nodefabric is {'in it already' if plan.is_done else 'chained in'}")
    return 0


def _watch(options: argparse.Namespace, wanted: Installation) -> NoReturn:
    """Keep the relay, and the chain if asked, for ever. Only the end of the process ends it.

    Raises InstallFailed where it would work for nobody: in a folder of the host that another has taken the place of.
    """
    volumes = Volumes([wanted.target, options.conf_dir])
    said = ""

    def keep_relay() -> None:
        nonlocal said
        if lost := volumes.lost():
            raise InstallFailed(lost)
        try:
            if changed := install.install(wanted, keeps=True):
                log.warning("%s: put back: %s", wanted.target, ", ".join(changed))
        except (ConfigError, InstallFailed) as error:
            if str(error) != said:
                log.error("%s", error)
            said = str(error)
        else:
            said = ""

    if options.chain:
        chain.keep(options.conf_dir, keep_relay)
    while True:
        keep_relay()
        time.sleep(chain.POLL_SECONDS)


def _remove(options: argparse.Namespace) -> int:
    install.see_owner(options.target, instance=options.instance, force=options.force)  # the networks are that one's too
    if options.conf_dir.is_dir():
        for name in chain.unchain(options.conf_dir):
            print(f"{options.conf_dir / name}: nodefabric is taken out")
    changed = install.remove(options.target, instance=options.instance, force=options.force)
    print(f"{options.target}: {_said('removed', changed, 'there was no relay')}")
    return 0


def _said(verb: str, changed: tuple[str, ...], otherwise: str) -> str:
    return f"{verb} {', '.join(changed)}" if changed else otherwise


def _await_agent(path: Path, seconds: float | None) -> None:
    deadline = None if seconds is None else time.monotonic() + seconds
    while not is_served(path):
        if deadline is not None and time.monotonic() >= deadline:
            raise Unavailable(f"no agent listens on {path} after {seconds:g} s: the plugin is not chained in")
        time.sleep(AGENT_PAUSE_SECONDS)


def _end(number: int, frame: FrameType | None) -> None:
    """End at once: every change is one step, and the first process of a container ends by no signal of itself."""
    sys.exit(0)
