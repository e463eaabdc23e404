"""How long a device must be down or up before kubelet is told, and which GPU errors say nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agent.config.reader import Reader


@dataclass(frozen=True, slots=True)
class HealthSettings:
    down_seconds: float = 0.0
    """How long a device must be found ill before it is offered as unhealthy."""
    up_seconds: float = 0.0
    """How long a device must be found well again before it is offered as healthy."""
    ignored_xids: frozenset[int] = frozenset()
    """GPU errors (XIDs) that leave a GPU healthy, besides those that applications cause."""


def read_health(reader: Reader) -> HealthSettings:
    """Read the section `health`."""
    plain = HealthSettings()
    return HealthSettings(
        down_seconds=reader.seconds(
            "downSeconds", plain.down_seconds, 0, 3600, about="A device ill for this long is offered as unhealthy"
        ),
        up_seconds=reader.seconds(
            "upSeconds", plain.up_seconds, 0, 3600, about="A device well again for this long is offered as healthy"
        ),
        ignored_xids=frozenset(
            reader.entries(
                "ignoredXids",
                "a GPU error number (XID)",
                _xid,
                schema={"type": "integer", "minimum": 0},
                about="GPU errors that leave a GPU healthy",
            )
        ),
    )


def _xid(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= 1_000_000:
        raise ValueError(value)
    return value
