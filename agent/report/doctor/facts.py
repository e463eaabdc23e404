"""All that the checks look at, as frozen values. None means that it cannot be seen from here."""

from __future__ import annotations

from dataclasses import dataclass

from agent.config import Config
from agent.model.device import Snapshot
from agent.model.vf_identity import Rail
from agent.report.doctor.claim_facts import ClaimFacts
from agent.report.doctor.data_direct_facts import DataDirectFacts

UNLIMITED = -1


def is_containerd_2(version: str, config_version: int | None) -> bool:
    """Tell by the version that containerd answers with, else by that of its configuration file, which 2.0 raised."""
    major = version.removeprefix("v").partition(".")[0]
    return major.isdigit() and int(major) >= 2 if version else (config_version or 0) >= 3


@dataclass(frozen=True, slots=True)
class ContainerRuntime:
    """The runtime that kubelet starts containers with."""

    name: str
    """containerd or cri-o."""
    version: str = ""
    """As the runtime tells it; empty if it was not asked or did not answer."""
    config_version: int | None = None
    """containerd: the `version` of its configuration file; None without a file."""
    enable_cdi: bool | None = None
    """containerd: what its configuration says; None if it says nothing."""
    memlock_bytes: int | None = None
    """Locked memory that its process, and so each container, may have. UNLIMITED for no limit."""
    problem: str = ""
    """Why its configuration cannot be read."""
    cdi_file: str = "/etc/containerd/config.toml"
    """containerd: the file that decides whether it resolves CDI names; empty if nobody knows which that is."""

    @property
    def resolves_cdi(self) -> bool | None:
        """Tell whether it resolves CDI names: where nothing is said containerd does from 2.0 on, and CRI-O does.

        None for an older containerd whose configuration is not to be seen.
        """
        if self.enable_cdi is not None or self.name != "containerd":
            return self.enable_cdi is not False
        return is_containerd_2(self.version, self.config_version) or (False if self.cdi_file else None)


@dataclass(frozen=True, slots=True)
class NetworkFile:
    """A network configuration of the runtime."""

    name: str
    types: tuple[str, ...]
    """The plugins it calls, in order."""


@dataclass(frozen=True, slots=True)
class Facts:
    """One look at a node."""

    snapshot: Snapshot
    config: Config | None = None
    config_problems: tuple[str, ...] = ()
    config_path: str = ""
    modules: frozenset[str] | None = None
    """Loaded or built in, with underscores."""
    command_line: tuple[str, ...] = ()
    """Of the kernel."""
    has_iommu: bool = False
    runtime: ContainerRuntime | None = None
    cdi_read_only: bool = False
    """Whether the folder that the agent writes CDI specs to is mounted read-only here."""
    kubelet_sockets: tuple[tuple[str, str | None], ...] = ()
    """(path, None if it answers or what is wrong)."""
    topology_policy: str | None = None
    """kubelet's topologyManagerPolicy."""
    plugins: frozenset[str] | None = None
    """Names of the executables in the CNI plugin folder."""
    networks: tuple[NetworkFile, ...] | None = None
    """The runtime's network configurations, in the order in which it reads them."""
    agent: tuple[tuple[str, str | None], ...] = ()
    """(what was asked of the agent, None if it is well or what is wrong)."""
    rails: tuple[Rail, ...] = ()
    """As the agent's books have numbered them."""
    rails_unknown: str = ""
    """Why the books do not tell."""
    claims: ClaimFacts | None = None
    """What claims need; None where nothing is offered to them."""
    data_direct: DataDirectFacts | None = None
    """None where no adapter has a Data Direct function."""
