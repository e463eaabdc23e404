"""The configuration as frozen values with their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic.json_schema import SkipJsonSchema

from agent.config.networks import ADAPTER, Network, NetworkEntry
from agent.config.resources import Resource
from agent.config.section import FOLDER, Flag, Folder, Many, Section, seconds
from agent.config.sections import CniSettings, Dra, Endpoints, HealthSettings, Placement, Restart
from agent.config.topology import Topology

MAX_RESCAN_SECONDS = 3600


NETNS_FOLDERS = (Path("/var/run/netns"), Path("/run/netns"), Path("/var/run/docker/netns"))


@dataclass(frozen=True)  # without slots: it remembers what follows from its keys
class Config(Section):
    resources: Many[Resource] = ()
    """What kubelet is offered"""
    networks: Many[NetworkEntry] = ()
    """How VFs are set up in pods"""
    endpoints: Endpoints = Endpoints()
    """Where the agent answers HTTP"""
    topology: Topology = Topology()
    """What is published for schedulers"""
    health: HealthSettings = HealthSettings()
    """How patient the agent is with ill devices"""
    dra: Dra = Dra()
    """How resources with offer: dra are offered"""
    placement: Placement = Placement()
    """What the hardware does not show of GPUs"""
    cni: CniSettings = CniSettings()
    """Which devices networks may name"""
    restart: Restart = Restart()
    """What the agent does before an end that is planned"""
    kubelet_dir: Folder = Path("/var/lib/kubelet")
    """The kubelet's folder"""
    state_dir: Folder = Path("/var/lib/nodefabric")
    """Where the agent keeps its ledger; survives a reboot"""
    run_dir: Folder = Path("/run/nodefabric")
    """Where the agent's sockets are; empty after a reboot"""
    # Our own specs are written there.
    cdi_dir: Folder = Path("/var/run/cdi")
    """Where the container runtime looks for CDI specs"""
    cdi_names: Flag = True
    """Hand out early-bound units by CDI names, which stay true when devices are renumbered; false for a runtime without
    CDI, and for kubelet before 1.29"""
    netns_folders: Annotated[
        Many[Folder], AfterValidator(lambda given: given or NETNS_FOLDERS), Field(alias="netnsDirs")
    ] = NETNS_FOLDERS
    """Where the container runtime binds the network namespaces of pods"""
    # To ask which sandboxes live; without it kubelet's word alone counts.
    runtime_socket: Annotated[Path | None, FOLDER] = None
    """The container runtime's CRI socket"""
    rescan_seconds: Annotated[float, seconds(1, MAX_RESCAN_SECONDS)] = 60.0
    """Time between full scans"""
    source: SkipJsonSchema[str] = field(default="defaults", compare=False)
    warnings: SkipJsonSchema[tuple[str, ...]] = field(default=(), compare=False)
    """What was overlooked in it."""

    def __post_init__(self) -> None:
        kept, bonds = self.cni.protect, {n.name for n in self.networks if n.setup.bond is not None}
        resources = tuple(
            replace(r, protected=kept, bonded=isinstance(r.network, str) and r.network in bonds) for r in self.resources
        )
        object.__setattr__(self, "resources", resources)

    @cached_property
    def by_name(self) -> Mapping[str, Resource]:
        """Name of a resource → the resource."""
        return {resource.name: resource for resource in self.resources}

    @cached_property
    def late(self) -> Mapping[str, Resource]:
        """Those of which kubelet counts slots, by name."""
        return {resource.name: resource for resource in self.resources if resource.has_slots}

    @cached_property
    def joined(self) -> Mapping[str, Network | None]:
        """Name of a resource → what its devices join when a chained call brings them into a pod.

        Which that is for one of them tells `Network.at`.
        """
        networks = {network.name: network for network in self.networks}
        return {resource.name: _joined(resource, networks) for resource in self.resources}

    @property
    def needs_api(self) -> bool:
        """Whether the agent has anything to do at the API server."""
        return self.topology.needs_api or self.restart.taint or self.offers_dra

    @cached_property
    def offers_dra(self) -> bool:
        """Whether any resource is handed out by claims."""
        return any(resource.offer == "dra" for resource in self.resources)

    @cached_property
    def tells(self) -> bool:
        """Whether containers of any resource get variables or files about their devices."""
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


def _joined(resource: Resource, networks: Mapping[str, Network]) -> Network | None:
    if isinstance(resource.network, Mapping):
        named = ((pf.lower() if ":" in pf else pf, name) for pf, name in resource.network.items())
        by_pf = {pf: networks[name] for pf, name in named if name in networks}
        return Network("", by_pf=by_pf).for_devices(resource.nic_kind)
    if (network := networks.get(resource.network or "")) is not None:
        return network.for_devices(resource.nic_kind)
    return ADAPTER if resource.nic_kind == "nic" else None
