"""A simulated machine that tells of each change before it makes it, for tests that kill the process there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CHANGES = frozenset(
    (
        *("move_in", "move_out", "change", "change_altnames", "create", "remove", "rename"),
        *("apply", "set_guids", "unbind", "bind"),
    )
)
"""The methods of a Host and of its faces that change something."""
FACES = frozenset(("links", "vf_control", "rdma"))


class Stepping:
    """Stands before a Host, or one of its faces."""

    def __init__(self, what: Any, step: Callable[[str], None], face: str = "") -> None:
        """`step` is told the name of each method that changes something; with `face`, behind that of its face."""
        self._what = what
        self._step = step
        self._face = face

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._what, name)
        if name in FACES:
            return Stepping(found, self._step, f"{name}." if self._face else "")
        if name not in CHANGES:
            return found

        def told(*args: Any, **kwargs: Any) -> Any:
            self._step(self._face + name)
            return found(*args, **kwargs)

        return told
