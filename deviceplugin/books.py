"""What of the ledger bears on the device lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from agent.model.allocation import Attachment, Grant, Quarantine
from agent.model.device import is_pci_address
from deviceplugin.allocation import GrantBook
from deviceplugin.assignment import EXCLUSIVE_KINDS, Assignment


class Books(GrantBook, Protocol):
    """The part of the ledger that device plugins need. All but `subscribe` block."""

    def quarantines(self) -> tuple[Quarantine, ...]:
        """List the withheld devices."""

    def attachments(self) -> tuple[Attachment, ...]:
        """List all devices in pods."""

    def grants(self) -> tuple[Grant, ...]:
        """List all grants."""

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call after each change, on some thread."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read of the books. Two that are equal make the same lists, but for who holds what."""

    quarantined: Mapping[str, str] = field(default_factory=dict)
    """Device → reason."""
    host_names: Mapping[str, str] = field(default_factory=dict)
    """Device in a pod → name of its interface in the host; empty if nobody asks."""
    holders: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Device in use → the resource that it was handed out under."""
    attached: frozenset[str] = field(default=frozenset(), compare=False)
    """Of these, the ones that are in a pod for certain."""


def read(books: Books, *, with_names: bool) -> Reading:
    """Read the books. `with_names` if a selector asks for interface names. Raises LedgerError."""
    attached = books.attachments()
    ours = {a.device: a.resource_name for a in attached if a.resource_name and is_pci_address(a.device)}
    return Reading(
        quarantined={q.device: q.reason for q in books.quarantines()},
        host_names={a.device: a.undo.netdev for a in attached} if with_names else {},
        holders={g.device: g.resource_name for g in books.grants() if g.device} | ours,
        attached=frozenset(ours),
    )


def owners_of(assignment: Assignment) -> Mapping[str, str]:
    """Tell which resource each device goes to that only one container may have."""
    return {
        found.candidate.device: name
        for name, taken in assignment.taken.items()
        for found in taken
        if found.kind in EXCLUSIVE_KINDS
    }


def strays_of(reading: Reading, owners: Mapping[str, str]) -> Mapping[str, str]:
    """Pick the devices in use that the selectors give to another resource than they were handed out under.

    Or to none: then only those that are in a pod for certain count, as a grant may be of an HCA that many share.
    """
    return {
        device: resource_name
        for device, resource_name in reading.holders.items()
        if owners.get(device, "" if device in reading.attached else resource_name) != resource_name
    }
