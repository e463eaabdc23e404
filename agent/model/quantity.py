"""Kubernetes resource quantities: `4096`, `2Gi`, `1500M`, `500m`, `1e3`."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal
from typing import Any

_SUFFIXES = {
    "": Decimal(1),
    "n": Decimal(10) ** -9,
    "u": Decimal(10) ** -6,
    "m": Decimal(10) ** -3,
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(1 << 10),
    "Mi": Decimal(1 << 20),
    "Gi": Decimal(1 << 30),
    "Ti": Decimal(1 << 40),
    "Pi": Decimal(1 << 50),
    "Ei": Decimal(1 << 60),
}
_QUANTITY = re.compile(
    r"\+?([0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})"
    rf"(?:({'|'.join(filter(None, _SUFFIXES))})|[eE]([+-]?[0-9]{{1,2}}))?"
)


def parse_exact(value: Any) -> Decimal:
    """Read a non-negative quantity. Raises ValueError."""
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise ValueError(f"{value!r} is not a quantity such as 4096, 2Gi or 500m")
    scale = Decimal(10) ** int(match[3]) if match[3] else _SUFFIXES[match[2] or ""]
    return Decimal(match[1]) * scale


def parse_quantity(value: Any) -> int:
    """Read a non-negative quantity as a whole number, rounded up as Kubernetes does. Raises ValueError."""
    return int(parse_exact(value).to_integral_value(ROUND_CEILING))


def parse_milli(value: Any) -> int:
    """Read a non-negative quantity in thousandths, rounded up: `0.5` and `500m` → 500. Raises ValueError."""
    return int((parse_exact(value) * 1000).to_integral_value(ROUND_CEILING))


def milli_text(milli: int) -> str:
    """Write thousandths as Kubernetes would: 2000 → `2`, 1500 → `1500m`."""
    return f"{milli}m" if milli % 1000 else str(milli // 1000)


def page_size_name(size: int) -> str:
    """Name the huge pages of a size in bytes as kubelet does: 2097152 → `hugepages-2Mi`."""
    for suffix, unit in (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if size % unit == 0:
            return f"hugepages-{size // unit}{suffix}"
    return f"hugepages-{size}"


def is_memory(resource_name: str) -> bool:
    """Return whether a resource is memory or huge pages."""
    return resource_name == "memory" or resource_name.startswith("hugepages-")
