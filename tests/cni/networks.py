"""Networks as tests write them: those of the agent's configuration, and what a pod has before our plugin is called."""

from __future__ import annotations

from typing import Any

from agent.config.networks import network_of_keys as network

PREVIOUS: dict[str, Any] = {
    "cniVersion": "1.0.0",
    "interfaces": [{"name": "cbr0"}, {"name": "eth0", "sandbox": "/x"}],
    "ips": [{"interface": 1, "address": "10.244.0.5/24"}],
    "dns": {"nameservers": ["10.96.0.10"]},
}
"""What the cluster's network has answered about a pod."""

__all__ = ("PREVIOUS", "network")
