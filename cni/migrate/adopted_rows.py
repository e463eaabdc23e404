"""Attachments that were adopted: what of theirs belongs to a replaced plugin, while its program may still run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.errors import DeviceBusy
from agent.model.allocation import Attachment
from cni.call import Call, request_of
from cni.install.folder import take_lock
from cni.migrate.sriov_state import Unreadable, text_of

KEY = "adopted"
"""Of the row's request: the plugin's `files` and `lock`, and the `netns_path` that it wrote."""
LOCK_SECONDS = 5.0

log = logging.getLogger(__name__)


def completed(row: Attachment, call: Call) -> Attachment:
    """Give an adopted row the IPAM section of its DEL, if all that was written of it is the plugin's name."""
    network = row.request["network"]
    if _of(row) is None or network is None or set(network["ipam"]) != {"type"}:
        return row
    asked = request_of(call, call.conf)["network"]
    if asked is None or asked["ipam"]["type"] != network["ipam"]["type"]:
        return row
    request = {**row.request, "network": asked, "cni_args": call.cni_args, "cni_path": call.cni_path}
    return replace(row, request=request)


@contextmanager
def held(row: Attachment, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Keep the replaced plugin from working on an adopted row's device. Raises DeviceBusy if it is at it."""
    adopted = _of(row)
    if adopted is None:
        yield
        return
    with locked(Path(adopted["lock"]), seconds):
        yield


@contextmanager
def locked(path: Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold the lock that a replaced plugin holds while it works. Raises DeviceBusy after some time.

    Where it cannot be made nobody can hold it: the folder came with the plugin's first call.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        log.warning("%s cannot be locked: %s", path, error.strerror)
        yield
        return
    try:
        if not take_lock(descriptor, seconds):
            raise DeviceBusy(f"a program of the plugin before has held {path} for {seconds:g} s")
        yield
    finally:
        os.close(descriptor)


def forget(row: Attachment) -> None:
    """Remove a replaced plugin's files of a device that is back. Repeatable; a file of a new owner stays."""
    adopted = _of(row) or {"files": ()}
    for file in map(Path, adopted["files"]):
        try:
            if file.parent.name != "pci" or _leads_to(file, adopted["netns_path"]):
                file.unlink(missing_ok=True)
        except OSError as error:
            log.error("%s stays: %s; remove it by hand", file, error.strerror)


def _leads_to(file: Path, netns_path: str) -> bool:
    try:
        text = text_of(file)
    except Unreadable:
        return False
    return text is not None and text.decode(errors="replace").strip() == netns_path


def _of(row: Attachment) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = row.request.get(KEY)
    return found
