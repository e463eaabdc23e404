"""`nodefabric pause-gpus`: lets go of the NVIDIA driver for a while, so that GPUs can be reset.

The driver resets no GPU that a program has open, and the agent is one. Once the pause is over the GPUs
that were named are looked at as if newly found: what counted against them is over, unless they show it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent.config import Config
from agent.errors import RequestInvalid
from agent.model.device import Gpu, Snapshot
from agent.operator import admin
from agent.state import Latest

COMMAND = "pause-gpus"
DEFAULT_SECONDS = 60.0
MAX_SECONDS = 3600.0
MAX_GPUS = 64
LetGo = Callable[[float, Sequence[str]], bool]
"""Lets go of the driver for so many seconds, for GPUs by PCI address; returns whether that worked."""


def pause(config: Config, gpus: Sequence[str], seconds: float) -> str:
    """Ask the running agent, and tell what it did. Raises RequestInvalid, Unavailable, or another AgentError."""
    return admin.ask(config.admin_socket, {"command": COMMAND, "gpus": list(gpus), "seconds": seconds})


def answering(let_go: LetGo, snapshot: Latest[Snapshot]) -> admin.Answer:
    """Make what carries out such requests in the running agent."""

    def answer(asked: Mapping[str, Any]) -> str:
        names, seconds = _wish(asked)
        found = [_find(name, snapshot.value.gpus) for name in names]
        is_free = let_go(seconds, [gpu.pci_address for gpu in found])
        named = ", ".join(gpu.uuid for gpu in found)
        if seconds == 0:
            return f"the GPUs are read again; {named} as newly found"
        if not is_free:
            return (
                f"the driver does not answer, so it is still open; {named} will be read as newly found in {seconds:g} s"
            )
        return f"the driver is let go for {seconds:g} s: reset {named} now; other programs may have them open, too"

    return answer


def _wish(asked: Mapping[str, Any]) -> tuple[list[str], float]:
    names, seconds = asked.get("gpus"), asked.get("seconds")
    if not isinstance(names, list) or not 0 < len(names) <= MAX_GPUS or not all(isinstance(n, str) for n in names):
        raise RequestInvalid("gpus must name the GPUs that will be reset, as `nodefabric status` or `topology` does")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_SECONDS:
        raise RequestInvalid(f"seconds must be a number from 0 to {MAX_SECONDS:g}, is {seconds!r}")
    return names, float(seconds)


def _find(name: str, gpus: Sequence[Gpu]) -> Gpu:
    for gpu in gpus:
        if name.partition("::")[0] in (gpu.uuid, gpu.pci_address, f"GPU{gpu.index}", str(gpu.index)):
            return gpu
    known = ", ".join(gpu.uuid for gpu in gpus) or "none"
    raise RequestInvalid(f"{name[:100]} is no GPU of this node; there are: {known}")
