"""How long a device must be down or up before kubelet is told, and which GPU errors say nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agent.config.reader import Reader
from agent.model.gpu_health import EVERY_XID, QUIET_SECONDS, GpuPolicy

MAX_XID = 1_000_000
LINK_POLICIES = ("follow", "ignore")


@dataclass(frozen=True, slots=True)
class HealthSettings:
    down_seconds: float = 2.0
    """How long a link must be down before its devices are offered as unhealthy. Hard faults are told at once."""
    up_seconds: float = 5.0
    """How long a device must be found well again before it is offered as healthy."""
    gone_seconds: float = 300.0
    """How long a device that vanished stays in the list, as unhealthy."""
    link: str = "follow"
    """follow: VFs are unhealthy while their PF has no link; ignore: a link says nothing."""
    ignored_xids: frozenset[int] = frozenset()
    """GPU errors (XIDs) that leave a GPU healthy, besides those that applications cause; may hold EVERY_XID."""
    fatal_xids: frozenset[int] = frozenset()
    """GPU errors that make a GPU unhealthy until it was reset, whatever is usual; may hold EVERY_XID."""
    xid_quiet_seconds: float = QUIET_SECONDS
    """How long a GPU error that may be over keeps a GPU unhealthy after it last happened."""

    @property
    def gpu_policy(self) -> GpuPolicy:
        """What they say about GPU errors."""
        return GpuPolicy(self.ignored_xids, self.fatal_xids, self.xid_quiet_seconds)


def read_health(reader: Reader) -> HealthSettings:
    """Read the section `health`."""
    plain = HealthSettings()
    return HealthSettings(
        down_seconds=reader.seconds(
            "downSeconds", plain.down_seconds, 0, 3600, about="A link down for this long makes its devices unhealthy"
        ),
        up_seconds=reader.seconds(
            "upSeconds", plain.up_seconds, 0, 3600, about="A device well again for this long is offered as healthy"
        ),
        gone_seconds=reader.seconds(
            "goneSeconds", plain.gone_seconds, 0, 86400, about="A vanished device stays listed, as unhealthy, this long"
        ),
        link=reader.choice("link", plain.link, LINK_POLICIES, about="Whether the link of a PF makes its VFs unhealthy"),
        ignored_xids=_xids(reader, "ignoredXids", "GPU errors that leave a GPU healthy, or all"),
        fatal_xids=_xids(reader, "fatalXids", "GPU errors that make a GPU unhealthy until it is reset, or all"),
        xid_quiet_seconds=reader.seconds(
            "xidQuietSeconds",
            plain.xid_quiet_seconds,
            0,
            86400,
            about="A GPU error that may be over keeps a GPU unhealthy this long",
        ),
    )


def _xids(reader: Reader, key: str, about: str) -> frozenset[int]:
    number = {"type": "integer", "minimum": 0, "maximum": MAX_XID}
    return frozenset(
        reader.entries(
            key, "a GPU error number (XID), or all", _xid, schema={"anyOf": [number, {"const": "all"}]}, about=about
        )
    )


def _xid(value: Any) -> int:
    if value == "all":
        return EVERY_XID
    if type(value) is not int or not 0 <= value <= MAX_XID:
        raise ValueError(value)
    return value
