"""Interfaces that are long to tell of, as a pod may make them."""

from __future__ import annotations

from agent.hardware.netlink.rtnetlink import LinkSocket

NAMES = 495
"""Of 127 bytes each: the kernel takes 64 KiB of them."""


def give_all_names(name: str, netns: int | None = None) -> None:
    """Give an interface as many other names as it can have, no two interfaces the same."""
    with LinkSocket(netns) as links:
        found = links.find(name)
        assert found is not None
        for number in range(NAMES):
            links.add_altname(found.ifindex, f"{name}-{number}".ljust(127, "x"))
