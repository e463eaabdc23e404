"""What a reconciler is told by a test of kubelet and the offer, and what it did."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from agent.reconcile import HeldUnit, Outside


async def no_held_units() -> tuple[HeldUnit, ...]:
    return ()


class ToldOutside(Outside):
    """Answers as told, and lists what was counted."""

    def __init__(
        self,
        units: Callable[[], Mapping[str, str] | None],
        ours: Callable[[], Collection[str]] = tuple,
        held_units: Callable[[], Awaitable[Sequence[HeldUnit]]] = no_held_units,
        replay: Callable[[], int] = int,
    ) -> None:
        self.counted: list[tuple[str, str]] = []
        self._units = units
        self._ours = ours
        self._held_units = held_units
        self._replay = replay

    async def held_units(self) -> Sequence[HeldUnit]:
        return await self._held_units()

    def devices_of_units(self) -> Mapping[str, str] | None:
        return self._units()

    def our_vfs(self) -> Collection[str]:
        return self._ours()

    def replay(self) -> int:
        return self._replay()

    def count(self, action: str, reason: str) -> None:
        self.counted.append((action, reason))
