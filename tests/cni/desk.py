"""Leases with their books, and plugins that a test writes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent.ledger import Ledger
from agent.model.allocation import Attachment
from cni.call import LeasingNetwork
from cni.ipam.leases import LeaseBook
from cni.ipam.plugins import namespace_of
from tests.node import attach, open_books, owner

PLUGINS = "/opt/cni/bin:/usr/lib/cni"
NOTES = "echo $CNI_COMMAND $CNI_CONTAINERID >>$(dirname $0)/calls; "
"""What a plugin begins with that writes down what it was asked; `said` reads it."""


class Desk:
    """A lease book on real books, and plugins made of shell scripts."""

    def __init__(
        self,
        folder: Path,
        books: Ledger,
        seconds: float = 30.0,
    ) -> None:
        self.folder = folder
        self.books = books
        self.now = time.time()
        self.leases = LeaseBook(
            books,
            most_seconds=seconds,
            clock=lambda: self.now,
            uptime=lambda: self.now,
        )
        self._devices = 0

    def plugin(self, name: str, script: str) -> None:
        """Write a plugin. `$CNI_COMMAND` is ADD or DEL."""
        fresh = self.folder / f"{name}.new"
        fresh.write_text(f"#!/bin/sh\n{script}\n")
        fresh.chmod(0o755)
        fresh.rename(self.folder / name)

    def row(
        self, container_id: str, kind: str = "stub", *, network_name: str = "rails", namespace: str = "", **ipam: Any
    ) -> Attachment:
        """Begin an attachment whose addresses come from a plugin."""
        self._devices += 1
        network = {"cniVersion": "1.0.0", "name": network_name, "type": "nodefabric", "ipam": {"type": kind, **ipam}}
        args = f"IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME=pod" if namespace else ""
        request = {"name": network_name, "network": network, "cni_args": args, "cni_path": f"{self.folder}:{PLUGINS}"}
        return attach(self.books, f"0000:3b:00.{self._devices}", owner(container_id), request=request)

    def trusted(self, row: Attachment) -> Attachment:
        """Have the network of a row count as one that has answered."""
        network = row.request["network"]
        namespace = namespace_of(row.request["cni_args"])
        self.leases.trust.note_answer(LeasingNetwork.of(network["name"], network["ipam"]), namespace)
        return row

    def owe(self, container_id: str, kind: str = "stub") -> None:
        """Owe the lease of an interface that is gone."""
        self.books.finish_detach(self.row(container_id, kind), lease_owed=True)

    def owed(self) -> list[str]:
        """List the containers whose leases are owed."""
        return [lease.container_id for lease in self.books.owed_leases()]

    def said(self, file: str = "calls") -> list[str]:
        return said(self.folder, file)


@contextmanager
def open_desk(folder: Path, seconds: float = 30.0) -> Iterator[Desk]:
    with open_books(folder) as books:
        desk = Desk(folder, books, seconds)
        try:
            yield desk
        finally:
            desk.leases.close()


def said(folder: Path, file: str = "calls") -> list[str]:
    """Read what the plugins of a folder noted."""
    path = folder / file
    return path.read_text().splitlines() if path.exists() else []


def lives(pid: int | str) -> bool:
    """Tell whether a process is there that has not ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False
