"""What this agent says on the Node object itself: labels, and the load of the ports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agent.clients.apiserver import NODE
from agent.config.topology import Topology
from agent.errors import Unavailable
from agent.model.device import Snapshot
from agent.model.lldp import Neighbour
from agent.topology.labels import NO_NAMES, Known, Seen, fabric_nics, labels
from agent.topology.own_node import OwnNode

MAX_LINE = 256

log = logging.getLogger(__name__)


class NodeObject:
    """Makes the labels, and the object that is applied with them."""

    def __init__(
        self,
        config: Topology,
        name: str,
        root: Path,
        snapshot: Callable[[], Snapshot],
        neighbour: Callable[[str], Neighbour | None],
        load: Callable[[str | None], str | None],
        host_names: Callable[[], Mapping[str, str]] = lambda: NO_NAMES,
    ) -> None:
        """`neighbour` tells what switch port an adapter ends at; `load` what the annotation says, given what it says
        now; `host_names` what the interfaces of adapters that are in pods are called in the host."""
        self._config = config
        self._name = name
        self._root = root
        self._snapshot = snapshot
        self._neighbour = neighbour
        self._load = load
        self._host_names = host_names
        self._made: Mapping[str, str] = {}
        """The labels that were made last: newer than what is known of the Node, which is read seldom."""
        self._seen: dict[str, Seen] = {}
        """The adapters to the fabric so far, by address."""

    async def build(self, node: OwnNode) -> Mapping[str, Any] | None:
        """Build the object; None if there is nothing to say, and nothing of ours on it to take back.

        Raises Unavailable as long as the Node could not be read: what is on it must be known to be kept.
        """
        present = await node.read()
        if present is None:
            if not self._config.writes_node:
                return None
            raise Unavailable(node.problem)
        metadata: dict[str, Any] = {"name": self._name}
        if self._config.labels.to == "node":
            metadata["labels"] = await self.labels(present.labels)
        key = self._config.bandwidth.annotation
        load = self._load(present.annotations.get(key)) if key is not None else None
        if key is not None and load is not None:
            metadata["annotations"] = {key: load}
        metadata = {name: value for name, value in metadata.items() if value}
        if len(metadata) == 1 and not present.labels and not present.annotations:
            return None
        return {"apiVersion": NODE.api_version, "kind": NODE.kind, "metadata": metadata}

    async def labels(self, kept: Mapping[str, str]) -> dict[str, str]:
        """Make the labels; `kept` are the present ones, for facts that are not known now."""
        snapshot, named, host_names = self._snapshot(), self._config.lldp_netdevs, self._host_names()
        nics = fabric_nics(snapshot, named, host_names, self._seen)
        for nic in nics:
            names = [netdev.name for netdev in nic.netdevs if netdev.name in named] or [host_names.get(nic.address, "")]
            if nic.netdevs if named else nic.rdma_devices:
                self._seen[nic.address] = Seen(nic.driver, names[0])
        known = Known(self._name, snapshot, nics, self._neighbour, self._first_line)
        self._made = await asyncio.to_thread(labels, self._config.labels.keys, known, {**kept, **self._made})
        return dict(self._made)

    def _first_line(self, path: Path) -> str | None:
        try:
            with (self._root / path.relative_to("/")).open("rb") as file:
                return file.readline(MAX_LINE).decode("utf-8", "replace").strip() or None
        except OSError as error:
            log.debug("no label from %s: %s", path, error.strerror)
            return None
