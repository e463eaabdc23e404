"""The sections of a few keys each: `endpoints`, `health`, `cni`, `restart`. A key is one line here."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any

from agent.config import declare
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
_XID = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_XID}, {"const": "all"}]}
_XID_WANTED = "a GPU error number (XID), or all"
MAX_WAIT_SECONDS = 5.0
"""With the time to reach the API server, and to stop, that is below the pod's terminationGracePeriodSeconds of 10."""


def _is_ip_address(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(ipaddress.ip_address(value))
    except ValueError:
        return False


def _xid(value: Any) -> int:
    if value == "all":
        return EVERY_XID
    if type(value) is not int or not 0 <= value <= MAX_XID:
        raise ValueError(value)
    return value


def _adapter(text: str) -> str:
    return text.lower() if is_pci_address(text.lower()) else word(text)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the agent answers HTTP: metrics, health, status."""

    address: str = declare.value(
        "127.0.0.1",
        "an IP address",
        _is_ip_address,
        schema={"type": "string"},
        about="IP address of /metrics, /healthz, /readyz, /status and the page",
    )
    port: int = declare.whole(9808, 0, 65535, about="Port of the endpoints; 0 takes a free one")
    status: str = declare.choice(
        "node",
        READERS,
        about="From where /status and the page are read; /metrics and the probes are for all who reach the address",
    )
    exporter_names: bool = declare.flag(
        False, about="Give metrics of VFs under the names of sriov-network-metrics-exporter too"
    )


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """How long a device must be down or up before kubelet is told, and which GPU errors say nothing."""

    down_seconds: float = declare.seconds(2.0, 0, 3600, about="A link down for this long makes its devices unhealthy")
    """Hard faults are told at once."""
    up_seconds: float = declare.seconds(5.0, 0, 3600, about="A device well again for this long is offered as healthy")
    gone_seconds: float = declare.seconds(
        300.0, 0, 86400, about="A vanished device stays listed, as unhealthy, this long"
    )
    link: str = declare.choice("follow", LINK_POLICIES, about="Whether the link of a PF makes its VFs unhealthy")
    ignored_xids: frozenset[int] = declare.entries(
        _XID_WANTED, _xid, schema=_XID, about="GPU errors that leave a GPU healthy, or all"
    )
    """Besides those that applications cause; may hold EVERY_XID."""
    fatal_xids: frozenset[int] = declare.entries(
        _XID_WANTED, _xid, schema=_XID, about="GPU errors that make a GPU unhealthy until it is reset, or all"
    )
    """Whatever is usual; may hold EVERY_XID."""
    xid_quiet_seconds: float = declare.seconds(
        QUIET_SECONDS, 0, 86400, about="A GPU error that may be over keeps a GPU unhealthy this long"
    )

    evict: tuple[str, ...] = declare.words(
        EVICTING, about="Reasons for which Kubernetes deletes the pods whose claims have the device; default: none"
    )
    """For resources with `offer: dra`; pods that are served through extended resources are left alone."""

    @property
    def gpu_policy(self) -> GpuPolicy:
        """What they say about GPU errors."""
        return GpuPolicy(self.ignored_xids, self.fatal_xids, self.xid_quiet_seconds)


@dataclass(frozen=True, slots=True)
class CniSettings:
    """What network configurations may name: whoever writes one could otherwise take any device of the node."""

    require_grant: bool = declare.flag(
        True,
        about="Devices that a resource offers come only into the pod that kubelet gave them, whatever a network names",
    )
    protect: tuple[str, ...] = declare.strings(
        "an interface name or a PCI address",
        _adapter,
        about="Adapters by interface or PCI address that never come into a pod, nor carry a pod's interface",
    )


@dataclass(frozen=True, slots=True)
class Restart:
    """What the agent does about a restart of its own that is planned."""

    taint: bool = declare.flag(
        False, about="Taint the own Node while the agent restarts (nodefabric.io/agent-not-ready:NoSchedule)"
    )
    """So that no pod is placed there until kubelet has the lists again."""
    wait_seconds: float = declare.seconds(2.0, 0, MAX_WAIT_SECONDS, about="Between the taint and the agent's end")
    """So long do pods have that were placed before."""
