"""Attachments of the replaced plugins, taken into the books.

A pod that was there before us keeps its device, gets no other owner for it, and its DEL, which comes through
the new program, finds a row that undoes what the old one did. All that decides is read again each time, and
each attachment is adopted in one step of the ledger; so a crash at any point is mended by calling again.
The old files stay until the device is back: then `adopted_rows.forget` takes them away.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from io import FileIO
from pathlib import Path

from agent.errors import DeviceBusy, HardwareError
from agent.hardware import netns as namespaces
from agent.hardware.host import Host, Link
from agent.model.allocation import Attachment, AttachmentState, Owner, Undo, VfSettings
from agent.model.device import Snapshot
from agent.model.vf_identity import name_by_place
from cni.call import Call, Node, request_of
from cni.detach import NOWHERE
from cni.found_vfs import CNI_PATH, NETNS_FOLDERS
from cni.migrate import adopted_rows, sriov_state
from cni.migrate.sriov_state import Record, Unreadable, files_in
from cni.modes import guid, pf
from cni.targets import mode_for

UNWRITTEN = "/nowhere/netns"
"""Stands for a path that nobody wrote down. Its folder is missing, so nobody concludes that the pod is gone."""
BEFORE = "before"
"""Stands for the ID of a boot that is over."""
CLOCK_SECONDS = 300.0
"""So far the clock may have been put right since the boot."""
LOCK_SECONDS = 2.0

log = logging.getLogger(__name__)


class Adopter:
    """Takes over what the replaced plugins left. Methods block."""

    def __init__(self, node: Node, *, netns_folders: Sequence[Path] = NETNS_FOLDERS) -> None:
        self._node = node
        self._state = node.host.root / "var/lib/cni"
        self._run = node.host.root / "var/run/cni"
        self._netns_folders = tuple(netns_folders)
        self._logged: set[Path] = set()
        """Files that were logged, as long as they are there."""
        self.is_due = True
        """Whether something may wait to be adopted: so it is at a start, and until nothing waits any more."""

    def adopt(self) -> tuple[str, ...]:
        """Give a row to each attachment of a replaced plugin that has none. Returns the devices that got one.

        Call it at a start, before anything is granted, for as long as `is_due`; and when a VF has left the host
        without our doing. Rows that exist are left alone. An attachment whose pod is gone gets a row too, *attached*,
        for the reconciler to undo. Files that are not understood stay. Does nothing, quickly, where no replaced plugin
        ever was. Raises nothing but LedgerError.
        """
        self.is_due = False
        try:
            adopted = self._adopt_all([(kind, file) for kind in sriov_state.KINDS for file in self._files(kind)])
        except BaseException:  # the books cannot be written, say, and what comes behind that file has no row yet
            self.is_due = True
            raise
        self._logged = {name for name in self._logged if os.path.lexists(name)}
        return adopted

    def adopt_of(self, container_id: str, ifname: str) -> tuple[str, ...]:
        """Give a row to what a replaced plugin attached for one container: its DEL has come, and no row is about it.

        The old program may have attached it after our start, while its name was still its own.
        """
        places = [(kind, self._state / kind / f"{container_id}-{ifname}") for kind in sriov_state.KINDS]
        return self._adopt_all([(kind, file) for kind, file in places if os.path.lexists(file)])

    def _adopt_all(self, files: Sequence[tuple[str, Path]]) -> tuple[str, ...]:
        devices = []
        for kind, file in files:
            try:
                if (device := self._adopt(kind, file)) is not None:
                    devices.append(device)
            except Unreadable as error:
                self._log(file, f"is left as it is, and adopted by nobody: {error}")
            except (DeviceBusy, HardwareError, OSError) as error:
                self.is_due = True
                self._log(file, f"is looked at again later: {error}")
        return tuple(devices)

    def _files(self, kind: str) -> list[Path]:
        """List a plugin's files, newest first.

        A lost DEL leaves a file of a former owner beside that of the present one, and the path of the
        namespace is the present one's.
        """
        try:
            return sorted(files_in(self._state / kind), key=_age)
        except Unreadable as error:
            self._log(self._state / kind, str(error))
            return []

    def _log(self, what: Path, text: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            log.warning("%s %s", what, text)

    def _adopt(self, kind: str, file: Path) -> str | None:
        record = sriov_state.read(self._state, kind, file)
        device = record.device
        if self._has_row(device, file):
            return None
        lock = sriov_state.lock_of(self._state, self._run, kind, device)
        with adopted_rows.locked(lock, LOCK_SECONDS), self._node.locks.hold([device], LOCK_SECONDS):
            # Its DEL may have come meanwhile, or another ADD, with the one or the other program.
            if not file.exists() or self._has_row(device, file):
                return None
            if sriov_state.read(self._state, kind, file) != record:
                raise DeviceBusy(f"{file} was written again meanwhile")
            self._write(record, lock)
        return device

    def _has_row(self, device: str, file: Path) -> bool:
        """Return whether this file has been adopted. Raises DeviceBusy if the device is another's."""
        row = self._node.ledger.attachment_on(device)
        if row is None:
            return False
        if str(file) in row.request.get(adopted_rows.KEY, {}).get("files", ()):
            return True
        raise DeviceBusy(f"{device} belongs to container {row.owner.container_id}")

    def _write(self, record: Record, lock: Path) -> None:
        with ExitStack() as held:
            path, descriptor = self._find(record, held)
            netns = namespaces.identity(descriptor) if descriptor is not None else NOWHERE
            is_past = descriptor is None and self._is_past(record)
            if is_past:
                undo = Undo(record.netdev, record.mac or "", record.mtu or 0, up=False)
            else:
                link = self._link(record, descriptor)
                undo = _undo_of(self._node.host, self._node.scans.value, record, link, descriptor)
        conf = record.conf
        call = Call(record.container_id, record.ifname, None, path, record.pod, record.cni_args, CNI_PATH, conf)
        remark = {"files": [*map(str, record.files)], "lock": str(lock), "netns_path": record.netns_path}
        self._node.ledger.adopt(
            Attachment(
                0,
                Owner(record.container_id, record.ifname, record.pod, netns),
                record.ifname,
                record.device,
                self._node.ledger.resource_held(record.device) or "",
                AttachmentState.ATTACHED,
                undo,
                BEFORE if is_past else self._node.ledger.boot_id,
                path,
                request_of(call, conf) | {adopted_rows.KEY: remark},
                record.result,
            )
        )
        where = f"at {path}" if netns != NOWHERE else "of an earlier boot" if is_past else "gone or hidden"
        log.warning("adopted %s; its pod is %s", record, where)

    def _is_past(self, record: Record) -> bool:
        """Return whether what is at the address now cannot be what was given to the pod: that VF is no more.

        Files outlive a reboot, and an address is a place: the next boot may have another VF there, which has
        nothing of that pod, or an adapter that the node lives by.
        """
        facts = self._node.scans.value.by_address.get(record.device)
        if facts is not None and not facts.is_vf:
            return True
        booted = _boot_time(self._node.host.root)
        try:
            written = record.files[0].lstat().st_mtime
        except OSError:
            return False
        return booted is not None and written < booted - CLOCK_SECONDS

    def _find(self, record: Record, held: ExitStack) -> tuple[str, int | None]:
        """Find the namespace that has the device: at the written path, or by search. Returns its path and it, open.

        The path alone proves nothing for an interface: after a reboot it may be another pod's.
        """
        for path in self._candidates(record):
            with ExitStack() as unless_it:
                try:
                    opened = unless_it.enter_context(FileIO(path))
                    is_it = self._is_in(record, opened.fileno())
                except (HardwareError, OSError) as error:
                    log.info("the namespace at %s cannot be searched: %s", path, error)
                    continue
                if is_it:
                    held.push(unless_it.pop_all())
                    return str(path), opened.fileno()
        return record.netns_path or UNWRITTEN, None

    def _is_in(self, record: Record, descriptor: int) -> bool:
        netns, mine = namespaces.identity(descriptor), namespaces.own()
        if netns.device != mine.device or netns == mine:  # all namespaces are files of one nsfs
            return False
        return record.for_programs or self._node.host.links.find_device(record.device, descriptor) is not None

    def _candidates(self, record: Record) -> Iterator[str | Path]:
        if record.netns_path:
            yield record.netns_path
        if not record.for_programs and self._node.host.find_netdev(record.device) is None:
            yield from namespaces.living(self._netns_folders).values()

    def _link(self, record: Record, descriptor: int | None) -> Link | None:
        found = self._node.host.links.find_device(record.device, descriptor) if descriptor is not None else None
        return found or self._node.host.find_netdev(record.device)


def _undo_of(host: Host, snapshot: Snapshot, record: Record, link: Link | None, netns: int | None) -> Undo:
    """Say how the device was, from what was written, and from what is seen where that is missing."""
    undo = Undo(
        netdev="" if record.for_programs else _name(host, record, link),
        mac=record.mac or (link.mac if link is not None else ""),
        mtu=record.mtu or (link.mtu if link is not None else 0),
        up=False,
        altnames=tuple(name for name in link.altnames if name != record.netdev) if link is not None else (),
        mode="vfio" if record.for_programs else mode_for(record.conf, snapshot),
    )
    if record.for_programs:
        undo = replace(undo, mac="", mtu=0)
    if record.rdma is not None and netns is not None:
        undo = _with_rdma(host, undo, record.rdma, netns)
    # It writes the GUID before down also where it gave no other.
    is_given = undo.mode == "infiniband" and record.guid is not None and record.conf.guid is not None
    if record.before == VfSettings() and not is_given:
        return undo
    facts = snapshot.by_address.get(record.device)
    uplink = pf.interface(host, record.device)
    if facts is None or uplink is None or facts.vf_index != record.vf_index:
        log.warning("what the PF enforced before is not put back: %s has another place than it had", record)
        return undo
    if is_given:
        undo = guid.adopted(host, record.device, facts.vf_index, undo, str(record.guid))
    return replace(undo, pf_netdev=uplink.name, vf_index=facts.vf_index, settings=record.before)


def _name(host: Host, record: Record, link: Link | None) -> str:
    """Name the interface in the host. One that sits in a pod has a name for there."""
    at_home = host.find_netdev(record.device) if link is not None else None
    return record.netdev or (at_home.name if at_home is not None else name_by_place(record.device))


def _with_rdma(host: Host, undo: Undo, names: tuple[str, str], netns: int) -> Undo:
    """Add the RDMA device that is in the pod; one that is not needs no way back."""
    found = next((d for d in host.rdma.devices(netns) if d.name == names[1]), None)
    if found is None:
        return undo
    return replace(undo, rdma=names[0], extra={**undo.extra, "rdma_index": found.index})


def _boot_time(root: Path) -> float | None:
    """Return when the machine was booted, in seconds since the epoch; None if the kernel's word cannot be read."""
    try:
        lines = (root / "proc/stat").read_text().splitlines()
    except OSError:
        return None
    return next((float(line.split()[1]) for line in lines if line.startswith("btime ")), None)


def _age(file: Path) -> tuple[int, str]:
    try:
        return -file.lstat().st_mtime_ns, file.name
    except OSError:
        return 0, file.name
