"""What of this node's topology is published for schedulers, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agent.config.reader import Reader


@dataclass(frozen=True, slots=True)
class Topology:
    publish: bool = False
    """Publish a NodeResourceTopology object for this node."""
    coalesce_seconds: float = 2.0
    heartbeat_seconds: float = 600.0
    start_spread_seconds: float = 30.0
    """The first write comes at a random moment within this time, so that a cluster's nodes do not write at once."""
    kubelet_config: Path = Path("/var/lib/kubelet/config.yaml")


def read_topology(reader: Reader) -> Topology:
    """Read the section `topology`."""
    plain = Topology()
    return Topology(
        publish=reader.flag("publish", plain.publish, about="Publish a NodeResourceTopology object for this node"),
        coalesce_seconds=reader.seconds(
            "coalesceSeconds", plain.coalesce_seconds, 0, 60, about="Changes within this time make one write"
        ),
        heartbeat_seconds=reader.seconds(
            "heartbeatSeconds", plain.heartbeat_seconds, 10, 86400, about="Write at least this often"
        ),
        start_spread_seconds=reader.seconds(
            "startSpreadSeconds",
            plain.start_spread_seconds,
            0,
            600,
            about="The first write comes at a random moment within this time",
        ),
        kubelet_config=reader.path_to(
            "kubeletConfig", plain.kubelet_config, about="The kubelet's configuration, to read its topology policy from"
        ),
    )
