"""The sections of a few keys each: `endpoints`, `health`, `cni`, `restart`. A key is one line here."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic.json_schema import SkipJsonSchema

from agent.config.section import LIST, Flag, Many, Section, choice, seconds, string, value, whole
from agent.model.device import is_pci_address
from agent.model.device_health import EVERY_XID, QUIET_SECONDS, GpuPolicy
from agent.model.health import Reason
from agent.model.pf_selector import word

READERS = ("node", "everywhere")
LINK_POLICIES = ("follow", "ignore")
EVICTING = tuple(
    reason.value
    for reason in (
        *(Reason.DEVICE_GONE, Reason.LINK_DOWN, Reason.PORT_DOWN, Reason.PARENT_DOWN, Reason.NO_DRIVER),
        *(Reason.WRONG_DRIVER, Reason.NO_RDMA_DEVICE, Reason.NO_CHAR_DEVICE, Reason.NO_IOMMU_GROUP),
        *(Reason.QUARANTINED, Reason.HELD),
    )
)
"""Reasons of network devices: those of the agent as a whole would evict every pod at once."""
MAX_XID = 1_000_000
MAX_WAIT_SECONDS = 5.0
"""With the time to reach the API server, and to stop, that is below the pod's terminationGracePeriodSeconds of 10."""


def _ip_address(text: str) -> str:
    ipaddress.ip_address(text)
    return text


def _xid(given: Any) -> int:
    if given == "all":
        return EVERY_XID
    if type(given) is not int or not 0 <= given <= MAX_XID:
        raise ValueError
    return given


def adapter(text: str) -> str:
    """Read an interface's name or a PCI address."""
    return text.lower() if is_pci_address(text.lower()) else word(text)


def each_once(words: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out words that stand in a list twice."""
    return tuple(dict.fromkeys(words))


_XID = value(
    "a GPU error number (XID), or all",
    _xid,
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_XID}, {"const": "all"}]},
)
Xids = Annotated[frozenset[Annotated[int, _XID]], LIST]


@dataclass(frozen=True, slots=True)
class Endpoints(Section):
    """Where the agent answers HTTP: metrics, health, status."""

    address: Annotated[str, string("an IP address", _ip_address)] = "127.0.0.1"
    """IP address of /metrics, /healthz, /readyz, /status and the page"""
    port: Annotated[int, whole(0, 65535)] = 9808
    """Port of the endpoints; 0 takes a free one"""
    status: Annotated[str, choice(*READERS)] = "node"
    """Who may read /status and the page"""
    exporter_names: Flag = False
    """Metrics of VFs also under the names of sriov-network-metrics-exporter"""


@dataclass(frozen=True, slots=True)
class HealthSettings(Section):
    """How long a device must be down or up before kubelet is told, and which GPU errors say nothing."""

    # Hard faults are told at once.
    down_seconds: Annotated[float, seconds(0, 3600)] = 2.0
    """A link down for this long makes its devices unhealthy"""
    up_seconds: Annotated[float, seconds(0, 3600)] = 5.0
    """A device well again for this long is offered as healthy"""
    gone_seconds: Annotated[float, seconds(0, 86400)] = 300.0
    """A vanished device stays listed, as unhealthy, this long"""
    link: Annotated[str, choice(*LINK_POLICIES)] = "follow"
    """Whether the link of a PF makes its VFs unhealthy"""
    # Besides those that applications cause; may hold EVERY_XID.
    ignored_xids: Xids = frozenset()
    """GPU errors that leave a GPU healthy, or all"""
    # Whatever is usual; may hold EVERY_XID.
    fatal_xids: Xids = frozenset()
    """GPU errors that make a GPU unhealthy until it is reset, or all"""
    xid_quiet_seconds: SkipJsonSchema[float] = QUIET_SECONDS
    """A GPU error that may be over keeps a GPU unhealthy this long."""
    # For resources with `offer: dra`; pods that are served through extended resources are left alone.
    evict: Annotated[Many[Annotated[str, choice(*EVICTING)]], AfterValidator(each_once)] = ()
    """Reasons for which Kubernetes deletes pods whose claims have the device; default: none"""

    @property
    def gpu_policy(self) -> GpuPolicy:
        """What they say about GPU errors."""
        return GpuPolicy(self.ignored_xids, self.fatal_xids, self.xid_quiet_seconds)


@dataclass(frozen=True, slots=True)
class CniSettings(Section):
    """What network configurations may name: whoever writes one could otherwise take any device of the node."""

    require_grant: Flag = True
    """Devices of a resource come only into the pod that kubelet gave them to"""
    protect: Many[Annotated[str, string("an interface name or a PCI address", adapter)]] = ()
    """Adapters that no pod gets, by interface or PCI address"""


@dataclass(frozen=True, slots=True)
class Restart(Section):
    """What the agent does about a restart of its own that is planned."""

    # So that no pod is placed there until kubelet has the lists again.
    taint: Flag = False
    """Taint the own Node while the agent restarts (nodefabric.io/agent-not-ready:NoSchedule)"""
    # So long do pods have that were placed before.
    wait_seconds: Annotated[float, seconds(0, MAX_WAIT_SECONDS)] = 2.0
    """Between the taint and the agent's end"""
