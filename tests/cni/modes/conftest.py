"""A kernel with all kinds of interfaces that are made for pods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from agent.errors import NetlinkFailed
from agent.hardware.host import Child, Link, LinkChange
from agent.hardware.netlink.links import Netlink
from agent.hardware.netlink.rtnetlink import LinkMessage
from hack.sim.fabric import device_of


class Kernel(Netlink):
    """Makes a bridge for a bond and an ifb for any other child, and calls these as they were asked for."""

    def __init__(self) -> None:
        super().__init__(device_of)
        self.kind, self.bond = "macvlan", "bond"
        self.refuse: int | None = None
        """errno for a child in a pod."""
        self.made: list[Child] = []
        self.before_move: Callable[[], None] = lambda: None
        self.before_change: Callable[[LinkChange], None] = lambda change: None

    def move_in(self, link: Link, netns: int, change: LinkChange) -> None:
        self.before_move()
        super().move_in(link, netns, change)

    def create(self, child: Child, parent: Link | None, netns: int | None) -> None:
        if netns is not None and self.refuse is not None:
            raise NetlinkFailed("make it", self.refuse, "refused")
        self.made.append(child)
        kind, mtu = ("ifb", parent.mtu) if parent is not None else ("bridge", None)
        super().create(replace(child, kind=kind, mtu=child.mtu or mtu), parent, netns)

    def change(self, link: Link, change: LinkChange, netns: int | None = None) -> None:
        self.before_change(change)
        super().change(link, change, netns)
        if change.master is not None:  # as a bond does
            super().change(link, LinkChange(up=True), netns)

    def _link(self, message: LinkMessage) -> Link:
        link = super()._link(message)
        return replace(link, kind={"ifb": self.kind, "bridge": self.bond}.get(link.kind, link.kind))


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with closing(Kernel()) as kernel:
        yield kernel
