"""CDI specs of pools that hand their devices out by CDI, as other projects' device plugins do with --use-cdi.

One file for each kind, since a name may be defined once only, and two shared pools may have an adapter in common. A
device without edits would void the whole file (CDI's SPEC.md, containerEdits), so each has at least a variable.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.cdi import OWN_PREFIX, SPEC_VERSION
from agent.config import Resource, SharedPool, SriovPool
from agent.errors import UnitUnhealthy
from agent.model.device import Snapshot
from deviceplugin.compat_response import SHARED_CDI_KIND, shared_nodes, sriov_cdi_kind, sriov_nodes
from deviceplugin.grants import DeviceNode
from deviceplugin.unit import Unit

POOL_PREFIX = f"{OWN_PREFIX}pool-"
VARIABLE = "NODEFABRIC_DEVICE"

Stamp = tuple[int, int, int]

log = logging.getLogger(__name__)


def pool_specs(
    resources: Sequence[Resource], units: Mapping[str, Sequence[Unit]], snapshot: Snapshot
) -> Mapping[str, str]:
    """Write out the specs that these pools need: file name → text."""
    kinds: dict[str, dict[str, Sequence[DeviceNode]]] = {}
    for resource in resources:
        pool = resource.compat
        if pool is not None and pool.use_cdi:
            kind = sriov_cdi_kind(pool) if isinstance(pool, SriovPool) else SHARED_CDI_KIND
            kinds.setdefault(kind, {}).update(_devices(resource, units.get(resource.name, ()), snapshot))
    return {
        f"{POOL_PREFIX}{kind.replace('/', '_')}.json": _text(kind, devices)
        for kind, devices in kinds.items()
        if devices
    }


def _devices(
    resource: Resource, units: Sequence[Unit], snapshot: Snapshot
) -> Iterator[tuple[str, Sequence[DeviceNode]]]:
    if isinstance(resource.compat, SharedPool):
        names = {name for unit in units[:1] for name in unit.rdma_devices}
        for device in snapshot.devices:
            mine = [rdma for rdma in device.rdma_devices if rdma.name in names]
            if mine:
                yield device.address, shared_nodes(mine, snapshot)
        return
    for unit in units:
        try:
            yield unit.device, sriov_nodes(resource, unit, snapshot)
        except UnitUnhealthy as error:
            log.debug("no CDI name: %s", error)


def _text(kind: str, devices: Mapping[str, Sequence[DeviceNode]]) -> str:
    listed = [{"name": name, "containerEdits": _edits(name, nodes)} for name, nodes in sorted(devices.items())]
    return json.dumps({"cdiVersion": SPEC_VERSION, "kind": kind, "devices": listed}, indent=1) + "\n"


def _edits(name: str, nodes: Sequence[DeviceNode]) -> dict[str, Any]:
    edits: dict[str, Any] = {"env": [f"{VARIABLE}={name}"]}
    if nodes:
        edits["deviceNodes"] = [
            {"path": node.path, "hostPath": node.host_path or node.path, "permissions": node.permissions}
            for node in nodes
        ]
    return edits


class PoolSpecs:
    """The files in the runtime's folder. Methods block, briefly, and never raise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._wanted: Mapping[str, str] | None = None
        self._written: dict[str, tuple[str, Stamp | None]] = {}
        """Name → text, and what the file was like when it said this."""
        self._is_tidy = True
        """Whether there is no file of ours that nobody wants."""
        self.problem: str | None = None
        """Why the files are not as they should be."""

    @property
    def is_watched(self) -> bool:
        """Tell whether `mend` may have something to do though nothing else happens."""
        return bool(self._wanted) or not self._is_tidy

    def keep(self, wanted: Mapping[str, str]) -> None:
        """Have exactly these of our pools' files. What is there already as it should be stays untouched."""
        if wanted != self._wanted:
            self._wanted, self._is_tidy = dict(wanted), False
        self.mend()

    def mend(self) -> None:
        """Write what somebody has removed, or what could not be written before: no container starts without."""
        wanted = self._wanted or {}
        try:
            for name, text in wanted.items():
                path = self.folder / name
                if self._written.get(name) != (text, _stamp(path)):
                    self._write(path, text)
                    self._written[name] = text, _stamp(path)
            if not self._is_tidy:
                for path in self.folder.glob(f"{POOL_PREFIX}*.json"):
                    if path.name not in wanted:
                        path.unlink(missing_ok=True)
                self._is_tidy = True
        except OSError as error:
            self.problem = f"CDI specs of pools cannot be written to {self.folder}: {error.strerror}"
        else:
            self.problem = None

    def _write(self, path: Path, text: str) -> None:
        try:
            if path.read_text() == text:
                return
        except (OSError, UnicodeDecodeError):
            pass
        self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")  # whose suffix no runtime reads
        fresh.write_text(text)
        fresh.rename(path)


def _stamp(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
