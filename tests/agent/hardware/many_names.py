"""Interfaces that are long to tell of, as a pod may make them."""

from __future__ import annotations

from contextlib import closing

from agent.hardware.netlink.links import Netlink

NAMES = 495
"""Of 127 bytes each: the kernel takes 64 KiB of them."""


def give_all_names(name: str, netns: int | None = None) -> None:
    """Give an interface as many other names as it can have, no two interfaces the same."""
    with closing(Netlink()) as links:
        found = links.find(name, netns)
        assert found is not None
        links.change_altnames(
            found, add=tuple(f"{name}-{number}".ljust(127, "x") for number in range(NAMES)), netns=netns
        )
