"""Text as people may be shown it. Pure.

Text from outside ends no line of a terminal, so that it forges no row, and gives no orders. Values whose key says that
they are secrets, and passwords in addresses, are left out.

Lists of names and devices in short, and Kubernetes resource quantities: `4096`, `2Gi`, `1500M`, `500m`, `1e3`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import ROUND_CEILING, Decimal
from typing import Any

from agent.model.device import PciDevice, Snapshot, cpu_list

MASK = "[not shown]"
_NAME = re.compile(
    r"token|passw|passphrase|secret|authori[sz]ation|credential|(?:private|api|access|auth|account|encryption)[-_]?key"
    r"|(?:^|[-_])(?:pass|pwd|psk)$",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(r"(://[^/\s:@]*:)[^/\s]+@")
"""The password of `https://user:password@host`."""


def one_line(text: str) -> str:
    """Spell out whatever is no letter, as in Python: a pod may have it in the name of an interface, a plugin in an
    error."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def joined(lines: Iterable[str]) -> str:
    """Make one text of lines, each of which stays one."""
    return "\n".join(map(one_line, lines))


def is_secret(name: str) -> bool:
    """Tell whether a key, or a line of text, looks as if a secret followed."""
    return _NAME.search(name) is not None


def masked(value: Any) -> Any:
    """Copy a tree of mappings and lists without what must not be shown. Keys stay, so that one sees what was said."""
    if isinstance(value, Mapping):
        return {k: MASK if is_secret(str(k)) and inner else masked(inner) for k, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner) for inner in value]
    return masked_text(value) if isinstance(value, str) else value


def masked_text(text: str) -> str:
    """Leave out the passwords in addresses of a text."""
    return _IN_ADDRESS.sub(rf"\1{MASK}@", text) if "://" in text else text


def unknown(word: str, known: Iterable[str], what: str = "key") -> str:
    """Say that a word is not known, which one was probably meant, and which are known."""
    import difflib  # only where something is wrong: a pod's start would wait for it

    names = sorted(known)
    plain = {name.lower(): name for name in names}
    near = difflib.get_close_matches(word.lower(), plain, 1, 0.7)
    meant = f" (did you mean {plain[near[0]]!r}?)" if near else ""
    return f"is not a known {what}{meant}; known are: {', '.join(names)}"


_SUFFIXES = {
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate(["n", "u", "m", "", *"kMGTPE"], -3)},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)},
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


MOST_NAMED = 4


def some(names: Sequence[str], most: int = MOST_NAMED) -> str:
    """Name the first ones and count the rest; empty for none."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def grouped(devices: Iterable[str], snapshot: Snapshot, most: int = MOST_NAMED) -> str:
    """Name devices: VFs by PF and range (`ens1f0np0: VFs 0–7, 9`), GPUs by number, others as they are; empty for none.

    A device is called by its PCI address, with anything behind it, or by its UUID.
    """
    others: list[str] = []
    indices: dict[str, list[int]] = {}
    gpus: list[int] = []
    for device in devices:
        found = snapshot.by_address.get(device.partition(" ")[0])
        if found is not None and found.physfn is not None and found.vf_index is not None:
            indices.setdefault(found.physfn, []).append(found.vf_index)
        elif found is None and device in snapshot.gpu_by_uuid:
            gpus.append(snapshot.gpu_by_uuid[device].index)
        else:
            others.append(device)
    alike: dict[str, list[str]] = {}
    for pf, numbers in indices.items():
        alike.setdefault(numbered("VF", numbers), []).append(adapter_name(snapshot.by_address.get(pf)) or pf)
    parts = [
        *([numbered("GPU", gpus)] if gpus else []),
        *([some(others, most)] if others else []),
        *_of_pfs(alike, most),
    ]
    rest = len(parts) - most
    return "; ".join([*parts[:most], *([f"and VFs of {rest} more ranges"] if rest > 0 else [])])


def _of_pfs(alike: Mapping[str, Sequence[str]], most: int) -> Iterator[str]:
    for vfs, pfs in alike.items():
        yield f"{some(pfs, most)}: {vfs}" + (" each" if len(pfs) > 1 else "")


def adapter_name(device: PciDevice | None) -> str:
    """Name an adapter by its interface in the host, else by its PCI address; empty for none."""
    if device is None:
        return ""
    return device.netdev.name if device.netdev is not None else device.address


def numbered(what: str, numbers: Sequence[int]) -> str:
    """Name things by their numbers: `VF 3`, `GPUs 0–3, 7`."""
    ranges = cpu_list(numbers).replace("-", "–").replace(",", ", ")
    return f"{what} {ranges}" if len(numbers) == 1 else f"{what}s {ranges}"
