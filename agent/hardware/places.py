"""NCCL's topology file, where the host has one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from agent.errors import HardwareError
from agent.model.device import Problem, Snapshot
from agent.model.places import AS_SHOWN, Places, nccl_places

MAX_BYTES = 1 << 20


def read_places(path: Path) -> Places:
    """Read the file; nothing of a node that has none. Raises HardwareError for one that cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES).decode("utf-8", "replace")
        return nccl_places(text, str(path))
    except FileNotFoundError:
        return AS_SHOWN
    except OSError as error:
        raise HardwareError(f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise HardwareError(str(error)) from error


def with_places(found: Snapshot, file: Path | None) -> Snapshot:
    """Put devices where the file says they stand. One that cannot be read is a problem of the snapshot."""
    if file is None:
        return found
    try:
        places = read_places(file)
    except HardwareError as error:
        return replace(found, problems=(*found.problems, Problem(str(file), str(error))))
    return replace(found, places=places) if places.source else found
