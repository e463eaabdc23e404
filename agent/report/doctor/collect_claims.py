"""Collects what claims need on this node: the driver's folders and sockets, and what the agent tells of them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.config import Config, Endpoints
from agent.errors import Unavailable
from agent.process import sockets
from agent.report.doctor import looking
from agent.report.doctor.claim_facts import ClaimFacts, ClusterFacts, HeldClaim
from agent.report.dra import DriverState

MOST_STATUS_BYTES = 64 << 20
ANSWER_SECONDS = 5.0


def collect(root: Path, config: Config, cluster: ClusterFacts, *, ask_agent: bool) -> ClaimFacts:
    """Look at the driver's folders and sockets below `root`, and ask the agent. Never raises."""
    plugins = looking.below(root, config.kubelet_dir)
    registry, own = plugins / "plugins_registry", plugins / "plugins" / config.dra.driver
    found = sorted(registry.glob(f"{config.dra.driver}-*-reg.sock"))
    folders = (registry, own) if own.exists() else (registry,)  # the agent makes its own
    document = _ask(config.endpoints) if ask_agent else {}
    return ClaimFacts(
        now=time.time(),
        folders=tuple((str(path), looking.unusable(path)) for path in folders),
        sockets=tuple((str(path), looking.listens(path)) for path in found),
        state=_state(document.get("dra")),
        claims=tuple(
            HeldClaim(f"{c['namespace']}/{c['name']}", c["state"], c["since"], tuple(c["pods"]))
            for c in document.get("claims", ())
        ),
        cluster=cluster,
    )


def _ask(endpoints: Endpoints) -> Mapping[str, Any]:
    """Ask the agent for its status document; empty if it does not answer."""
    host = f"[{endpoints.address}]" if ":" in endpoints.address else endpoints.address
    try:
        with sockets.get(f"http://{host}:{endpoints.port}/status", ANSWER_SECONDS) as answer:
            document = json.loads(answer.read(MOST_STATUS_BYTES))
    except (OSError, ValueError, Unavailable):
        return {}
    return document if isinstance(document, dict) else {}


def _state(told: Mapping[str, Any] | None) -> DriverState | None:
    if told is None:
        return None
    devices = tuple((found["resource"], found["health"], found["count"]) for found in told["devices"])
    return DriverState(told["driver"], told["problem"] or "", told["slices"], frozenset(told["dropped"]), devices)
