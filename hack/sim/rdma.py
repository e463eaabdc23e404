"""RDMA devices of a simulated node, which behave in namespaces as ib_core's do.

A node is in shared mode, where nothing ever moves, until somebody calls `set_mode`. In exclusive mode a
device that moves into a namespace leaves the node's sysfs, as it does on a real one, and its state is in a
file that any process can look at. A device whose namespace has died is back at the next look.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from agent.errors import HardwareError, NetlinkFailed
from agent.hardware import netns as namespaces
from agent.hardware.host import RdmaLink
from agent.hardware.netlink.rdma_netlink import WAIT_SECONDS, Renumbering
from agent.model.device import is_pci_address
from hack.sim import uevents

SO_NETNS_COOKIE = 71
_BIND_MOUNT = re.compile(r"net:\[\d+\]")


class SimulatedRdma:
    """`host.Rdma` over the recorded sysfs below `root`; what moved is in `folder`."""

    def __init__(
        self,
        folder: Path,
        root: Path,
        on_ib_move: Callable[[str], None] | None = None,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """`on_ib_move` is told the PCI function of an InfiniBand device that moves: its IPoIB interface comes anew."""
        self._on_ib_move = on_ib_move
        self._folder = folder / "rdma"
        self._classes = root / "sys/class"
        self._renumbering = Renumbering(wait_seconds)

    def mode(self) -> str | None:
        """Return the mode, None for a node without RDMA devices."""
        if not self._folder.exists():
            return "shared" if (self._classes / "infiniband").is_dir() else None
        with self._state() as state:
            return str(state["mode"])

    def set_mode(self, mode: str) -> None:
        """Set the mode, as if at boot."""
        with self._state() as state:
            state["mode"] = mode

    def refuse(self, name: str) -> None:
        """Let a device's driver refuse to move it."""
        with self._state() as state:
            self._by_name(state, name)["fixed"] = True

    def devices(self, netns: int | None = None) -> tuple[RdmaLink, ...]:
        """List the RDMA devices that are seen in a namespace."""
        return tuple(found for found, _ in self.with_functions(netns))

    def with_functions(self, netns: int | None = None) -> tuple[tuple[RdmaLink, str | None], ...]:
        """List the RDMA devices that are seen in a namespace, each with the PCI address below it."""
        cookie = _cookie(netns)
        with self._state() as state:
            seen = [d for d in state["devices"] if state["mode"] == "shared" or d["cookie"] == cookie]
        return tuple((RdmaLink(d["index"], d["name"], d["guid"]), d["function"]) for d in seen)

    def char_device(self, device: RdmaLink, kind: str, port: int | None = None, netns: int | None = None) -> str:
        """Name a character device."""
        folder = self._classes / ("infiniband_verbs" if kind == "uverbs" else "infiniband_mad")
        for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
            if entry.name.startswith(kind) and (entry / "ibdev").read_text().strip() == device.name:
                return entry.name
        raise _failed(f"look up {kind} of RDMA device {device.name}", errno.ENOENT)

    def move_in(self, device: RdmaLink, netns: int) -> None:
        """Move a device from the host into a namespace."""
        self._move(device, _cookie(None), _cookie(netns))

    def move_out(self, device: RdmaLink, netns: int) -> None:
        """Move a device from a namespace back to the host."""
        self._move(device, _cookie(netns), None)

    def rename(self, device: RdmaLink, name: str, netns: int | None = None) -> None:
        """Rename a device. Names are unique over all namespaces of the node."""
        with self._state() as state:
            if any(d["name"] == name for d in state["devices"]):
                raise _failed(f"rename RDMA device {device.name} to {name}", errno.EEXIST)
            found = self._by_index(state, device.index, f"rename RDMA device {device.name} to {name}")
            before, found["name"] = found["name"], name
            if found["cookie"] is None:
                self._hide({**found, "name": before})
                self._rename_inside(found, before)
                self._show(found)
            else:
                self._rename_inside(found, before)

    def renumbering(self, device: str) -> AbstractContextManager[object]:
        """Keep everybody else in this process from moving devices. Raises DeviceBusy."""
        return self._renumbering.held(device)

    def close(self) -> None:
        """Nothing is open."""

    # ------------------------------------------------------------------- inside

    def _move(self, device: RdmaLink, source: int | None, target: int | None) -> None:
        action = f"move RDMA device {device.name} to another network namespace"
        with self._state() as state:
            found = self._by_index(state, device.index, action)
            if found["fixed"] or state["mode"] == "shared":
                raise _failed(action, errno.EOPNOTSUPP)
            if found["cookie"] != source:
                raise _failed(action, errno.ENODEV)
            found["cookie"] = target
            if source is None and target is not None:
                self._hide(found)
            elif target is None:
                self._show(found)
            self._renumber(found)
        if found["protocol"] == "ib" and self._on_ib_move is not None:
            self._on_ib_move(found["function"])

    def withdraw(self, function: str) -> None:
        """Take a function's device away, wherever it is: its driver was unbound."""
        with self._state() as state:
            for device in [d for d in state["devices"] if d["function"] == function]:
                if device["cookie"] is None:
                    self._hide(device)
                state["devices"].remove(device)
                state.setdefault("withdrawn", {})[function] = device
                for entry in self._verbs_of(device["name"]):
                    shutil.rmtree(entry.resolve())
                    entry.unlink()

    def announce(self, function: str, guid: str) -> None:
        """Bring a withdrawn device back with a GUID, and with the lowest numbers that are free."""
        with self._state() as state:
            device = state.get("withdrawn", {}).pop(function, None)
            if device is None:
                return
            kept = self._folder / str(device["index"])
            state["last"] = device["index"] = max(state.get("last", 0), *(d["index"] for d in state["devices"]), 0) + 1
            kept.rename(self._folder / str(device["index"]))
            prefix = device["name"].rstrip("0123456789")
            taken = {d["name"] for d in state["devices"]}
            device["name"] = next(name for n in range(1000) if (name := f"{prefix}{n}") not in taken)
            digits = guid.replace(":", "")
            device["guid"] = ":".join(digits[i : i + 4] for i in range(0, 16, 4))
            (self._folder / str(device["index"]) / "node_guid").write_text(f"{device['guid']}\n")
            device["cookie"] = None
            state["devices"].append(device)
            self._show(device)
            verbs, entry = self._classes / "infiniband_verbs", self._free_verbs()
            target = f"../../{os.path.dirname(os.path.dirname(device['link'])).removeprefix('../../')}/infiniband_verbs"
            (verbs / target / entry).mkdir(parents=True)
            (verbs / entry).symlink_to(f"{target}/{entry}")
            (verbs / entry / "ibdev").write_text(f"{device['name']}\n")

    def _renumber(self, device: dict[str, Any]) -> None:
        """Make a device's verbs node anew, as ib_uverbs does with each move: with the lowest number that is free."""
        for entry in self._verbs_of(device["name"]):
            name = self._free_verbs(besides=entry.name)
            if name != entry.name:
                folder, target = entry.resolve(), Path(os.readlink(entry))
                entry.unlink()
                folder.rename(folder.with_name(name))
                entry.with_name(name).symlink_to(target.with_name(name))

    def _free_verbs(self, besides: str = "") -> str:
        """Name the first verbs node that there is not; one that is about to go counts as gone."""
        verbs = self._classes / "infiniband_verbs"
        names = (f"uverbs{n}" for n in range(1000))
        return next(name for name in names if name == besides or not (verbs / name).is_symlink())

    def _verbs_of(self, name: str) -> list[Path]:
        folder = self._classes / "infiniband_verbs"
        entries = list(folder.iterdir()) if folder.is_dir() else []
        return [entry for entry in entries if entry.is_symlink() and _read(entry / "ibdev") == name]

    @contextmanager
    def _state(self) -> Iterator[dict[str, Any]]:
        self._folder.mkdir(exist_ok=True)
        path = self._folder / "state.json"
        with open(self._folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = json.loads(path.read_text()) if path.exists() else {"mode": "shared", "devices": self._recorded()}
            before = json.dumps(state)
            self._bring_back_from_the_dead(state)
            try:
                yield state
            finally:
                if json.dumps(state) != before:
                    path.with_suffix(".new").write_text(json.dumps(state, indent=1))
                    path.with_suffix(".new").rename(path)

    def _recorded(self) -> list[dict[str, Any]]:
        found = []
        folder = self._classes / "infiniband"
        for index, name in enumerate(sorted(os.listdir(folder)) if folder.is_dir() else ()):
            target = os.readlink(folder / name) if (folder / name).is_symlink() else None
            function = next((p for p in reversed((target or "").split("/")) if is_pci_address(p)), None)
            layer = _read(folder / name / "ports/1/link_layer")
            found.append(
                {
                    "index": index,
                    "name": name,
                    "guid": _read(folder / name / "node_guid"),
                    "protocol": "ib" if layer == "InfiniBand" else "roce",
                    "function": function,
                    "link": target,
                    "cookie": None,
                    "fixed": False,
                }
            )
        return found

    def _bring_back_from_the_dead(self, state: dict[str, Any]) -> None:
        away = [d for d in state["devices"] if d["cookie"] is not None]
        living = _living() if away else frozenset()
        for device in away:
            if device["cookie"] not in living:
                device["cookie"] = None
                self._show(device)

    def _hide(self, device: dict[str, Any]) -> None:
        (self._classes / "infiniband" / device["name"]).unlink(missing_ok=True)
        folder = self._device_folder(device)
        if folder.exists():
            shutil.move(folder, self._folder / str(device["index"]))
        self._tell("remove", device)

    def _show(self, device: dict[str, Any]) -> None:
        folder, link = self._device_folder(device), self._classes / "infiniband" / device["name"]
        if not folder.exists():
            folder.parent.mkdir(exist_ok=True)
            shutil.move(self._folder / str(device["index"]), folder)
        if not link.is_symlink():
            link.symlink_to(f"{os.path.dirname(device['link'])}/{device['name']}")
        self._tell("add", device)

    def _tell(self, action: str, device: dict[str, Any]) -> None:
        parent = os.path.dirname(device["link"] or "").lstrip("./")
        uevents.emit(action, f"/{parent}/{device['name']}", "infiniband")

    def _device_folder(self, device: dict[str, Any]) -> Path:
        return Path(self._classes, "infiniband", os.path.dirname(device["link"]), device["name"])

    def _rename_inside(self, device: dict[str, Any], before: str) -> None:
        for folder in (self._classes / "infiniband_verbs", self._classes / "infiniband_mad"):
            for entry in folder.iterdir() if folder.is_dir() else ():
                if (entry / "ibdev").read_text().strip() == before:
                    (entry / "ibdev").write_text(f"{device['name']}\n")

    def _by_name(self, state: dict[str, Any], name: str) -> dict[str, Any]:
        for device in state["devices"]:
            if device["name"] == name:
                found: dict[str, Any] = device
                return found
        raise HardwareError(f"the simulated node has no RDMA device {name}")

    def _by_index(self, state: dict[str, Any], index: int, action: str) -> dict[str, Any]:
        for device in state["devices"]:
            if device["index"] == index:
                found: dict[str, Any] = device
                return found
        raise _failed(action, errno.ENODEV)


def _failed(action: str, number: int) -> NetlinkFailed:
    return NetlinkFailed(action, number, os.strerror(number))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _cookie(netns: int | None) -> int | None:
    """Return a namespace's cookie, which is never used again; None for the node's own."""
    if netns is None:
        return None

    def read() -> int:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as inside:
            return int.from_bytes(inside.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8), "little")

    return namespaces.run_in(netns, read)


def _living() -> frozenset[int]:
    """List the cookies of the namespaces that are mounted somewhere, or that this process holds open."""
    paths = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines() if " net:[" in line]
    paths += [str(p) for p in Path("/proc/self/fd").iterdir() if _BIND_MOUNT.fullmatch(_target(p))]
    found = set()
    for path in paths:
        try:
            netns = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if (cookie := _cookie(netns)) is not None:
                found.add(cookie)
        except HardwareError:
            continue
        finally:
            os.close(netns)
    return frozenset(found)


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
