"""What kubelet's configuration file says about NUMA: policies, scope and reserved resources.

Reads the one file (`config.yaml` of kubeadm); drop-in folders and command-line flags of kubelet
are not seen. A field that is absent has kubelet's own default. A file that is missing or cannot
be read gives the defaults and a problem to report, since `none` never makes a scheduler reject a pod.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agent.topology.quantity import parse_quantity

MAX_BYTES = 1 << 20
POLICIES = ("none", "best-effort", "restricted", "single-numa-node")
SCOPES = ("container", "pod")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KubeletSettings:
    policy: str = "none"
    scope: str = "container"
    max_numa_nodes: str | None = None
    """topologyManagerPolicyOptions max-allowable-numa-nodes, verbatim."""
    cpu_manager: str = "none"
    memory_manager: str = "None"
    reserved_cpus: frozenset[int] = frozenset()
    """reservedSystemCPUs"""
    reserved_memory: tuple[tuple[int, str, int], ...] = ()
    """(NUMA node, memory or hugepages-<size>, bytes) of reservedMemory."""
    problem: str | None = None


class KubeletConfigFile:
    """The file at its place. What is wrong with it is logged once, not at each reading."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._said: str | None = None

    def read(self) -> KubeletSettings:
        """Read the file anew."""
        settings = read(self._path)
        if settings.problem is not None and settings.problem != self._said:
            log.warning("%s", settings.problem)
        self._said = settings.problem
        return settings


def read(path: Path) -> KubeletSettings:
    """Read the file. Never fails: `problem` says what is wrong."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return KubeletSettings(problem=f"{path} is not there; taking kubelet's defaults (policy none, scope container)")
    except OSError as error:
        return KubeletSettings(problem=f"{path} cannot be read ({error.strerror}); taking kubelet's defaults")
    if len(text) > MAX_BYTES:
        return KubeletSettings(problem=f"{path} is larger than {MAX_BYTES} bytes; taking kubelet's defaults")
    try:
        return parse(yaml.safe_load(text))
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        return KubeletSettings(problem=f"{path}: {' '.join(str(error).split())}; taking kubelet's defaults")


def parse(document: Any) -> KubeletSettings:
    """Take the settings from a KubeletConfiguration. Raises ValueError for what kubelet would not accept."""
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise ValueError(f"a KubeletConfiguration must be a mapping, is {type(document).__name__}")
    options = document.get("topologyManagerPolicyOptions") or {}
    if not isinstance(options, dict):
        raise ValueError("topologyManagerPolicyOptions must be a mapping")
    most = options.get("max-allowable-numa-nodes")
    return KubeletSettings(
        policy=_word(document, "topologyManagerPolicy", "none", POLICIES),
        scope=_word(document, "topologyManagerScope", "container", SCOPES),
        max_numa_nodes=None if most is None else str(most),
        cpu_manager=_word(document, "cpuManagerPolicy", "none", ("none", "static")),
        memory_manager=_word(document, "memoryManagerPolicy", "None", ("None", "Static", "BestEffort")),
        reserved_cpus=parse_cpus(str(document.get("reservedSystemCPUs") or "")),
        reserved_memory=_reserved_memory(document.get("reservedMemory") or []),
    )


def parse_cpus(text: str) -> frozenset[int]:
    """Read a CPU list of the kernel's form: `0-3,8`. Raises ValueError."""
    cpus: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{text!r} is not a CPU list such as 0-3,8")
        cpus.update(range(int(first), min(int(last or first), 1 << 16) + 1))
    return frozenset(cpus)


def _word(document: dict[str, Any], key: str, default: str, allowed: tuple[str, ...]) -> str:
    value = document.get(key) or default
    if value not in allowed:
        raise ValueError(f"{key}: {value!r} is not one of {', '.join(allowed)}")
    return str(value)


def _reserved_memory(items: Any) -> tuple[tuple[int, str, int], ...]:
    found: list[tuple[int, str, int]] = []
    try:
        for item in items:
            found += [
                (int(item["numaNode"]), str(kind), parse_quantity(amount)) for kind, amount in item["limits"].items()
            ]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"reservedMemory must be a list of numaNode and limits ({error!r})") from error
    return tuple(sorted(found))
