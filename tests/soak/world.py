"""What there is on a node at one moment, and what there should be: values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

HOST = "host"
"""The place of a link in the first network namespace; any other place is the path of a pod's namespace."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a device's interface looks like."""

    name: str
    mac: str
    mtu: int
    up: bool


@dataclass(frozen=True, slots=True)
class Seen:
    """A device's interface, and where it was found."""

    place: str
    shape: Shape


Settings = Mapping[str, object]
"""What a PF enforces on one VF, by the name of the setting."""


@dataclass(frozen=True, slots=True)
class Row:
    """One attachment in the ledger."""

    device: str
    container_id: str
    cni_ifname: str
    ifname: str
    state: str
    netns_inode: int
    boot_id: str
    claim_uid: str = ""


@dataclass(frozen=True, slots=True)
class Lease:
    """One address that the IPAM plugin has given away."""

    address: str
    container_id: str
    ifname: str


@dataclass(frozen=True, slots=True)
class Hold:
    """A device that somebody was given, by the ledger: before, while and after it is attached."""

    via: str
    """unit, slot or claim."""
    key: str
    """The unit's resource, the slot's ID, or the claim's UID."""
    device: str
    container_id: str = ""
    """For which a slot was bound."""
    cdi_name: str = ""
    """Of a claim's device."""
    state: str = ""
    """Of the claim."""
    pods: frozenset[str] = frozenset()
    """Names of those that the claim is for."""
    boot_id: str = "boot"
    """Of the claim."""


@dataclass(frozen=True, slots=True)
class World:
    """All that a crash can leave behind, as found at one moment."""

    links: Mapping[str, tuple[Seen, ...]]
    """Device → every place it was found in."""
    settings: Mapping[str, Settings]
    pods: Mapping[str, int]
    """Namespaces of living pods: path → inode."""
    rows: tuple[Row, ...] = ()
    quarantine: Mapping[str, str] = field(default_factory=dict)
    owed: tuple[tuple[str, str], ...] = ()
    """Container and interface of leases that the ledger still owes."""
    leases: tuple[Lease, ...] = ()
    spool: tuple[str, ...] = ()
    damage: str | None = None
    """What is wrong with the ledger's file."""
    holds: tuple[Hold, ...] = ()
    specs: Mapping[str, str] = field(default_factory=dict)
    """Slot, or UID of a claim → what its CDI spec says."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name of a file that tells a claim's containers of their devices → what it says."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What an ADD that succeeded has told the runtime about one interface. It holds until DEL."""

    device: str
    container_id: str
    cni_ifname: str
    ifname: str
    netns: str
    mac: str | None = None
    mtu: int | None = None
    settings: Settings = field(default_factory=dict)
    """Only what was asked for."""
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Expected:
    """What must be true, as far as the runtime knows."""

    shapes: Mapping[str, Shape]
    """How each device's interface is while nobody has it."""
    settings: Mapping[str, Settings]
    promises: tuple[Promise, ...] = ()
    unplugged: frozenset[str] = frozenset()
    """Devices that are off the bus."""
    promises_void: frozenset[str] = frozenset()
    """Devices that were off the bus while a pod had them: what that pod was told holds no more."""
    left_out: tuple[tuple[str, str], ...] = ()
    """Device and container of pods that kubelet gave a device, and that started without it."""
    prepared: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Claims that kubelet was told to be prepared → their CDI names."""
    boot_id: str = "boot"
    unprepared: frozenset[str] = frozenset()
    """Claims that kubelet was told to be unprepared."""
    damaged: bool = False
    """Whether books or specs of claims were taken away, and no agent has started since."""
    untold: frozenset[str] = frozenset()
    """Claims whose files were taken away, and which kubelet has not had prepared since."""
    leases_are_ours: bool = True
    """False where the leases' folder is no part of the node."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must never be."""

    what: str
    """A device, a lease, a file."""
    text: str
    history: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.what}: {self.text}", *(f"    {line}" for line in self.history)])


MOST_LINES = 30


class History:
    """A list of events in order, each with the names it concerns."""

    def __init__(self) -> None:
        self._events: list[tuple[str, frozenset[str]]] = []

    def note(self, text: str, *concerned: str) -> None:
        """Add an event. One that concerns nobody in particular concerns all."""
        self._events.append((text, frozenset(concerned)))

    def of(self, what: str) -> tuple[str, ...]:
        """Return the last events that concern a device or container, or everybody."""
        own = [text for text, concerned in self._events if not concerned or what in concerned]
        return tuple(own[-MOST_LINES:])

    def all(self) -> tuple[str, ...]:
        """Return all events."""
        return tuple(text for text, _ in self._events)
