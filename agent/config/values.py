"""The configuration as frozen values with their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from agent.config import declare
from agent.config.dra import Dra
from agent.config.networks import ADAPTER, Network
from agent.config.placement import Placement
from agent.config.reader import PATH
from agent.config.resources import Resource
from agent.config.sections import CniSettings, Endpoints, HealthSettings, Restart
from agent.config.topology import Topology

MAX_RESCAN_SECONDS = 3600


def _absolute(text: str) -> Path:
    if not PATH.fullmatch(text):
        raise ValueError(text)
    return Path(text)


@dataclass(frozen=True, slots=True)
class Config:
    resources: tuple[Resource, ...] = ()
    networks: tuple[Network, ...] = ()
    endpoints: Endpoints = declare.section(Endpoints, about="Where the agent answers HTTP")
    topology: Topology = declare.section(Topology, about="What is told to schedulers")
    health: HealthSettings = declare.section(HealthSettings, about="How patient the agent is with ill devices")
    dra: Dra = declare.section(Dra, about="How resources with offer: dra are offered")
    placement: Placement = declare.section(Placement, about="What the hardware does not tell of GPUs")
    cni: CniSettings = declare.section(CniSettings, about="Which devices networks may name")
    restart: Restart = declare.section(Restart, about="What the agent does before an end that is planned")
    kubelet_dir: Path = declare.path(Path("/var/lib/kubelet"), about="The kubelet's folder")
    state_dir: Path = declare.path(
        Path("/var/lib/nodefabric"), about="Where the agent keeps its books; survives a reboot"
    )
    run_dir: Path = declare.path(Path("/run/nodefabric"), about="Where the agent's sockets are; empty after a reboot")
    cdi_dir: Path = declare.path(Path("/var/run/cdi"), about="Where the container runtime looks for CDI specs")
    """Our own specs are written there."""
    cdi_names: bool = declare.flag(
        True,
        about="Hand out early-bound units by CDI names, which stay true when devices are renumbered; false for a"
        " runtime without CDI, and for kubelet before 1.29",
    )
    netns_folders: tuple[Path, ...] = declare.strings(
        "an absolute path",
        _absolute,
        default=(Path("/var/run/netns"), Path("/run/netns"), Path("/var/run/docker/netns")),
        key="netnsDirs",
        about="Where the container runtime binds the network namespaces of pods",
    )
    runtime_socket: Path | None = declare.path(None, about="The container runtime's CRI socket")
    """To ask which sandboxes live; without it kubelet's word alone counts."""
    rescan_seconds: float = declare.seconds(60.0, 1, MAX_RESCAN_SECONDS, about="Time between full scans")
    source: str = field(default="defaults", compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)
    """What was overlooked in it."""

    def __post_init__(self) -> None:
        kept, bonds = self.cni.protect, {n.name for n in self.networks if n.setup.bond is not None}
        resources = tuple(
            replace(r, protected=kept, bonded=isinstance(r.network, str) and r.network in bonds) for r in self.resources
        )
        object.__setattr__(self, "resources", resources)

    def network_of(self, resource_name: str) -> Network | None:
        """Return what a resource's devices join when a chained call brings them into a pod.

        Which that is for one of them tells `Network.at`.
        """
        resource = next((r for r in self.resources if r.name == resource_name), None)
        if resource is None:
            return None
        by_name = {network.name: network for network in self.networks}
        if isinstance(resource.network, Mapping):
            named = ((pf.lower() if ":" in pf else pf, name) for pf, name in resource.network.items())
            by_pf = {pf: by_name[name] for pf, name in named if name in by_name}
            return Network("", by_pf=by_pf).for_devices(resource.nic_kind)
        network = by_name.get(resource.network or "")
        if network is not None:
            return network.for_devices(resource.nic_kind)
        return ADAPTER if resource.nic_kind == "nic" else None

    @property
    def needs_api(self) -> bool:
        """Whether the agent has anything to do at the API server."""
        return self.topology.needs_api or self.restart.taint or self.offers_dra

    @property
    def offers_dra(self) -> bool:
        """Whether any resource is handed out by claims."""
        return any(resource.offer == "dra" for resource in self.resources)

    @property
    def tells(self) -> bool:
        """Whether containers of any resource are told of their devices."""
        return any(resource.environment for resource in self.resources)

    @property
    def claimable(self) -> tuple[Resource, ...]:
        """Resources that are handed out by claims (DRA)."""
        return tuple(resource for resource in self.resources if resource.offer == "dra")

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
