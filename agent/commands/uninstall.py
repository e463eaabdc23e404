"""`nodefabric uninstall`: leave the node as it was before."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from agent.commands.options import DONE, Command, add_output, show
from agent.config.sections import DRIVER
from agent.errors import ConfigError
from agent.model.printable import joined
from cni.install.commands import DEFAULT_CONFIGURATIONS, DEFAULT_TARGET
from cni.install.installation import DEFAULT_INSTANCE

if TYPE_CHECKING:
    from agent.operator.uninstall import Published

INSTANCE = os.environ.get("NODEFABRIC_INSTANCE", DEFAULT_INSTANCE)
OPTIONS = (
    ("--target", "plugins", DEFAULT_TARGET, "FOLDER", "plugin folder"),
    ("--conf-dir", "networks", DEFAULT_CONFIGURATIONS, "FOLDER", "network configurations"),
    ("--kubelet-dir", "kubelet", Path("/var/lib/kubelet"), "FOLDER", "kubelet's folder"),
    ("--state-dir", "state", Path("/var/lib/nodefabric"), "FOLDER", "the agent's ledger"),
    ("--run-dir", "run_dir", Path("/run/nodefabric"), "FOLDER", "the agent's sockets"),
    ("--cdi-dir", "cdi", Path("/var/run/cdi"), "FOLDER", "where the agent writes CDI specs"),
    ("--dra-driver", "dra_driver", DRIVER, "NAME", "`dra.driver` of the configuration"),
    ("--instance", "instance", INSTANCE, "NAME", "whose installation this is"),
    ("--root", "root", Path("/"), "FOLDER", "where the host's own / is"),
)


def add(command: Command) -> None:
    """Add the command."""
    text = "take the plugin out of the networks, and all files of the agent off this node"
    parser = command("uninstall", _uninstall, text)
    for name, field, default, metavar, what in OPTIONS:
        read = _host_path if isinstance(default, Path) else str
        text = f"{what} (default: %(default)s)"
        parser.add_argument(name, dest=field, type=read, default=default, metavar=metavar, help=text)
    parser.add_argument(
        "--slices-of",
        metavar="NODE",
        help="take this Node's ResourceSlices away too (default: kubelet does, half a minute after the agent's end)",
    )
    text = "API server for --slices-of (default: the pod's own account)"
    parser.add_argument("--kubeconfig", type=Path, metavar="FILE", help=text)
    text = "remove although pods have devices, or that is not known, or it is another instance's"
    parser.add_argument("--force", action="store_true", help=text)
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


def _published(kubeconfig: Path | None, node_name: str) -> Published:
    from agent.cluster.apiserver import ApiServer
    from agent.operator.uninstall import Published

    api = ApiServer.from_kubeconfig(kubeconfig) if kubeconfig is not None else ApiServer.in_cluster(os.environ)
    return Published(api, node_name)


def _uninstall(options: argparse.Namespace) -> int:
    from agent.operator.uninstall import Folders, uninstall

    if not options.root.is_dir():  # "there was nothing" would be taken for a clean host
        raise ConfigError(str(options.root), ["is no folder: name the one where the host's own / is with --root"])
    named = {field: vars(options)[field] for _, field, *_ in OPTIONS if field != "instance"}
    folders = Folders(**named, boot_id=_boot_id(options.root))
    published = _published(options.kubeconfig, options.slices_of) if options.slices_of else None
    try:
        removed = uninstall(folders, instance=options.instance, force=options.force, published=published)
    finally:
        if published is not None:
            published.api.close()
    show(options, {"removed": removed}, joined(f"removed {what}" for what in removed) or "there was nothing")
    return DONE
