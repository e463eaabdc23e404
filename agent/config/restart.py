"""What the agent does about a restart of its own that is planned."""

from __future__ import annotations

from dataclasses import dataclass

from agent.config.reader import Reader

MAX_WAIT_SECONDS = 5.0
"""With the time to reach the API server, and to stop, that is below the pod's terminationGracePeriodSeconds of 10."""


@dataclass(frozen=True, slots=True)
class Restart:
    taint: bool = False
    """Taint the own Node before the end, so that no pod is placed there until kubelet has the lists again."""
    wait_seconds: float = 2.0
    """How long pods that were placed before have until the end."""


def read_restart(reader: Reader) -> Restart:
    """Read the section `restart`."""
    plain = Restart()
    return Restart(
        taint=reader.flag(
            "taint",
            plain.taint,
            about="Taint the own Node while the agent restarts (nodefabric.io/agent-not-ready:NoSchedule)",
        ),
        wait_seconds=reader.seconds(
            "waitSeconds", plain.wait_seconds, 0, MAX_WAIT_SECONDS, about="Between the taint and the agent's end"
        ),
    )
