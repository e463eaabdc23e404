"""Short ways to books with something in them, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.ledger import Ledger
from agent.model.allocation import Attachment, NetnsId, Owner, PodRef, Undo

VF = "0000:3b:00.2"
POD = PodRef("default", "trainer", "uid-1")


@contextmanager
def open_books(folder: Path, boot_id: str = "boot", clock: Callable[[], float] = time.time) -> Iterator[Ledger]:
    """Open the ledger in a folder, and close it."""
    books = Ledger.open(folder / "ledger.db", boot_id, clock)
    try:
        yield books
    finally:
        books.close()


def owner(container_id: str = "c1", cni_ifname: str = "net1") -> Owner:
    """Name a container of POD."""
    return Owner(container_id, cni_ifname, POD, NetnsId(4, 4026531840))


def attach(books: Ledger, device: str, who: Owner, **request: object) -> Attachment:
    """Begin an attachment."""
    return books.begin_attach(
        who,
        ifname=who.cni_ifname,
        device=device,
        resource_name="rdma/vf",
        undo=Undo("ens1f0v0", "02:00:00:00:01:00", 1500, False),
        netns_path="/nowhere",
        request={"name": "net", "network": None, **request},
    )
