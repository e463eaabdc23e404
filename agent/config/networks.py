"""The entries of `networks`: CNI network configurations, kept unparsed."""

from __future__ import annotations

import math
import re
from typing import Any

from agent.config.reader import Reader, shown
from agent.config.values import Network

MAX_NETWORK_VALUES = 1000
MAX_NETWORK_DEPTH = 20
NETWORK_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


def read_network(reader: Reader) -> Network:
    """Read one entry: `name`, and whatever the CNI configuration of a mode may hold."""
    name = reader.text("name", None, "a lower-case DNS label", NETWORK_NAME, about="Name that resources call it by")
    if "name" not in reader.value:
        reader.note("name", "is missing")
    netconf = {k: v for k, v in reader.value.items() if k != "name"}
    for key, value in netconf.items():
        if not _is_json(value):
            reader.note(key, f"must be plain JSON values, not dates or the like, is {shown(value, key)}")
    return Network(name or "", netconf)


def _is_json(value: Any) -> bool:
    """Tell whether JSON can express the value, in a bounded size: aliases can make it endless."""
    waiting = [(value, 0)]
    for _ in range(MAX_NETWORK_VALUES):
        if not waiting:
            return True
        item, depth = waiting.pop()
        if isinstance(item, dict) and all(isinstance(key, str) for key in item):
            waiting.extend((inner, depth + 1) for inner in item.values())
        elif isinstance(item, list):
            waiting.extend((inner, depth + 1) for inner in item)
        elif isinstance(item, float):
            if not math.isfinite(item):
                return False
        elif type(item) is int:
            if abs(item) >= 1 << 63:
                return False
        elif item is not None and not isinstance(item, str | bool):
            return False
        if depth > MAX_NETWORK_DEPTH:
            return False
    return False
