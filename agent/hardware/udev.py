"""udev's database: what it would call an interface, and by which rule it did."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

MAX_BYTES = 64 << 10


def properties(root: Path, ifindex: int) -> Mapping[str, str]:
    """Read the properties of an interface of the host's namespace; none where udev does not run, or is hidden.

    The file holds lines with a letter each, E:NAME=VALUE for a property (systemd, sd-device/device-private.c).
    """
    try:
        with (root / f"run/udev/data/n{ifindex}").open("rb") as file:
            text = file.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return {}
    found = {}
    for line in text.splitlines():
        if line.startswith("E:"):
            name, _, value = line[2:].partition("=")
            found[name] = value
    return found
