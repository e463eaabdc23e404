"""Keys of former versions that went: a file that has one is read, with a warning that says what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FIXED = "has no effect any more, the value is always {}: take it out"
GONE: Mapping[str, str] = {
    "topology.coalesceSeconds": _FIXED.format("2"),
    "topology.bandwidth.sampleSeconds": _FIXED.format("15"),
    "topology.bandwidth.annotationSeconds": _FIXED.format("600"),
    "health.xidQuietSeconds": _FIXED.format("300"),
    "dra.status": "has no effect any more, the claim's status is always written: take it out",
}
"""Where the key was, and what to do."""


def without_gone(document: Any) -> tuple[Any, tuple[str, ...]]:
    """Return a document without such keys, and the warnings."""
    warnings = []
    for path, text in GONE.items():
        *outer, key = path.split(".")
        if _is_there(document, outer, key):
            document = _left(document, outer, key)
            warnings.append(f"{path}: {text}")
    return document, tuple(warnings)


def _is_there(document: Any, outer: list[str], key: str) -> bool:
    for name in outer:
        document = document.get(name) if isinstance(document, dict) else None
    return isinstance(document, dict) and key in document


def _left(document: dict[str, Any], outer: list[str], key: str) -> dict[str, Any]:
    if not outer:
        return {name: value for name, value in document.items() if name != key}
    return {**document, outer[0]: _left(document[outer[0]], outer[1:], key)}
