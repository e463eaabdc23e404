"""Where the agent answers HTTP: metrics, health, status."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any

from agent.config.reader import Reader


@dataclass(frozen=True, slots=True)
class Endpoints:
    address: str = "127.0.0.1"
    port: int = 9808


def read_endpoints(reader: Reader) -> Endpoints:
    """Read the section `endpoints`."""
    plain = Endpoints()
    return Endpoints(
        address=reader.take(
            "address", plain.address, "an IP address", _is_ip_address, about="Address of /metrics, /healthz, /status …"
        ),
        port=reader.whole("port", plain.port, 0, 65535, about="Port of the endpoints; 0 takes a free one"),
    )


def _is_ip_address(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(ipaddress.ip_address(value))
    except ValueError:
        return False
