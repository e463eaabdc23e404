"""Sets of VLAN IDs, VFs or CPUs as ranges, and in the text that people write and kernels show: 100,200-210. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

UNTAGGED, LAST = 0, 4094
"""What a list of VLANs may hold: 0 stands for packets without a tag, 4095 is reserved (IEEE 802.1Q)."""
_RANGE = re.compile(r" *([0-9]{1,5})(?: *- *([0-9]{1,5}))? *")

Range = tuple[int, int]
"""The first ID and the last."""


def parse(text: str, highest: int = LAST) -> tuple[Range, ...]:
    """Read numbers and ranges with commas between them. Raises ValueError for anything else, and for an empty text."""
    return tuple(_parse_range(part, highest) for part in text.split(","))


def _parse_range(text: str, highest: int) -> Range:
    found = _RANGE.fullmatch(text)
    if found is None:
        raise ValueError(text)
    first = int(found[1])
    last = int(found[2]) if found[2] is not None else first
    if not first <= last <= highest:
        raise ValueError(text)
    return first, last


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sort ranges, and make one of those that meet or overlap."""
    found: list[Range] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return tuple(found)


def spelled(ranges: Iterable[Range]) -> str:
    """Write ranges as text, the same for the same numbers; empty for none."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in merged(ranges))


def ids(ranges: Iterable[Range]) -> frozenset[int]:
    """List every number of some ranges."""
    return frozenset(vlan for first, last in ranges for vlan in range(first, last + 1))


def ranges_of(vlans: Iterable[int]) -> tuple[Range, ...]:
    """Make ranges of numbers."""
    return merged((vlan, vlan) for vlan in vlans)
