"""The sections of a few keys each: `endpoints`, `health`, `cni`, `restart`, `dra`, `placement`."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic.json_schema import SkipJsonSchema

from agent.config.resources import RESOURCE_NAME
from agent.config.routing import KEYS as ROUTING_KEYS
from agent.config.section import (
    FOLDER,
    LIST,
    Flag,
    Many,
    Once,
    Refusal,
    Section,
    choice,
    matching,
    seconds,
    string,
    value,
    whole,
)
from agent.model.device import is_pci_address
from agent.model.device_health import EVERY_XID, QUIET_SECONDS, GpuPolicy
from agent.model.gpu_ids import GpuIds, fields
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


def _xid(given: Any) -> int:
    if given == "all":
        return EVERY_XID
    if type(given) is not int or not 0 <= given <= MAX_XID:
        raise ValueError
    return given


def adapter(text: str) -> str:
    """Read an interface's name or a PCI address."""
    return text.lower() if is_pci_address(text.lower()) else word(text)


_XID = value(
    "a GPU error number (XID), or all",
    _xid,
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_XID}, {"const": "all"}]},
)
Xids = Annotated[frozenset[Annotated[int, _XID]], LIST]


@dataclass(frozen=True, slots=True)
class Endpoints(Section):
    """Where the agent answers HTTP: metrics, health, status."""

    address: Annotated[str, string("an IP address", lambda text: ipaddress.ip_address(text) and text)] = "127.0.0.1"
    """IP address of /metrics, /healthz, /readyz, /status and the page"""
    port: Annotated[int, whole(0, 65535)] = 9808
    """Port of the endpoints; 0 takes a free one"""
    status: Annotated[str, choice(*READERS)] = "node"
    """Who may read /status and the page"""
    exporter_names: Flag = False
    """Metrics of VFs also under the names of sriov-network-metrics-exporter"""

    def url(self, path: str) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}/{path}"


@dataclass(frozen=True, slots=True)
class HealthSettings(Section):
    """How long a device must be down or up before kubelet hears of it, and which GPU errors count."""

    # Hard faults are reported at once.
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
    evict: Once[Annotated[str, choice(*EVICTING)]] = ()
    """Reasons, such as DeviceGone, for which Kubernetes deletes pods whose claims have the device"""

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


# --------------------------------------------------------------------------------------------------------------- dra


DRIVER = "nodefabric.io"
STANDARD = "resource.kubernetes.io"
SHARES = ("capacity", "devices")
ALIASED = ("uuid", "pciBusID", "numaNode")
"""What an alias can tell, by the second half of its name: UUID or PCI address of the nearest GPU, or the NUMA node."""
NEAR_ADDRESS = f"{STANDARD}/pciBusID"
"""The one standard attribute that may be an alias: only places carry it, which have no address of their own."""
SAFE_KEYS = ("ifName", "mtu", "addresses", *ROUTING_KEYS)
"""What concerns the pod alone."""
CLAIM_KEYS = (
    *SAFE_KEYS,
    *("network", "mode", "ipam", "master", "rdma", "pkey", "mac", "guid", "vlan", "vlanQoS", "vlanProto", "trunk"),
    *("min_tx_rate", "max_tx_rate", "spoofchk", "trust", "link_state", "altNames", "macvlanMode", "vfio"),
    *("ipvlanMode", "functionReset"),
)
"""All that the parameters of a class may say; those of a claim only what `claimMay` lists."""
_LABEL = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_DOMAIN = rf"(?=[a-z0-9.-]{{1,63}}(?:/|$)){_LABEL}(?:\.{_LABEL})*"
_ALIAS = re.compile(rf"({_DOMAIN})/([A-Za-z_][A-Za-z0-9_]{{0,31}})")


def _alias(text: str) -> str:
    """Read the name of another driver's attribute."""
    found = _ALIAS.fullmatch(text)
    if not found or found[2] not in ALIASED or (found[1] == STANDARD and text != NEAR_ADDRESS):
        raise ValueError(text)
    return text


_ALIAS_WANTED = (
    f"an attribute of another driver, domain/name, with the name {' or '.join(ALIASED)}; of {STANDARD} only pciBusID"
)


@dataclass(frozen=True, slots=True)
class Dra(Section):
    """How the resources with `offer: dra` are offered."""

    driver: Annotated[
        str, matching("a domain of at most 63 characters, such as nodefabric.io", re.compile(_DOMAIN))
    ] = DRIVER
    """The driver's name in slices and classes"""
    aliases: Many[Annotated[str, string(_ALIAS_WANTED, _alias)]] = ("gpu.nvidia.com/uuid", NEAR_ADDRESS)
    """Attributes of other drivers that our devices carry too, for constraints: uuid or pciBusID (late only) of the
    nearest GPU, numaNode; default: gpu.nvidia.com/uuid and resource.kubernetes.io/pciBusID"""
    list_attributes: Flag = False
    """Publish all nearest GPUs of a shared adapter; needs the gate DRAListTypeAttributes"""
    metadata: Flag = False
    """Give containers files that describe their devices (KEP-5304)"""
    claim_may: Once[Annotated[str, choice(*CLAIM_KEYS)]] = SAFE_KEYS
    """Keys that a claim's parameters may set (a class may set all; never addresses where the network has ipam);
    default: ifName, mtu, addresses and the keys of routing"""
    shares: Annotated[str, choice(*SHARES)] = "capacity"
    """How shares and late-bound units are published: as capacity (Kubernetes 1.36), or a device each"""

    def contradictions(self) -> Iterator[Refusal]:
        for alias in self.aliases:
            if alias.partition("/")[0] == self.driver:
                text = f"{alias} is in the driver's own domain, whose attributes are there anyway"
                yield Refusal(("aliases",), text)


# --------------------------------------------------------------------------------------------------------- placement


MAX_PATTERN = 200
_NESTED = re.compile(r"\((?:\\.|[^()\\])*(?<!\\)[*+}](?:\\.|[^()\\])*\)[*+{]")
"""A repeated group with a repetition in it, such as (a+)+: one ID may take it years."""
_RESOURCE = re.compile(rf"{RESOURCE_NAME.pattern}|[A-Za-z0-9.*/_-]*\*[A-Za-z0-9.*/_-]*")
_GPU = re.compile(r"[^{}]*(?:\{\w+\}[^{}]*)+")

_USUAL = "{pci}"


def _pattern(given: str) -> str:
    if len(given) > MAX_PATTERN or _NESTED.search(given):
        raise ValueError
    try:
        is_fine = re.compile(given).groups > 0
    except (re.error, OverflowError, RecursionError):
        is_fine = False
    if not is_fine:
        raise ValueError
    return given


@dataclass(frozen=True, slots=True)
class GpuNames(Section, GpuIds):
    """What a device plugin that the agent does not know calls its GPUs."""

    resource: Annotated[str, matching("domain/name, such as example.com/npu; * stands for anything", _RESOURCE)]
    """The resource of the GPUs; * stands for anything"""
    pattern: Annotated[
        str,
        string(
            "a regular expression with named groups, such as npu-(?P<pci>.+), of at most"
            f" {MAX_PATTERN} characters, without a repetition in a repeated group",
            _pattern,
        ),
    ]
    """Regular expression of a whole device ID, with named groups"""
    gpu: Annotated[str, matching("text with groups of the pattern in braces, such as accel{number}", _GPU)] = _USUAL
    """PCI address, or name of the driver (card0, accel3), made of the groups"""

    def contradictions(self) -> Iterator[Refusal]:
        unknown = sorted(fields(self.gpu) - set(re.compile(self.pattern).groupindex))
        if unknown:
            where = "pattern" if self.gpu == _USUAL else "gpu"
            yield Refusal((where,), f"has no group {unknown[0]}: name it (?P<{unknown[0]}>…)")


@dataclass(frozen=True, slots=True)
class Placement(Section):
    """What placement is to know besides what it finds out."""

    gpu_ids: Many[GpuNames] = ()
    """Device IDs of GPU plugins that the agent does not know"""
    topology_file: Annotated[Path | None, FOLDER] = None
    """NCCL's topology file, for hosts whose PCI tree shows NUMA nodes only"""
