"""Stands for kubelet, the runtime and the offer where a test reconciles."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from agent.kubelet.checkpoint import Entry
from agent.kubelet.cri import Sandbox
from agent.kubelet.podresources import HeldUnit
from agent.offer.offer import Offer
from agent.reconcile.view import Outside


async def no_held_units() -> tuple[HeldUnit, ...]:
    return ()


class Answers(Outside):
    """Answers as it is made to, and lists what was counted."""

    asks_runtime = False
    resolves_cdi: bool | None = None

    def __init__(
        self,
        units: Callable[[], Mapping[str, tuple[str, ...]] | None] = dict,
        ours: Callable[[], Collection[str]] = tuple,
        held_units: Callable[[], Awaitable[Sequence[HeldUnit]]] = no_held_units,
        replay: Callable[[], int] = int,
        pods: Callable[[], Collection[tuple[str, str]]] = tuple,
    ) -> None:
        self.counted: list[tuple[str, str]] = []
        self.renumbered: frozenset[tuple[str, str]] = frozenset()
        self.renumbered_text: str | None = None
        self.heal_failures: list[str] = []
        self.failures: str | None = None
        self.complaints: list[str | None] = []
        self.says_noted: Callable[[], Sequence[Entry] | None] = tuple
        said = {"devices_of_units": units, "our_vfs": ours, "held_units": held_units, "replay": replay, "pods": pods}
        for name, answer in said.items():
            setattr(self, name, answer)

    async def sandboxes(self) -> Sequence[Sandbox]:
        return ()

    def offer(self) -> Offer:
        return Offer()

    def noted(self) -> Sequence[Entry] | None:
        return self.says_noted()

    def count(self, action: str, reason: str) -> None:
        self.counted.append((action, reason))

    def misled(self, units: frozenset[tuple[str, str]], what: str | None) -> None:
        self.renumbered, self.renumbered_text = units, what

    def heal_failed(self, healer: str) -> None:
        self.heal_failures.append(healer)

    def failing(self, what: str | None) -> None:
        self.failures = what

    def complain(self, what: str | None) -> None:
        self.complaints.append(what)
