"""`nodefabric uninstall`: leave the node as it was before."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from agent.commands.exits import DONE
from agent.commands.options import Command, add_output, show
from agent.errors import ConfigError
from agent.model.printable import joined
from cni.commands import DEFAULT_CONFIGURATIONS, DEFAULT_TARGET
from cni.install import DEFAULT_INSTANCE

PLACES = (
    ("--target", DEFAULT_TARGET, "plugin folder"),
    ("--conf-dir", DEFAULT_CONFIGURATIONS, "network configurations"),
    ("--kubelet-dir", Path("/var/lib/kubelet"), "kubelet's folder"),
    ("--state-dir", Path("/var/lib/nodefabric"), "the agent's books"),
    ("--run-dir", Path("/run/nodefabric"), "the agent's sockets"),
    ("--cdi-dir", Path("/var/run/cdi"), "where the agent writes CDI specs"),
)


def add(command: Command) -> None:
    """Add the command."""
    text = "take the plugin out of the networks, and all files of the agent off this node"
    parser = command("uninstall", _uninstall, text)
    for name, default, what in PLACES:
        parser.add_argument(
            name, type=_host_path, default=default, metavar="FOLDER", help=f"{what} (default: %(default)s)"
        )
    parser.add_argument(
        "--nfd-file",
        type=_host_path,
        default=Path("/etc/kubernetes/node-feature-discovery/features.d/nodefabric"),
        metavar="FILE",
        help="the labels for NFD's worker (default: %(default)s)",
    )
    parser.add_argument(
        "--root", type=Path, default=Path("/"), metavar="FOLDER", help="where the host's own / is (default: /)"
    )
    parser.add_argument(
        "--instance",
        default=os.environ.get("NODEFABRIC_INSTANCE", DEFAULT_INSTANCE),
        metavar="NAME",
        help="whose installation this is (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="though pods have devices, or it is another instance's")
    add_output(parser)


def _host_path(text: str) -> Path:
    path = Path(text)
    if not path.is_absolute() or ".." in path.parts:
        raise argparse.ArgumentTypeError(f"{text!r} is no absolute path of the host")
    return path


def _boot_id(root: Path) -> str:
    try:
        return (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _uninstall(options: argparse.Namespace) -> int:
    from agent.uninstall import Places, uninstall

    if not options.root.is_dir():  # "there was nothing" would be taken for a clean host
        raise ConfigError(str(options.root), ["is no folder: name the one where the host's own / is with --root"])
    places = Places(
        root=options.root,
        plugins=options.target,
        networks=options.conf_dir,
        kubelet=options.kubelet_dir,
        state=options.state_dir,
        run=options.run_dir,
        cdi=options.cdi_dir,
        nfd_file=options.nfd_file,
        boot_id=_boot_id(options.root),
    )
    removed = uninstall(places, instance=options.instance, force=options.force)
    show(options, {"removed": removed}, joined(f"removed {what}" for what in removed) or "there was nothing")
    return DONE
