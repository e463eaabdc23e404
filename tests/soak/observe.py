"""Looks at a node with nothing that is under test: iproute2, SQLite, the IPAM plugin's own files."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import fields
from pathlib import Path

from tests.soak.world import HOST, Hold, Lease, Row, Seen, Shape


def links(pods: Mapping[str, int]) -> dict[str, tuple[Seen, ...]]:
    """Find the interfaces of all devices, in the host and in the pods' namespaces."""
    found: dict[str, tuple[Seen, ...]] = {}
    for place in (HOST, *pods):
        for device, shape in _links_in(place):
            found[device] = (*found.get(device, ()), Seen(place, shape))
    return found


def _links_in(place: str) -> Iterator[tuple[str, Shape]]:
    enter = [] if place == HOST else ["nsenter", f"--net={place}"]
    done = subprocess.run([*enter, "ip", "-details", "-json", "link", "show"], capture_output=True, check=False)
    if done.returncode != 0:
        return  # the pod has gone meanwhile
    for link in json.loads(done.stdout):
        # A simulated device is told by its alias, a real one by what is below it.
        device = link.get("ifalias") or link.get("parentdev")
        if device is not None:
            yield device, Shape(link["ifname"], link["address"], link["mtu"], "UP" in link["flags"])


def namespaces(folder: Path) -> dict[str, int]:
    """List the namespaces that are pinned in a folder: path → inode."""
    home = folder.stat().st_dev
    found = {}
    for path in sorted(folder.glob("*.netns")):
        status = path.stat()
        if status.st_dev != home:
            found[str(path)] = status.st_ino
    return found


class Books:
    """What the ledger says, as `World` calls it."""

    def __init__(self, path: Path) -> None:
        self.rows: tuple[Row, ...] = ()
        self.quarantine: dict[str, str] = {}
        self.owed: tuple[tuple[str, str], ...] = ()
        self.holds: tuple[Hold, ...] = ()
        self.damage: str | None = None
        if not path.exists():
            return
        with _copy(path) as copy, closing(sqlite3.connect(copy)) as db:
            db.row_factory = sqlite3.Row
            try:
                self._read(db)
            except sqlite3.DatabaseError as error:
                self.damage = str(error)

    def _read(self, db: sqlite3.Connection) -> None:
        (state,) = db.execute("PRAGMA integrity_check").fetchone()
        self.damage = None if state == "ok" else str(state)
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'attachments'").fetchone():
            return
        rows = db.execute("SELECT * FROM attachments ORDER BY attachment_id")
        self.rows = tuple(Row(*(row[field.name] for field in fields(Row))) for row in rows)
        self.quarantine = {r["device"]: r["reason"] for r in db.execute("SELECT * FROM quarantine")}
        self.owed = tuple((r["container_id"], r["ifname"]) for r in db.execute("SELECT * FROM owed_leases"))
        plain = [
            Hold("slot", r["key"], r["device"], r["container_id"])
            if r["bound_at"]
            else Hold("unit", r["resource_name"], r["device"])
            for r in db.execute("SELECT * FROM holds JOIN hold_devices USING (key) WHERE claim_uid = '' ORDER BY key")
        ]
        joined = "claims c LEFT JOIN holds h USING (claim_uid) LEFT JOIN hold_devices d USING (key)"
        claims = [
            Hold("claim", r["claim_uid"], r["device"] or "", "", r["key"] or "", r["state"], pods, r["boot_id"])
            for r in db.execute(f"SELECT c.*, key, device FROM {joined} ORDER BY claim_uid, h.rowid")
            for pods in (frozenset(pod["name"] for pod in json.loads(r["pods"])),)
        ]
        self.holds = (*claims, *plain)


@contextmanager
def _copy(path: Path) -> Iterator[Path]:
    """Copy the files, so that looking neither completes nor checkpoints what a crash has left."""
    with tempfile.TemporaryDirectory(prefix="nf-look-") as folder:
        for part in path.parent.glob(f"{path.name}*"):
            if part.name in (path.name, f"{path.name}-wal"):
                shutil.copy(part, folder)
        yield Path(folder, path.name)


def leases(folder: Path) -> tuple[Lease, ...]:
    """Read what host-local has leased: a folder for each network, a file for each address, its owner in it."""
    found = []
    for file in sorted(folder.glob("*/*")):
        if file.name == "lock" or file.name.startswith("last_reserved"):
            continue
        try:
            lines = file.read_text().splitlines()
        except FileNotFoundError:
            continue  # given back meanwhile
        found.append(Lease(file.name, lines[0] if lines else "", lines[1] if len(lines) > 1 else ""))
    return tuple(found)


def specs(folder: Path) -> dict[str, str]:
    """Read our CDI specs: slot, or UID of a claim → text."""
    paths = [*folder.glob("nodefabric-slot-*.json"), *folder.glob("nodefabric-claim-*.json")]
    return {re.sub("^nodefabric-(claim-)?", "", path.stem): path.read_text() for path in paths}


def claim_files(folder: Path) -> dict[str, str]:
    """Read the files that tell containers of their claims' devices: name → text."""
    return {path.name: path.read_text() for path in folder.glob("nodefabric-claim-*.metadata")}


def spool(folder: Path) -> tuple[str, ...]:
    """List the DELs that wait on disk."""
    return tuple(sorted(os.listdir(folder))) if folder.exists() else ()


def everything(folder: Path) -> tuple[object, ...]:
    """Return something that differs when anything on the node does: links, addresses, routes, files, books."""
    shown = []
    for place in (HOST, *namespaces(folder / "pods")):
        enter = [] if place == HOST else ["nsenter", f"--net={place}"]
        for words in (["address"], ["route", "show", "table", "all"]):
            shown.append(subprocess.run([*enter, "ip", "-details", *words], capture_output=True, check=False).stdout)
    files = []
    for path in sorted(folder.rglob("*")):
        if (
            path.parts[len(folder.parts)] in ("root", "agent.log")
            or path.suffix == ".netns"
            or path.name.endswith("-shm")
        ):
            continue
        with suppress(FileNotFoundError):
            status = path.lstat()
            files.append((str(path), status.st_size, status.st_mtime_ns if path.is_file() else 0))
    return *shown, tuple(files)
