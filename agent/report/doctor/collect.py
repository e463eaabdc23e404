"""Collects the facts: files below a root, the runtime's and kubelet's sockets, the agent's endpoints.

Reads only. What is not there or may not be read is left as unseen: doctor may run in a container.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import socket
import time
import urllib.error
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.config import Config, Endpoints, Topology
from agent.errors import AgentError, LedgerError, Unavailable
from agent.kubelet import kubelet_config
from agent.kubelet.cri import ContainerRuntime as RuntimeClient
from agent.ledger.database import read_rails
from agent.model.device import Snapshot
from agent.model.vf_identity import Rail
from agent.process import sockets
from agent.report.doctor.facts import (
    CONTAINERD_CONFIG,
    TOWARDS_DATA_DIRECT,
    TOWARDS_GPU,
    UNLIMITED,
    ClaimFacts,
    ContainerRuntime,
    DataDirectFacts,
    Facts,
    NetworkFile,
    SwitchPort,
    functions,
)
from agent.report.status import ask

MOST_BYTES = 1 << 20
MOST_ANSWER_BYTES = 16 << 10
SOCKET_SECONDS, ANSWER_SECONDS = 3.0, 3.0
RUNTIMES = {
    "containerd": ("run/containerd/containerd.sock", "containerd"),
    "cri-o": ("run/crio/crio.sock", "crio"),
}
_LIBRARY = "libmlx5.so.1"
_FOLDERS = ("usr/lib64", "usr/lib", "usr/lib/aarch64-linux-gnu", "usr/lib/x86_64-linux-gnu", "usr/local/lib")
_SYMBOL = b"mlx5dv_get_data_direct_sysfs_path"
"""By which programs find the function, from rdma-core 54 on (debian/ibverbs-providers.symbols, MLX5_1.25)."""
_MOST_LIBRARY_BYTES = 16 << 20
_SWITCH = ("0x15b3", "0x197c")
"""Vendor and device of ports of a ConnectX's own switch."""
_CONFIG_BYTES, _FIRST_CAPABILITY, _ACS = 4096, 0x100, 0x000D


def collect(
    root: Path,
    snapshot: Snapshot,
    config: Config | None,
    config_path: Path,
    config_problems: tuple[str, ...] = (),
    *,
    ask_agent: bool = True,
    kubelet_version: str = "",
) -> Facts:
    """Look at the node below `root`, and ask its agent unless it is another machine's root. Never raises.

    `kubelet_version` is what the API server told, where something is offered to claims.
    """
    kubelet_dir = below(root, config.kubelet_dir if config else Path("/var/lib/kubelet"))
    known_rails, rails_unknown = _rails(root, config, is_here=ask_agent)
    return Facts(
        snapshot=snapshot,
        config=config,
        config_problems=config_problems,
        config_path=str(config_path),
        modules=modules(root),
        command_line=tuple((_text(root / "proc/cmdline") or "").split()),
        has_iommu=bool(_names(root / "sys/class/iommu")),
        runtime=runtime(root, config),
        kubelet_sockets=tuple(
            (str(path), listens(path))
            for path in (kubelet_dir / "device-plugins/kubelet.sock", kubelet_dir / "pod-resources/kubelet.sock")
            if is_open(kubelet_dir)
        ),
        topology_policy=_topology_policy(root, kubelet_dir, config),
        plugins=_executables(root / "opt/cni/bin"),
        networks=networks(root / "etc/cni/net.d"),
        agent=agent_answer(config.endpoints) if config is not None and ask_agent else {},
        rails=known_rails,
        rails_unknown=rails_unknown,
        claims=claims(root, config, kubelet_version),
        data_direct=data_direct(root, snapshot),
    )


def _rails(root: Path, config: Config | None, *, is_here: bool) -> tuple[tuple[Rail, ...], str]:
    """Read how the agent's books have the rails numbered; else tell why they do not say."""
    books = (config or Config()).ledger_path
    try:
        return read_rails(books if is_here else below(root, books)), ""
    except LedgerError as error:
        return (), str(error).replace(f"{root}/", "/")


def _topology_policy(root: Path, kubelet_dir: Path, config: Config | None) -> str | None:
    """Return kubelet's topologyManagerPolicy; None if its configuration is not to be seen, or cannot be read."""
    named, drop_ins = kubelet_dir / "config.yaml", None
    if config is not None and config.topology.kubelet_config != Topology().kubelet_config:
        named = below(root, config.topology.kubelet_config)
    if config is not None and config.topology.kubelet_config_dir is not None:
        drop_ins = below(root, config.topology.kubelet_config_dir)
    settings = kubelet_config.read(*kubelet_config.files_of(named, drop_ins))  # which logs nothing
    return settings.policy if settings.problem is None else None


def modules(root: Path) -> frozenset[str] | None:
    """List the modules that are loaded or built into the running kernel; None where neither is to be seen."""
    loaded = _text(root / "proc/modules")
    if loaded is None and not os.path.isdir(root / "sys/module"):
        return None
    found = {line.split()[0] for line in (loaded or "").splitlines() if line.strip()} | set(_names(root / "sys/module"))
    release = (_text(root / "proc/sys/kernel/osrelease") or "").strip()
    built_in = _text(root / f"lib/modules/{release}/modules.builtin") or ""
    found |= {Path(line.strip()).name.partition(".")[0] for line in built_in.splitlines() if line.strip()}
    return frozenset(name.replace("-", "_") for name in found)


def runtime(root: Path, config: Config | None) -> ContainerRuntime | None:
    """Find the container runtime and ask it; None if its socket is not to be seen.

    Both may be there, containerd for Docker: kubelet's is the one that is configured. One with a socket of its own
    (k3s has one) has a configuration of its own, too, wherever that is.
    """
    configured = config.runtime_socket if config is not None else None
    if configured is None:
        found = (_runtime(root, name, root / place) for name, (place, _) in RUNTIMES.items())
        return next((each for each in found if each is not None), None)
    name = "cri-o" if "crio" in configured.name else "containerd"
    is_usual = str(configured).removeprefix("/var") == f"/{RUNTIMES[name][0]}"
    return _runtime(root, name, below(root, configured), is_usual=is_usual)


def _runtime(root: Path, name: str, socket_path: Path, *, is_usual: bool = True) -> ContainerRuntime | None:
    if not os.path.exists(socket_path):
        return None
    version, resolves_cdi, problem = "", None, ""
    try:
        version, resolves_cdi = asyncio.run(RuntimeClient(socket_path).described())
    except AgentError as error:
        problem = str(error)
    return ContainerRuntime(
        name,
        version,
        resolves_cdi if name == "containerd" else True,
        memlock(root, RUNTIMES[name][1]),
        problem,
        CONTAINERD_CONFIG if is_usual else "",
    )


def memlock(root: Path, program: str) -> int | None:
    """Return how many bytes a program's process may lock; None where it is not to be seen."""
    for folder in (root / "proc").glob("[0-9]*"):
        if (_text(folder / "comm") or "").strip() == program:
            limit = re.search(r"^Max locked memory\s+(\S+)", _text(folder / "limits") or "", re.MULTILINE)
            if limit is not None:
                return UNLIMITED if limit[1] == "unlimited" else _whole(limit[1])
    return None


def networks(folder: Path) -> tuple[NetworkFile, ...] | None:
    """List the runtime's network configurations in the order in which it reads them; None if they cannot be seen.

    The agent's container is shown folders of IPAM plugins in it at most.
    """
    names = _names(folder)
    if not is_open(folder) or (names and all(os.path.isdir(folder / name) for name in names)):
        return None
    found = []
    for name in sorted(n for n in names if n.endswith((".conflist", ".conf", ".json"))):
        try:
            document = json.loads(_text(folder / name) or "")
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            plugins = document.get("plugins", [document])
            types = (
                [str(p.get("type", "")) for p in plugins if isinstance(p, dict)] if isinstance(plugins, list) else []
            )
            found.append(NetworkFile(name, tuple(types)))
    return tuple(found)


def agent_answer(endpoints: Endpoints) -> Mapping[str, Any]:
    """Ask the agent for its status document; what is wrong in its place, if it has none or is not alive."""
    try:
        document = ask(endpoints)
        with sockets.get(endpoints.url("healthz"), ANSWER_SECONDS):
            return document
    except urllib.error.HTTPError as error:
        problem = error.read(MOST_ANSWER_BYTES).decode(errors="replace").strip()
    except (OSError, Unavailable) as error:
        problem = str(error)
    return {"obstacles": {"agent": problem}}


def claims(root: Path, config: Config | None, kubelet_version: str) -> ClaimFacts | None:
    """Look at the driver's folders and sockets; None where nothing is offered to claims."""
    if config is None or not config.offers_dra:
        return None
    kubelet = below(root, config.kubelet_dir)
    registry, own = kubelet / "plugins_registry", kubelet / "plugins" / config.dra.driver
    found = sorted(registry.glob(f"{config.dra.driver}-*-reg.sock"))
    folders = (registry, own) if own.exists() else (registry,)  # the agent makes its own
    return ClaimFacts(
        now=time.time(),
        folders=tuple((str(path), unusable(path)) for path in folders),
        sockets=tuple((str(path), listens(path)) for path in found),
        kubelet_version=kubelet_version,
    )


def data_direct(root: Path, snapshot: Snapshot) -> DataDirectFacts | None:
    """Look at kernel, library and switches; None where no adapter has a Data Direct function."""
    if not functions(snapshot):
        return None
    release = (_text(root / "proc/sys/kernel/osrelease") or "").strip()
    return DataDirectFacts(release, *_library(root), _switch_ports(root, snapshot))


def _switch_ports(root: Path, snapshot: Snapshot) -> tuple[SwitchPort, ...]:
    """List the ports of adapters' switches through which a Data Direct function and a GPU reach each other.

    The path has the host bridge first, then a root port, then the switch: ports that only a root port joins are none.
    """
    found: dict[str, SwitchPort] = {}
    gpus = [snapshot.by_address[g.pci_address] for g in snapshot.all_gpus if g.pci_address in snapshot.by_address]
    for one, gpu in itertools.product(functions(snapshot), gpus):
        pairs = zip(one.path[:-1], gpu.path[:-1], strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
        for device, rule in ((one, TOWARDS_DATA_DIRECT), (gpu, TOWARDS_GPU)) if common > 2 else ():
            port = device.path[common]
            folder = root / "sys/bus/pci/devices" / port
            if tuple((_text(folder / name) or "").strip() for name in ("vendor", "device")) == _SWITCH:
                config = _bytes(folder / "config", _CONFIG_BYTES) or b""
                found[port] = SwitchPort(port, device.address, rule, acs_control(config))
    return tuple(found[address] for address in sorted(found))


def acs_control(config: bytes) -> int | None:
    """Read the ACS control register in a function's configuration space; None if it has none, or it was cut off."""
    offset, seen = _FIRST_CAPABILITY, set[int]()
    while offset >= _FIRST_CAPABILITY and offset + 8 <= len(config) and offset not in seen:
        seen.add(offset)
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == _ACS:
            return int.from_bytes(config[offset + 6 : offset + 8], "little")
        offset = header >> 20 & 0xFFC
    return None


def _library(root: Path) -> tuple[str, bool]:
    """Find the host's libmlx5, and whether it knows Data Direct."""
    for folder in _FOLDERS:
        found = _bytes(root / folder / _LIBRARY, _MOST_LIBRARY_BYTES)
        if found is not None:
            return f"/{folder}/{_LIBRARY}", _SYMBOL in found
    return "", False


# ------------------------------------------------------------------- reading


def _text(path: Path) -> str | None:
    found = _bytes(path, MOST_BYTES)
    return found.decode(errors="replace") if found is not None else None


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _executables(folder: Path) -> frozenset[str] | None:
    if not is_open(folder):
        return None
    return frozenset(name for name in _names(folder) if os.access(folder / name, os.X_OK))


def _whole(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _bytes(path: Path, most: int) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            return file.read(most)
    except (OSError, ValueError):
        return None


def below(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def is_open(folder: Path) -> bool:
    return os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK)


def unusable(folder: Path) -> str | None:
    """Return what keeps files from being made in a folder; None if nothing does."""
    if not os.path.isdir(folder):
        return "is not there"
    return None if os.access(folder, os.W_OK | os.X_OK) else "may not be written to"


def listens(path: Path) -> str | None:
    """Return what keeps a socket from being reached; None if somebody listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(SOCKET_SECONDS)
        try:
            probe.connect(str(path))
        except OSError as error:
            return error.strerror or str(error)
    return None
