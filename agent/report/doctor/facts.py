"""All that the checks look at, and what they say, as frozen values. None: it cannot be seen from here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any

from agent.config import Config
from agent.model.device import PciDevice, Snapshot, is_data_direct
from agent.model.printable import joined
from agent.model.vf_identity import Rail

UNLIMITED = -1
CONTAINERD_CONFIG = "/etc/containerd/config.toml"


@dataclass(frozen=True, slots=True)
class ContainerRuntime:
    """The runtime that kubelet starts containers with, as it describes itself over CRI."""

    name: str
    """containerd or cri-o."""
    version: str = ""
    """Empty if it did not answer."""
    resolves_cdi: bool | None = None
    """Whether it resolves CDI names, by the configuration that it has loaded; None if it does not say."""
    memlock_bytes: int | None = None
    """Locked memory that its process, and so each container, may have. UNLIMITED for no limit."""
    problem: str = ""
    """Why it did not answer."""
    config_file: str = CONTAINERD_CONFIG
    """containerd: its main configuration file; empty if nobody here knows where that is."""

    @property
    def major(self) -> int:
        """The first number of its version; 0 if that is unknown."""
        major = self.version.removeprefix("v").partition(".")[0]
        return int(major) if major.isdigit() else 0


@dataclass(frozen=True, slots=True)
class NetworkFile:
    """A network configuration of the runtime."""

    name: str
    types: tuple[str, ...]
    """The plugins it calls, in order."""


@dataclass(frozen=True, slots=True)
class ClaimFacts:
    """One look at what claims need on a node that offers something to them."""

    now: float = 0.0
    """Seconds since the epoch."""
    folders: tuple[tuple[str, str | None], ...] = ()
    """(path of a folder that the driver needs, None if it may be used or what is wrong)."""
    sockets: tuple[tuple[str, str | None], ...] = ()
    """(a socket by which kubelet finds the driver, None if it answers or what is wrong)."""
    kubelet_version: str = ""
    """As the API server has it; empty if it was not asked, or did not answer."""


@dataclass(frozen=True, slots=True)
class AcsRule:
    """Which bits of a port's ACS control register must be set, and which not (rdma-core, kernel-boot/rdma_topo)."""

    on: int
    off: int
    words: str
    """The same as the kernel's parameter pci=config_acs= spells it."""


REQUEST_REDIRECT, COMPLETION_REDIRECT = 1 << 2, 1 << 3
_VALIDATED = 1 << 0 | 1 << 4
"""Source validation, and upstream forwarding."""
TOWARDS_DATA_DIRECT = AcsRule(_VALIDATED | COMPLETION_REDIRECT, REQUEST_REDIRECT, "xx110x1")
TOWARDS_GPU = AcsRule(_VALIDATED | REQUEST_REDIRECT, COMPLETION_REDIRECT, "xx101x1")


@dataclass(frozen=True, slots=True)
class SwitchPort:
    """A downstream port of the switch that a Data Direct function and a GPU have in common."""

    address: str
    towards: str
    """The PCI address of the function or GPU below it."""
    rule: AcsRule
    control: int | None = None
    """Its ACS control register; None if that cannot be read."""


@dataclass(frozen=True, slots=True)
class DataDirectFacts:
    kernel: str
    """Its release."""
    library: str = ""
    """Path of the host's libmlx5; empty if it has none."""
    library_knows: bool = False
    ports: tuple[SwitchPort, ...] = ()


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
    kubelet_sockets: tuple[tuple[str, str | None], ...] = ()
    """(path, None if it answers or what is wrong)."""
    topology_policy: str | None = None
    """kubelet's topologyManagerPolicy."""
    plugins: frozenset[str] | None = None
    """Names of the executables in the CNI plugin folder."""
    networks: tuple[NetworkFile, ...] | None = None
    """The runtime's network configurations, in the order in which it reads them."""
    agent: Mapping[str, Any] = field(default_factory=dict)
    """Its status document; the obstacle `agent` alone if it does not answer, empty if it was not asked."""
    rails: tuple[Rail, ...] = ()
    """As the agent's books have numbered them."""
    rails_unknown: str = ""
    """Why the books do not tell."""
    claims: ClaimFacts | None = None
    """What claims need; None where nothing is offered to them."""
    data_direct: DataDirectFacts | None = None
    """None where no adapter has a Data Direct function."""


def functions(snapshot: Snapshot) -> tuple[PciDevice, ...]:
    return tuple(device for device in snapshot.devices if is_data_direct(device.vendor, device.device))


# --------------------------------------------------------------------------------------------------- what they say


class Severity(IntEnum):
    """From bad to good."""

    ERROR = 0
    """Pods that ask for these devices will not work."""
    WARNING = 1
    """Some pods will not work, or it will break at the next reboot."""
    NOTE = 2
    """Works, and could be better."""
    UNSEEN = 3
    """Cannot be seen from here: run doctor on the host, or mount the folder."""
    FINE = 4


@dataclass(frozen=True, slots=True)
class Result:
    """One sentence about the node."""

    severity: Severity
    text: str
    remedy: str = ""
    check: str = ""
    """By which check; empty for the one that says it."""


error, warning, note, unseen, fine = (partial(Result, severity) for severity in Severity)


def is_sound(findings: Iterable[Result]) -> bool:
    """Return whether nothing is an error or a warning."""
    return all(finding.severity > Severity.WARNING for finding in findings)


def as_text(findings: Sequence[Result]) -> str:
    """Lay the findings out for a terminal, the worst first, each remedy below its finding."""
    lines = []
    for finding in sorted(findings, key=lambda f: f.severity):
        lines.append(f"{finding.severity.name.lower():<8} {finding.check:<12} {finding.text}")
        if finding.remedy:
            lines.append(f"{'':<22}{finding.remedy}")
    counts = {severity: sum(f.severity is severity for f in findings) for severity in Severity}
    told = [f"{count} {_word(severity, count)}" for severity, count in counts.items() if count]
    return joined([*lines, "", ", ".join(told)])


def as_document(findings: Sequence[Result]) -> dict[str, Any]:
    """Give the findings as values that JSON can carry."""
    return {
        "sound": is_sound(findings),
        "findings": [asdict(finding) | {"severity": finding.severity.name.lower()} for finding in findings],
    }


def _word(severity: Severity, count: int) -> str:
    match severity:
        case Severity.UNSEEN:
            return "not to be seen from here"
        case Severity.FINE:
            return "fine"
        case _:
            return severity.name.lower() + ("s" if count > 1 else "")
