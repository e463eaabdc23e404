"""The ledger: what this node promised to kubelet and did to hardware.

Owns ledger.db and every SQL statement. Knows nothing of gRPC, CNI or netlink.
A row is written before the hardware is touched, so a crash leaves a row to undo, never a lost
device. Writes are done one at a time. Holds, attachments and claims are read from memory, which changes with
each commit: the process that has the file open is its only writer. Other reads have a connection of
their own, so that none waits for a write that waits for the disk. All run on the caller's thread,
which may be any but the event loop's: a pod's start waits for them, and to wake another thread takes
longer than to write a row.

Who comes second for a device, by a unit, a slot or a claim, is refused (`holds`).

Durability: each change is one commit, and survives the death of the process once its method returns.
What a power cut must not take either is on the disk by then (`synchronous=FULL`, which takes some
milliseconds): an attachment that gets addresses, since leases outlive the power cut, and a quarantine.
The rest is handed to the kernel (`NORMAL`). For a reboot undoes every attachment: a row that has lost
its last step is cleaned up as any row of an earlier boot, and one that is there again gives its
addresses back once more, which is harmless. Units are told again by kubelet's PodResources, and claims
by kubelet itself. This keeps a slow disk out of pod admission, and out of the start of pods that get no
addresses.

Other processes read through `database.read_books`, which works on a copy and never writes.
"""

from __future__ import annotations

from agent.ledger.devices import DeviceBook
from agent.ledger.holds import HoldBook
from agent.ledger.schema import SCHEMA_VERSION

__all__ = ["SCHEMA_VERSION", "Ledger"]


class Ledger(HoldBook, DeviceBook):
    """Open books. Use `Ledger.open`; close it when done."""
