"""DEL requests that the relay put on disk while the agent was away."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cni import protocol

SUFFIX = ".del"
MAX_FILES = 10_000

log = logging.getLogger(__name__)


def replay(folder: Path, answer: Callable[[protocol.Request], protocol.Answer]) -> int:
    """Carry out each spooled DEL, oldest first, and remove those that succeeded.

    One that fails stays for the next time; one that is no request at all is set aside as `.bad`.
    Returns how many were carried out.
    """
    done = 0
    try:
        files = sorted(p for p in folder.iterdir() if p.suffix == SUFFIX)[:MAX_FILES]
    except FileNotFoundError:
        return 0
    except OSError as error:
        log.error("the spool %s cannot be read: %s", folder, error.strerror)
        return 0
    for file in files:
        try:
            if file.stat().st_size > protocol.MAX_REQUEST + 8:
                raise protocol.FrameInvalid("too large")
            request = protocol.decode_request(file.read_bytes())
            if request.env.get("CNI_COMMAND") != "DEL":
                raise protocol.FrameInvalid("not a DEL")
        except protocol.FrameInvalid as error:
            log.error("%s is not a spooled DEL (%s); it is set aside", file, error)
            with _tolerated(file):
                file.rename(file.with_suffix(".bad"))
            continue
        except OSError as error:
            log.error("%s cannot be read: %s", file, error.strerror)
            continue
        result = answer(request)
        if result.exit == 0:
            with _tolerated(file):
                file.unlink(missing_ok=True)
            done += 1
        else:
            log.error("the spooled DEL %s failed and stays: %s", file, result.stdout.decode(errors="replace"))
    return done


@contextmanager
def _tolerated(file: Path) -> Iterator[None]:
    """Carry on where the disk refuses: the same DEL once more is harmless."""
    try:
        yield
    except OSError as error:
        log.error("%s stays in the spool: %s", file, error.strerror)
