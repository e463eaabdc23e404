"""Kubernetes resource quantities, as far as memory and counts need them."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

_SUFFIXES = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "P": 10**15,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
    "Pi": 1 << 50,
}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(" + "|".join(_SUFFIXES) + ")")


def parse_quantity(value: Any) -> int:
    """Read a whole, non-negative quantity such as 4096, `2Gi` or `1500M`. Raises ValueError."""
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise ValueError(f"{value!r} is not a quantity such as 4096, 2Gi or 1500M")
    return int(Decimal(match[1]) * _SUFFIXES[match[2]])


def page_size_name(size: int) -> str:
    """Name the huge pages of a size in bytes as kubelet does: 2097152 → `hugepages-2Mi`."""
    for suffix in ("Gi", "Mi", "Ki"):
        if size % _SUFFIXES[suffix] == 0:
            return f"hugepages-{size // _SUFFIXES[suffix]}{suffix}"
    return f"hugepages-{size}"
