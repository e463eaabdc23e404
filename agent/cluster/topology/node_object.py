"""What this agent says on the Node object itself: labels, and the load of the ports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from agent.cluster.apiserver import NODE
from agent.cluster.bandwidth import Bandwidth
from agent.cluster.topology.labels import Known, Seen, fabric_nics, labels
from agent.cluster.topology.lldp import LeafListener
from agent.cluster.topology.publisher import Publication
from agent.cluster.topology.view import View
from agent.errors import AgentError, Refused, Unavailable

MAX_LINE = 256

log = logging.getLogger(__name__)


class NodeLabels:
    """Makes the node's labels, for the Node object or for node-feature-discovery."""

    def __init__(self, view: View, leaf: LeafListener) -> None:
        self._view = view
        self._leaf = leaf
        self._made: Mapping[str, str] = {}
        """The labels that were made last: newer than what is known of the Node, which is read seldom."""
        self._seen: dict[str, Seen] = {}
        """The adapters to the fabric so far, by address."""

    async def make(self, kept: Mapping[str, str]) -> dict[str, str]:
        """Make the labels; `kept` are the present ones, for facts that are not known now."""
        config, snapshot, host_names = self._view.config, self._view.snapshot, self._view.host_names()
        named = config.lldp_netdevs
        rails = self._view.node.offer.value.rail_keys
        nics = fabric_nics(snapshot, named, host_names, self._seen, rails)
        for nic in nics:
            names = [netdev.name for netdev in nic.netdevs if netdev.name in named] or [host_names.get(nic.address, "")]
            if nic.netdevs if named else nic.rdma_devices:
                self._seen[nic.address] = Seen(nic.driver, names[0])
        known = Known(self._view.name, snapshot, nics, self._leaf.at, self._first_line, rails)
        self._made = await asyncio.to_thread(labels, config.labels.keys, known, {**kept, **self._made})
        return dict(self._made)

    def _first_line(self, path: Path) -> str | None:
        try:
            with (self._view.root / path.relative_to("/")).open("rb") as file:
                return file.readline(MAX_LINE).decode("utf-8", "replace").strip() or None
        except OSError as error:
            log.debug("no label from %s: %s", path, error.strerror)
            return None


class NodeObject(Publication):
    """Labels and annotation on the Node, which is not ours alone.

    Also without labels or annotation of its own: what an earlier configuration put there is taken back.
    """

    kind = NODE
    takes_over = False
    is_local = False
    is_of_facts = True

    def __init__(self, view: View, labels: NodeLabels, bandwidth: Bandwidth) -> None:
        self._view = view
        self._labels = labels
        self._bandwidth = bandwidth
        self._takes_back = True

    async def content(self) -> Mapping[str, Any] | None:
        """Build the object; None if there is nothing to say, and nothing of ours on it to take back.

        Raises Unavailable as long as the Node could not be read: what is on it must be known to be kept.
        """
        config, node = self._view.config, self._view.own_node
        if not self._takes_back or node is None:
            return None
        present = await node.read()
        if present is None:
            if not config.writes_node:
                return None
            raise Unavailable(node.problem)
        metadata: dict[str, Any] = {"name": self._view.name}
        if config.labels.to == "node":
            metadata["labels"] = await self._labels.make(present.labels)
        key = config.bandwidth.annotation
        load = self._bandwidth.annotation(present.annotations.get(key)) if key is not None else None
        if key is not None and load is not None:
            metadata["annotations"] = {key: load}
        metadata = {name: value for name, value in metadata.items() if value}
        if len(metadata) == 1 and not present.labels and not present.annotations:
            return None
        return {"apiVersion": NODE.api_version, "kind": NODE.kind, "metadata": metadata}

    def yields(self, error: AgentError) -> bool:
        """Leave on the Node what is wanted no more where the right to write it went with what was wanted."""
        if isinstance(error, Refused) and error.status == HTTPStatus.FORBIDDEN and not self._view.config.writes_node:
            self._takes_back = False
            log.warning("what an earlier configuration put on the Node stays there: %s", error)
            return True
        return False
