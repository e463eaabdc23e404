"""The relay's file of pods while the configuration is wrong: pods without a device of ours start and end all the same.

No agent serves then and nothing is granted, so what the books and kubelet's notes say stays true. Relays keep DELs on
disk, and pods that have a device wait for the repair.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from agent.config import Config
from agent.edits.cdi import write_whole
from agent.errors import Unavailable
from agent.kubelet import checkpoint
from agent.ledger.database import Books, lock_folder, read_books
from agent.model.device import is_pci_address
from agent.model.unit_id import UnitId, UnitKind
from cni import pods_file


def write(config: Config) -> None:
    """Name in the file all pods that may have something, whatever their resources are for.

    A file of this boot that knows them all stays: the last agent wrote it by the right configuration. Raises
    LedgerInUse while another agent serves, LedgerError, OSError, and Unavailable if kubelet's notes or claims cannot
    be read.
    """
    lock = lock_folder(config.state_dir)
    path, boot_id = pods_file.path_of(config.cni_socket), pods_file.kernel_boot_id()
    try:
        content = path.read_bytes() if path.exists() else b""
        if pods_file.is_of_boot(content, boot_id) and b"\nunknown 0\n" in content:
            return
        books, noted = read_books(config.ledger_path), checkpoint.entries(config.kubelet_dir)
        if noted is None and (config.kubelet_dir / checkpoint.FILE).exists():
            raise Unavailable(f"{config.kubelet_dir / checkpoint.FILE} cannot be read: it names pods that have devices")
        names = {*_names(books, noted or ())}
        # Lost books lack claims that kubelet has.
        known = {f"{claim.ref.namespace}/{claim.ref.name}" for claim in books.claims}
        for claim in set(checkpoint.claims_of(config.kubelet_dir, config.dra.driver)) - known:
            names.add(f"{claim.partition('/')[0]}/")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, pods_file.content_of(boot_id, names).decode(), pods_file.MODE)
    finally:
        os.close(lock)


def _names(books: Books, noted: Sequence[checkpoint.Entry]) -> Iterator[str | None]:
    """Name the pods as `pods_file` does; None stands for one that is not known."""
    uids = {unit: entry.pod_uid for entry in noted for unit in entry.unit_ids if _is_of_adapter(unit)}
    yield from uids.values()
    for hold in books.holds:
        if _is_of_adapter(hold.key) or any(map(is_pci_address, hold.devices)):
            yield pods_file.name_of(hold.pod, hold.container_id) or uids.get(hold.key)
    for row in books.attachments:
        yield pods_file.name_of(row.owner.pod, row.owner.container_id)
    for claim in books.claims:
        yield from pods_file.names_of_claim(claim, {})


def _is_of_adapter(unit_id: str) -> bool:
    """Return whether a unit may be one of ours that is no GPU, by its name."""
    return UnitId.parse(unit_id).kind in (UnitKind.DEVICE, UnitKind.SHARE, UnitKind.SLOT, UnitKind.RAIL)
