"""The configuration as frozen values with their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent.config.cni import CniSettings
from agent.config.endpoints import Endpoints
from agent.config.health import HealthSettings
from agent.config.restart import Restart
from agent.config.topology import Topology
from agent.model.device import LinkLayer
from agent.model.pf_selector import PfSelector

KINDS = ("hca", "vf", "nic", "gpu", "rail", "accelerator")
NETWORK_KINDS = ("vf", "hca", "nic", "rail")
RAIL_NIC_KINDS = ("vf", "hca", "nic")
LATE_KINDS = ("vf", "nic")
BINDINGS = ("early", "late")
MIG_STRATEGIES = ("none", "single", "mixed")
PASS_BY = ("cdi", "envvar", "volume-mounts", "device-specs")
ENVIRONMENTS = ("nccl", "ucx", "nvshmem", "mvapich2")
VDPA_TYPES = ("vhost", "virtio")
SHARED_MODES = ("macvlan", "ipoib")
"""Modes that leave the adapter in the host, for all that share it."""
DEFAULT_SHARES = 63
"""A RoCE port has 128 GIDs and a sharer takes two (v1 and v2): about 63 pods fit one HCA."""


@dataclass(frozen=True, slots=True)
class Select:
    """Which devices a resource takes: AND between fields, OR inside one. Empty: no condition."""

    vendors: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    """PCI class codes by their first hexadecimal digits: 02 for networking, 0207 for InfiniBand."""
    drivers: tuple[str, ...] = ()
    pci_addresses: tuple[str, ...] = ()
    acpi_indexes: tuple[str, ...] = ()
    pf: tuple[PfSelector, ...] = ()
    root_devices: tuple[PfSelector, ...] = ()
    """Like `pf`, by PCI address only; both may be asked for."""
    netdevs: tuple[str, ...] = ()
    rdma_devices: tuple[str, ...] = ()
    link_layers: tuple[LinkLayer, ...] = ()
    pkeys: tuple[int, ...] = ()
    """First partition key of an InfiniBand port."""
    is_rdma: bool = False
    """Only devices with an RDMA device."""
    vdpa_type: str = ""
    """vhost or virtio: only devices with a vDPA device bound to this bus driver. Empty: no condition."""
    need_vhost_net: bool = False
    """No condition: what is taken by this selector also gets /dev/vhost-net and /dev/net/tun."""
    any_of: tuple[Select, ...] = ()
    """Besides the above, one of these must take the device; the first that does counts."""


@dataclass(frozen=True, slots=True)
class RailNic:
    """The NIC half of a rail."""

    kind: str = "vf"
    """vf, hca or nic."""
    select: Select = Select()
    shares: int = DEFAULT_SHARES
    """hca only: how many rails one HCA may serve."""


@dataclass(frozen=True, slots=True)
class SriovPool:
    """What an entry of sriov-network-device-plugin's `resourceList` says besides its selectors."""

    prefix: str
    """intel.com"""
    device_type: str = "netDevice"
    """netDevice or accelerator."""
    additional_info: Mapping[str, Mapping[str, str]] | None = None
    """By PCI address or `*`."""
    use_cdi: bool = False


@dataclass(frozen=True, slots=True)
class SharedPool:
    """What an entry of k8s-rdma-shared-dev-plugin's `configList` says besides its selectors."""

    hca_max: int
    """So many units, whatever number of HCAs; each unit is all HCAs."""
    use_cdi: bool = False


@dataclass(frozen=True, slots=True)
class Resource:
    name: str
    kind: str
    """hca, vf, nic (a whole PF or other adapter), gpu, rail (a GPU with its nearest NIC), or accelerator (a
    processing accelerator, PCI class 12)."""
    select: Select = Select()
    shares: int = DEFAULT_SHARES
    """hca only: how many units one HCA offers."""
    management: bool = False
    """All but gpu: hand out umad and issm devices too."""
    network: str | None = None
    """All but gpu: the entry of `networks` that a VF joins when the CNI request names no device; or that says what
    interface a pod gets upon the netdev of its HCA."""
    binding: str = "early"
    """vf and nic: early, kubelet's unit is the device; late, the device is chosen when the whole pod is known."""
    slots: int | None = None
    """Late binding: the number of units; None makes one for each selected device."""
    gpu: Select = Select()
    """rail only."""
    nic: RailNic = RailNic()
    """rail only."""
    mig: str = "none"
    """gpu: none, single (all GPUs cut alike, slices under this name) or mixed (a name for each profile)."""
    replicas: int = 1
    """gpu: how many containers take turns on one GPU."""
    mig_profile: str = ""
    """Not configured: the profile of a resource that `mig: mixed` makes."""
    derived_from: str = ""
    """Not configured: name of the resource that made it."""
    pass_by: tuple[str, ...] = ()
    """gpu and rail: how a container gets it: cdi, envvar, volume-mounts, device-specs. Empty: what the node has."""
    environment: tuple[str, ...] = ()
    """Well-known variables that tell libraries which devices are theirs: nccl, ucx …"""
    exclude_topology: bool = False
    """Tell kubelet no NUMA node, so that its topology manager does not mind where the device is."""
    protected: tuple[str, ...] = ()
    """Not configured here: what `cni.protect` names, and no resource takes."""
    compat: SriovPool | SharedPool | None = None
    """Behave as another project's device plugin does: the resource comes from its configuration."""

    @property
    def nic_kind(self) -> str:
        """The kind of what a unit brings besides a GPU."""
        return self.nic.kind if self.kind == "rail" else self.kind

    @property
    def joins_network(self) -> bool:
        """Whether its units are devices that come into the pod's network."""
        return self.nic_kind in ("vf", "nic") or (self.nic_kind == "hca" and self.network is not None)


@dataclass(frozen=True, slots=True)
class Network:
    """How a VF is set up in a pod. `netconf` holds CNI network configuration keys, unparsed."""

    name: str
    netconf: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Config:
    resources: tuple[Resource, ...] = ()
    networks: tuple[Network, ...] = ()
    endpoints: Endpoints = field(default_factory=Endpoints)
    topology: Topology = field(default_factory=Topology)
    health: HealthSettings = field(default_factory=HealthSettings)
    cni: CniSettings = field(default_factory=CniSettings)
    restart: Restart = field(default_factory=Restart)
    kubelet_dir: Path = Path("/var/lib/kubelet")
    state_dir: Path = Path("/var/lib/nodefabric")
    run_dir: Path = Path("/run/nodefabric")
    cdi_dir: Path = Path("/var/run/cdi")
    """Where the container runtime looks for CDI specs, and late binding writes its own."""
    netns_folders: tuple[Path, ...] = (Path("/var/run/netns"), Path("/run/netns"), Path("/var/run/docker/netns"))
    """Where the container runtime binds the network namespaces of pods."""
    runtime_socket: Path | None = None
    """The container runtime's socket, to ask which sandboxes live; without it kubelet's word alone counts."""
    rescan_seconds: float = 60.0
    source: str = field(default="defaults", compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)
    """What was overlooked in it."""

    def __post_init__(self) -> None:
        kept = self.cni.protect
        resources = tuple(r if r.protected == kept else replace(r, protected=kept) for r in self.resources)
        object.__setattr__(self, "resources", resources)

    def network(self, name: str) -> Network | None:
        return next((n for n in self.networks if n.name == name), None)

    @property
    def needs_api(self) -> bool:
        """Whether the agent has anything to do at the API server."""
        return self.topology.needs_api or self.restart.taint

    @property
    def ledger_path(self) -> Path:
        return self.state_dir / "ledger.db"

    @property
    def spool_dir(self) -> Path:
        return self.state_dir / "spool"

    @property
    def cni_socket(self) -> Path:
        return self.run_dir / "cni.sock"

    @property
    def admin_socket(self) -> Path:
        return self.run_dir / "admin.sock"
