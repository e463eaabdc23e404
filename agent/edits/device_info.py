"""Device-info files: what Multus tells pods of the devices behind their interfaces.

Format 1.1.0 of the device information specification of the Network Plumbing Working Group. One file for each
granted unit, which Multus copies when the pod's network is set up,

    <folder>/dp/<resource name with dashes for slashes>-<unit ID>-device.json

and one for each attachment, where the call says (runtimeConfig.CNIDeviceInfoFile), in a folder of this name:

    <folder>/cni/<name>

What a call says may be a tenant's word, who may write networks of a namespace; root's files are none of theirs.
They live on a tmpfs and are made again at start. A file that cannot be written is logged, and keeps no pod from
starting.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.edits.cdi import write_whole
from agent.model.device import PciDevice, Snapshot

FOLDER = Path("/var/run/k8s.cni.cncf.io/devinfo")
VERSION = "1.1.0"
MODE = 0o444
MAX_BYTES = 65536
ATTACHED = ("k8s.cni.cncf.io", "devinfo", "cni")
"""How the path of the folder ends that attachments' files are in, wherever the host is mounted."""
_PLACES = (f"{FOLDER}/cni", "/run/k8s.cni.cncf.io/devinfo/cni")
_SUFFIX = "-device.json"
_PCI_ADDRESS = r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"

log = logging.getLogger(__name__)


def describe(snapshot: Snapshot, address: str, rdma_devices: Iterable[str] = ()) -> dict[str, Any]:
    """Say what a PCI device is. `rdma_devices` are those it had, for one whose own are out of sight in a pod."""
    told: dict[str, Any] = {"pci-address": address}
    device = snapshot.by_address.get(address)
    vdpa = device.vdpa if device is not None and device.vdpa is not None and device.vdpa.vdpa_type else None
    if vdpa is not None:
        told |= {"parent-device": vdpa.name, "driver": vdpa.vdpa_type, **({"path": vdpa.path} if vdpa.path else {})}
    else:
        names = [rdma.name for rdma in device.rdma_devices] if device is not None else []
        if names or (names := [name for name in rdma_devices if name]):
            told["rdma-device"] = ",".join(names)
    if device is not None and device.physfn is not None:
        told["pf-pci-address"] = device.physfn
        representor = _representor(snapshot, device)
        if representor is not None:
            told["representor-device"] = representor
    kind = "pci" if vdpa is None else "vdpa"
    return {"type": kind, "version": VERSION, kind: told}


def _representor(snapshot: Snapshot, device: PciDevice) -> str | None:
    """Name the host's end of a VF behind an embedded switch. Its port is called pf0vf3, or c1pf0vf3."""
    pf = snapshot.by_address.get(device.physfn or "")
    for netdev in pf.netdevs if pf is not None else ():
        if re.fullmatch(rf"(c[0-9]+)?pf[0-9]+vf{device.vf_index}", netdev.phys_port_name):
            return netdev.name
    return None


def write_attached(path: str, document: Mapping[str, Any]) -> None:
    """Write an attachment's file, unless Multus has copied it there already. Never raises."""
    if not _is_attached(path):
        log.warning(
            "the device-info file %s is not written: such files are in a folder .../%s", path, "/".join(ATTACHED)
        )
    elif not os.path.exists(path):  # Path's own raises for a name that is too long
        # Elsewhere than where it belongs no more than the last folder is made, which nobody takes away again.
        _write(Path(path), document, parents=os.path.dirname(path) in _PLACES)


def remove_attached(path: str, address: str) -> None:
    """Remove an attachment's file, if it is one that tells of this device. Repeatable. Never raises."""
    if not _is_attached(path):
        return
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            document = json.loads(opened.read(MAX_BYTES))
        if document["vdpa" if "vdpa" in document else "pci"]["pci-address"] == address:
            os.unlink(path)
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        log.warning("the device-info file %s stays: %s", path, error)


def _is_attached(path: str) -> bool:
    return tuple(path.split("/")[-4:-1]) == ATTACHED


Key = tuple[str, str]
"""Resource name and unit ID."""


class GrantedFiles:
    """The files of granted units in one folder. Methods block, briefly, and never raise."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder / "dp"

    def write(self, resource_name: str, unit_id: str, document: Mapping[str, Any]) -> None:
        """Write the file of a granted unit, in place of an earlier one."""
        if "/" in unit_id:  # a row's key, say: no folders are made of it
            log.warning("no device-info file is written for %s: it is no unit of %s", unit_id, resource_name)
            return
        _write(self._file(resource_name, unit_id), document)

    def keep(self, needless: Iterable[str], missing: Mapping[Key, Mapping[str, Any]]) -> None:
        """Remove files by their names, and write those that are missing."""
        for name in needless:
            try:
                (self.folder / name).unlink(missing_ok=True)
            except OSError as error:
                log.warning("the device-info file %s/%s stays: %s", self.folder, name, error.strerror)
        for key, document in missing.items():
            self.write(*key, document)

    def changes(self, granted: Iterable[Key], resource_names: Iterable[str]) -> tuple[Sequence[str], Sequence[Key]]:
        """Name the files that nobody needs, of all there could be of some resources, and what is granted without one.

        One that is there stays as it was written: a device in a pod may have less to tell.
        """
        wanted = {_name(*key): key for key in granted}
        try:
            found = set(os.listdir(self.folder))
        except FileNotFoundError:
            found = set()
        except OSError as error:
            log.warning("%s cannot be tidied up: %s", self.folder, error.strerror)
            return (), ()
        ours = [re.compile(re.escape(_dashed(name)) + f"-{_PCI_ADDRESS}{_SUFFIX}") for name in resource_names]
        needless = [name for name in found - wanted.keys() if any(one.fullmatch(name) for one in ours)]
        return needless, [wanted[name] for name in wanted.keys() - found]

    def _file(self, resource_name: str, unit_id: str) -> Path:
        return self.folder / _name(resource_name, unit_id)


def _name(resource_name: str, unit_id: str) -> str:
    return f"{_dashed(resource_name)}-{unit_id}{_SUFFIX}"


def _dashed(resource_name: str) -> str:
    return resource_name.replace("/", "-")


def _write(file: Path, document: Mapping[str, Any], *, parents: bool = True) -> None:
    try:
        write_whole(file, json.dumps(document), MODE, parents=parents)
    except OSError as error:
        log.warning("the device-info file %s is not written: %s", file, error.strerror)
