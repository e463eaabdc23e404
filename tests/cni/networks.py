"""Networks as tests write them: those of the agent's configuration, and what a pod has before our plugin is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent.config.networks import Network, network_of_keys

PREVIOUS: dict[str, Any] = {
    "cniVersion": "1.0.0",
    "interfaces": [{"name": "cbr0"}, {"name": "eth0", "sandbox": "/x"}],
    "ips": [{"interface": 1, "address": "10.244.0.5/24"}],
    "dns": {"nameservers": ["10.96.0.10"]},
}
"""What the cluster's network has answered about a pod."""


def network(keys: Mapping[str, Any]) -> Network:
    """Read an entry of `networks`."""
    return network_of_keys(keys)
