"""What of the hardware may be other than the last scan saw. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Change:
    """What kernel events named since the last look. Changes add up with `|`; an empty one is false."""

    functions: frozenset[str] = frozenset()
    """Addresses of PCI functions that changed, with all that hangs on them."""
    netdevs: frozenset[str] = frozenset()
    """Names of interfaces of which the event did not tell the function."""
    bus: bool = False
    """Functions came or went."""
    gpus: bool = False
    """What the GPUs' driver says of them."""
    everything: bool = False
    """Nobody knows what changed."""

    def __or__(self, other: Change) -> Change:
        return Change(
            self.functions | other.functions,
            self.netdevs | other.netdevs,
            self.bus or other.bus,
            self.gpus or other.gpus,
            self.everything or other.everything,
        )

    def __bool__(self) -> bool:
        return bool(self.functions or self.netdevs or self.bus or self.gpus or self.everything)


OnEvent = Callable[[str, Change], None]
"""What happened, for the log, and what is to be looked at."""

NOTHING = Change()
GPUS = Change(gpus=True)
EVERYTHING = Change(everything=True)


def of_function(address: str, *, bus: bool = False) -> Change:
    """Name one PCI function."""
    return Change(frozenset((address,)), bus=bus)


def of_netdev(name: str) -> Change:
    """Name one interface."""
    return Change(netdevs=frozenset((name,)))
