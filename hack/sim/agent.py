"""The command line of the agent, for simulated nodes too: `--simulate FOLDER` in place of `--root`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agent.__main__ import main as agent_main

if TYPE_CHECKING:
    from agent.hardware.host import Host

SIMULATE = "--simulate"


def main(arguments: Sequence[str]) -> int:
    """Run one command of `nodefabric` and return its exit status."""
    words = list(arguments)
    if SIMULATE not in words:
        return agent_main(words)
    at = words.index(SIMULATE)
    folder = Path(words[at + 1])
    del words[at : at + 2]

    def open_host() -> Host:
        from hack.sim.machine import SimulatedMachine

        return SimulatedMachine.open(folder)

    return agent_main(words, open_host)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
