"""DEL requests that the relay put on disk while the agent was away.

The relay writes `.<name>.tmp`, syncs it, and renames it to `<name>.del`; names begin with the time, so
they sort by it. The same DEL once more gives the file that is there its own time. What is no DEL is removed: the
reconciler finds what it may have been about. Nothing else in the folder is touched.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cni import protocol

_SPOOLED = re.compile(r"[0-9][0-9a-f-]{0,99}\.del")
_TIMED = re.compile(r"([0-9]{20})-")
_UNFINISHED = re.compile(r"\.[0-9][0-9a-f-]{0,99}(\.del)?\.tmp")
OWN = re.compile("|".join(known.pattern for known in (_SPOOLED, _UNFINISHED)))
"""Every file that the relay and the agent make in the folder."""

log = logging.getLogger(__name__)
Answerer = Callable[[protocol.Request], protocol.Answer]


class _NoDel(ValueError):
    """A file is not what the relay writes, and will not become it."""


def replay(folder: Path, answer: Answerer) -> int:
    """Carry out the spooled DELs of a folder, oldest first, and remove those that succeeded.

    One that fails stays for the next time, one that can never succeed is removed. Returns how many were done.
    """
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return 0
    except OSError as error:
        log.error("the spool %s cannot be read: %s", folder, error.strerror)
        return 0
    return sum(_carry_out(folder / name, answer) for name in names if _SPOOLED.fullmatch(name))


def _carry_out(file: Path, answer: Answerer) -> bool:
    try:
        result = answer(_read(file))
        if result.exit != 0 and _code(result) == protocol.INVALID_ENVIRONMENT:
            raise _NoDel(result.stdout.decode(errors="replace"))
    except _NoDel as error:
        log.error("%s is not a spooled DEL and is removed: %s", file, error)
        with _tolerated(file):
            file.unlink()
        return False
    except FileNotFoundError:  # the same DEL has come once more just now, and has another name
        return False
    except OSError as error:
        log.error("%s cannot be read: %s", file, error.strerror)
        return False
    if result.exit != 0:
        log.error("the spooled DEL %s failed and stays: %s", file, result.stdout.decode(errors="replace"))
        return False
    with _tolerated(file):
        file.unlink(missing_ok=True)
    return True


def _read(file: Path) -> protocol.Request:
    """Read a spooled DEL. Raises _NoDel, or OSError if reading it later may help."""
    found = os.lstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise _NoDel("it is not a file that the relay made")
    with file.open("rb") as opened:
        content = opened.read(protocol.MAX_REQUEST + protocol.HEAD_SIZE + 1)
    try:
        request = protocol.decode_request(content)
    except protocol.FrameInvalid as error:
        raise _NoDel(str(error)) from error
    if (command := request.env.get("CNI_COMMAND")) != "DEL":
        raise _NoDel(f"its command is {command!r}")
    timed = _TIMED.match(file.name)
    return replace(request, spooled_at=int(timed[1]) / 1e9) if timed is not None else request


def _code(answer: protocol.Answer) -> int | None:
    try:
        document = json.loads(answer.stdout)
    except ValueError:
        return None
    code = document.get("code") if isinstance(document, dict) else None
    return code if isinstance(code, int) else None


@contextmanager
def _tolerated(file: Path) -> Iterator[None]:
    """Carry on where the disk refuses: the same DEL once more is harmless."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        log.error("%s stays in the spool: %s", file, error.strerror)
