"""`nodefabric doctor`: what on this node would keep pods from working, and what to do."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path

from agent import config as configuration
from agent.commands.options import (
    DONE,
    FINDINGS,
    Command,
    add_config,
    add_hardware,
    add_output,
    open_looked_at,
    show,
)
from agent.errors import ConfigError


def add(command: Command) -> None:
    """Add the command."""
    parser = command("doctor", _doctor, "check this node, and say what to do about each finding")
    add_config(parser)
    add_hardware(parser)
    add_output(parser)


def _kubelet_version() -> str:
    """Ask the API server with the pod's account; who is not in a pod has none."""
    from agent.cluster.apiserver import ApiServer
    from agent.cluster.claim_objects import kubelet_version
    from agent.process.identity import node_name

    try:
        api = ApiServer.in_cluster(os.environ)
    except ConfigError:
        return ""
    with contextlib.closing(api):
        return kubelet_version(api, node_name())


def _doctor(options: argparse.Namespace) -> int:
    from agent.hardware.adapter_ids import with_adapter_ids
    from agent.hardware.sysfs.scan import with_nccl_topology
    from agent.report.doctor import examine, facts
    from agent.report.doctor.collect import collect

    config, problems = None, tuple[str, ...]()
    try:
        config = configuration.load(options.config)
    except ConfigError as error:
        problems = tuple(error.problems)
    with open_looked_at(options) as host:
        root = Path(host.root)
        is_here = options.root == Path("/") and options.node is None
        version = _kubelet_version() if config is not None and config.offers_dra and is_here else ""
        file = config.placement.topology_file if config is not None else None
        snapshot = with_nccl_topology(with_adapter_ids(host.scan(), host.root), file)
        looked = collect(root, snapshot, config, options.config, problems, ask_agent=is_here, kubelet_version=version)
        found = examine(looked)
    show(options, facts.as_document(found), facts.as_text(found))
    return DONE if facts.is_sound(found) else FINDINGS
