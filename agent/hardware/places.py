"""NCCL's topology file, where the host has one."""

from __future__ import annotations

from pathlib import Path

from agent.errors import HardwareError
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
