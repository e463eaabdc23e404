"""Files that other programs wrote: read within bounds, decoded, and never trusted."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from agent.errors import RequestInvalid
from agent.model.fields import MAX_BYTES, Fields, decode


class Unreadable(Exception):
    """A file of another program is not understood."""


def files_in(folder: Path) -> list[Path]:
    """List what a folder holds besides folders. An absent one holds nothing. Raises Unreadable."""
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if not entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Unreadable(f"{folder} cannot be read: {error.strerror}") from error


def text_of(file: Path) -> bytes | None:
    """Read a regular file; None if there is none. Raises Unreadable."""
    try:
        # Neither to follow a link nor to hang on a pipe: it is not our folder.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unreadable(f"{file} cannot be read: {error.strerror}") from error
    with open(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Unreadable(f"{file} is no regular file")
        try:
            text = opened.read(MAX_BYTES + 1)
        except OSError as error:
            raise Unreadable(f"{file} cannot be read: {error.strerror}") from error
    if len(text) > MAX_BYTES:
        raise Unreadable(f"{file} has more than {MAX_BYTES} bytes")
    return text


def fields_of(file: Path) -> Fields | None:
    """Read a JSON object that a Go program wrote; None if there is none. Raises Unreadable."""
    text = text_of(file)
    if text is None:
        return None
    try:
        return Fields(decode(text, "the file"), what="the file", fold=True)
    except RequestInvalid as error:
        raise Unreadable(f"{file}: {error}") from error


def text_in(fields: Fields, key: str) -> str:
    """Read any text; one that is not there is empty. Raises RequestInvalid."""
    return fields.text(key, "", _is_any, "a text")


def _is_any(_: object) -> bool:
    return True
