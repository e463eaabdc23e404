"""Where the agent answers HTTP: metrics, health, status."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any

from agent.config.reader import Reader

READERS = ("node", "everywhere")


@dataclass(frozen=True, slots=True)
class Endpoints:
    address: str = "127.0.0.1"
    port: int = 9808
    status: str = "node"
    """Who may read the status and the page: those on the node itself (`node`), or all who reach the address."""
    exporter_names: bool = False
    """Tell what VFs did under the names of sriov-network-metrics-exporter too."""


def read_endpoints(reader: Reader) -> Endpoints:
    """Read the section `endpoints`."""
    plain = Endpoints()
    return Endpoints(
        address=reader.take(
            "address",
            plain.address,
            "an IP address",
            _is_ip_address,
            schema={"type": "string"},
            about="IP address of /metrics, /healthz, /readyz, /status and the page",
        ),
        port=reader.whole("port", plain.port, 0, 65535, about="Port of the endpoints; 0 takes a free one"),
        status=reader.choice(
            "status",
            plain.status,
            READERS,
            about="From where /status and the page are read; /metrics and the probes are for all who reach the address",
        ),
        exporter_names=reader.flag(
            "exporterNames",
            plain.exporter_names,
            about="Give metrics of VFs under the names of sriov-network-metrics-exporter too",
        ),
    )


def _is_ip_address(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(ipaddress.ip_address(value))
    except ValueError:
        return False
