"""Options that name the files of a configuration."""

from __future__ import annotations

import argparse
from pathlib import Path

from agent.commands.options import DEFAULT_CONFIG
from agent.config import Flags
from agent.config.compat_sriov import DEFAULT_PREFIX
from agent.config.sources import Sources
from agent.errors import ConfigError


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Add the options for configurations of device plugins that the agent stands in for."""
    sriov, shared = "sriov-network-device-plugin", "k8s-rdma-shared-dev-plugin"
    others = parser.add_argument_group("configurations of other device plugins, besides our own or alone")
    others.add_argument("--sriov-config", type=Path, metavar="FILE", help=f"of {sriov}: /etc/pcidp/config.json")
    text = f"of {shared}: /k8s-rdma-shared-dev-plugin/config.json"
    others.add_argument("--rdma-shared-config", type=Path, metavar="FILE", help=text)
    text = f"prefix of {sriov}'s resources that name none (default: %(default)s)"
    others.add_argument("--resource-prefix", default=DEFAULT_PREFIX, metavar="PREFIX", help=text)
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
