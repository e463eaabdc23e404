"""Measuring in network and mount namespaces of its own, so that nothing leaks into the machine's."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from hack.sim.demo import UNSHARE


def enter_namespaces(module: str, arguments: Sequence[str]) -> NoReturn:
    """Become the module's same command, with `--inside`. An ordinary user becomes root of a user namespace."""
    command = [UNSHARE, "--net", "--mount", "--propagation", "private"]
    if os.geteuid() != 0:
        command += ["--user", "--map-root-user"]
    os.execv(UNSHARE, [*command, sys.executable, "-m", module, "--inside", *arguments])
