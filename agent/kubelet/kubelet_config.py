"""What kubelet's configuration says about NUMA: policies, scope and reserved resources.

Reads the file (`config.yaml` of kubeadm) and, where a folder of drop-ins is named (kubelet's `--config-dir`), its
`*.conf` files in order of their names; kubelet's command-line flags are not known. A field that is absent has kubelet's
own default. What is missing or cannot be read gives the defaults and a problem to report, since `none` never makes a
scheduler reject a pod.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agent.model.printable import parse_exact, parse_milli, parse_quantity

MAX_BYTES = 1 << 20
DEFAULTS = "taking kubelet's defaults (policy none, scope container)"
DEFAULT_EVICTION_BYTES = 100 << 20
"""memory.available of evictionHard, while the file has no evictionHard (pkg/kubelet/eviction/defaults_linux.go)."""
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
    reserved_cpus: frozenset[int] = frozenset()
    """reservedSystemCPUs"""
    reserved_memory: tuple[tuple[int, str, int], ...] = ()
    """(NUMA node, memory or hugepages-<size>, bytes) of reservedMemory."""
    reserved_milli_cpu: int = 0
    """kubeReserved and systemReserved, in thousandths of a CPU. Without meaning where reserved_cpus names the CPUs."""
    reserved_memory_bytes: int = 0
    """kubeReserved and systemReserved, wherever on the node."""
    eviction_bytes: int = DEFAULT_EVICTION_BYTES
    """evictionHard's memory.available, if it is an amount."""
    eviction_share: float = 0.0
    """The same, if it is a share of the node's memory (0 to 1)."""
    problem: str | None = None


class KubeletConfigFile:
    """The configuration at its place, read again when a file of it has changed. What is wrong is logged once."""

    def __init__(self, path: Path, drop_ins: Path | None = None) -> None:
        self._path = path
        self._drop_ins = drop_ins
        self._said: str | None = None
        self._stamps: object = None
        self._settings = KubeletSettings()

    def read(self) -> KubeletSettings:
        """Return what the configuration says now."""
        files = files_of(self._path, self._drop_ins)
        stamps = [(path, _stamp(path)) for path in files]
        if stamps != self._stamps:
            self._settings, self._stamps = read(*files), stamps
        settings = self._settings
        if settings.problem is not None and settings.problem != self._said:
            log.warning("%s", settings.problem)
        self._said = settings.problem
        return settings


def read(path: Path, *drop_ins: Path) -> KubeletSettings:
    """Read the file, and what drop-ins add to it or replace in it. Never fails: `problem` says what is wrong."""
    merged: dict[str, Any] = {}
    for each in (path, *drop_ins):
        try:
            with each.open("rb") as file:
                text = file.read(MAX_BYTES + 1)
            if len(text) > MAX_BYTES:
                raise ValueError(f"is larger than {MAX_BYTES} bytes")
            merged = _merged(merged, yaml.safe_load(text) or {})
            settings = parse(merged)
        except OSError as error:
            return KubeletSettings(problem=f"{each} cannot be read ({error.strerror}); {DEFAULTS}")
        except Exception as error:  # for a bad tag or number PyYAML raises whatever int(), date() or a lookup raise
            said = " ".join(str(error).split()) or type(error).__name__
            return KubeletSettings(problem=f"{each}: {said}; {DEFAULTS}")
    return settings


def files_of(path: Path, drop_ins: Path | None) -> list[Path]:
    """List the file, and the drop-ins of a folder, in kubelet's order."""
    return [path, *(sorted(drop_ins.glob("*.conf")) if drop_ins is not None else [])]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Lay one document over another: mappings key by key, anything else as a whole."""
    both = dict(below)
    for key, value in above.items():
        old = both.get(key)
        both[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return both


def parse(document: Any) -> KubeletSettings:
    """Take the settings from a KubeletConfiguration. May raise any error for what kubelet would not accept."""
    most = (document.get("topologyManagerPolicyOptions") or {}).get("max-allowable-numa-nodes")
    reserved = [document.get(key) or {} for key in ("kubeReserved", "systemReserved")]
    eviction_bytes, eviction_share = _eviction(document)
    return KubeletSettings(
        policy=_word(document, "topologyManagerPolicy", "none", POLICIES),
        scope=_word(document, "topologyManagerScope", "container", SCOPES),
        max_numa_nodes=None if most is None else str(most),
        cpu_manager=_word(document, "cpuManagerPolicy", "none", ("none", "static")),
        reserved_cpus=parse_cpus(str(document.get("reservedSystemCPUs") or "")),
        reserved_memory=tuple(
            sorted(
                (int(item["numaNode"]), str(kind), parse_quantity(amount))
                for item in document.get("reservedMemory") or []
                for kind, amount in item["limits"].items()
            )
        ),
        reserved_milli_cpu=sum(parse_milli(amounts.get("cpu", 0)) for amounts in reserved),
        reserved_memory_bytes=sum(parse_quantity(amounts.get("memory", 0)) for amounts in reserved),
        eviction_bytes=eviction_bytes,
        eviction_share=eviction_share,
    )


def parse_cpus(text: str) -> frozenset[int]:
    """Read a CPU list of the kernel's form: `0-3,8`. Raises ValueError."""
    cpus: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), min(int(last or first), 1 << 16) + 1))
    return frozenset(cpus)


def _word(document: dict[str, Any], key: str, default: str, allowed: tuple[str, ...]) -> str:
    value = document.get(key) or default
    if value not in allowed:
        raise ValueError(f"{key}: {value!r} is not one of {', '.join(allowed)}")
    return str(value)


def _eviction(document: dict[str, Any]) -> tuple[int, float]:
    """Read at how little free memory pods are evicted: bytes, or a share of the node's memory.

    kubelet's default goes away as a whole once evictionHard names anything, unless mergeDefaultEvictionSettings is on.
    """
    hard = document.get("evictionHard") or {}
    default = DEFAULT_EVICTION_BYTES if not hard or document.get("mergeDefaultEvictionSettings") is True else 0
    text = str(hard.get("memory.available", default))
    if text.endswith("%"):
        return 0, min(float(parse_exact(text[:-1])), 100.0) / 100
    return parse_quantity(text), 0.0
