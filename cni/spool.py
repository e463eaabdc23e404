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
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cni import protocol

UNFINISHED_SECONDS = 3600.0
"""A relay that writes for longer is dead."""

_SPOOLED = re.compile(r"[0-9][0-9a-f-]{0,99}\.del")
_TIMED = re.compile(r"([0-9]{20})-")
_UNFINISHED = re.compile(r"\.[0-9][0-9a-f-]{0,99}(\.del)?\.tmp")
OWN = re.compile("|".join(known.pattern for known in (_SPOOLED, _UNFINISHED)))
"""Every file that the relay and the agent make in the folder."""

log = logging.getLogger(__name__)
Answerer = Callable[[protocol.Request], protocol.Answer]


class _NoDel(ValueError):
    """A file is not what the relay writes, and will not become it."""


class Spool:
    """The folder."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock

    def replay(self, answer: Answerer) -> int:
        """Carry out the spooled DELs, oldest first, and remove those that succeeded.

        One that fails stays for the next time, one that can never succeed is removed. Returns how many were done.
        """
        try:
            names = sorted(os.listdir(self._folder))
        except FileNotFoundError:
            return 0
        except OSError as error:
            log.error("the spool %s cannot be read: %s", self._folder, error.strerror)
            return 0
        done = sum(self._carry_out(name, answer) for name in names if _SPOOLED.fullmatch(name))
        self._tidy(names)
        return done

    def _carry_out(self, name: str, answer: Answerer) -> bool:
        file = self._folder / name
        try:
            request = _read(file)
            result = answer(request)
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
        if result.exit == 0:
            with _tolerated(file):
                file.unlink(missing_ok=True)
            return True
        log.error("the spooled DEL %s failed and stays: %s", file, result.stdout.decode(errors="replace"))
        return False

    def _tidy(self, names: list[str]) -> None:
        """Remove what relays that were killed left half-written."""
        for file in (self._folder / name for name in names if _UNFINISHED.fullmatch(name)):
            with _tolerated(file):
                if self._clock() - os.lstat(file).st_mtime >= UNFINISHED_SECONDS:
                    file.unlink()
                    log.warning("%s is removed: it is no DEL, and nobody is at work on it", file)


def _read(file: Path) -> protocol.Request:
    """Read a spooled DEL. Raises _NoDel, or OSError if reading it later may help."""
    limit = protocol.MAX_REQUEST + protocol.HEAD_SIZE
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if file.is_symlink():
            raise _NoDel("it is a link") from error
        raise
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(fd)
        raise _NoDel("it is not a file that the relay made")
    with open(fd, "rb") as opened:
        content = opened.read(limit + 1)
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
