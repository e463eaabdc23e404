"""The list of VLANs that a VF may send with tags of its own. Some vendors' drivers keep one; none of the kernel's does.

NVIDIA's mlx5 (sriov_sysfs.c of MLNX_OFED and DOCA) shows "Allowed 802.1Q VLANs: 100 200 201", and takes "add 200 201".
Intel's i40e and ice (kcompat_vfd.c) show "100,200-201", and take "add 200-201"; of "add 200 210" they would make two
VLANs. Either shows a page at most, takes what is so already, and refuses a list while the PF tags for the VF. An empty
list lets all VLANs pass.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import ENODEV, ENOENT, ENOTDIR, EOPNOTSUPP
from pathlib import Path

from agent.errors import HardwareError
from agent.hardware.sysfs.read import ATTRIBUTE_BYTES
from agent.model import number_ranges

HIGHEST = 4095
ALL = frozenset(range(HIGHEST + 1))
_TITLE = "Allowed 802.1Q VLANs:"
_WITH_DASHES = frozenset(("i40e", "ice"))
"""Drivers that take a range as 200-210."""
_ABSENT = frozenset((ENOENT, ENOTDIR, ENODEV, EOPNOTSUPP))

Write = Callable[[Path, str], object]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Reading:
    ids: frozenset[int]
    is_whole: bool
    """False where there are more IDs than the driver can show; those that are missing are above all others."""

    @property
    def spelled(self) -> str:
        return number_ranges.spelled(number_ranges.ranges_of(self.ids))

    def agrees(self, wanted: frozenset[int]) -> bool:
        if self.is_whole:
            return self.ids == wanted
        return self.ids == {vlan for vlan in wanted if vlan <= max(self.ids, default=-1)} != wanted


def path_of(root: Path, pf_netdev: str, vf_index: int) -> Path:
    """Name the file, which may not be there."""
    return root / "sys/class/net" / pf_netdev / "device/sriov" / str(vf_index) / "trunk"


def exists(root: Path, pf_netdev: str, vf_index: int) -> bool:
    """Tell whether the PF's driver keeps such a list for a VF."""
    return path_of(root, pf_netdev, vf_index).exists()


def read(root: Path, pf_netdev: str, vf_index: int) -> str | None:
    """Read a VF's list as 100,200-210. None where `problem` tells why it is not known."""
    path = path_of(root, pf_netdev, vf_index)
    try:
        found = _read(path)
    except HardwareError as error:
        log.warning("%s", error)
        return None
    return found.spelled if found is not None and found.is_whole else None


def problem(root: Path, pf_netdev: str, vf_index: int) -> str:
    """Say why a VF's list cannot be set and put back later, and what helps; empty if it can be."""
    path = path_of(root, pf_netdev, vf_index)
    try:
        found = _read(path)
    except HardwareError as error:
        return str(error)
    if found is None:
        return (
            f"the driver {_driver(path)} has no {path}: of drivers, only those that NVIDIA (DOCA, MLNX_OFED) and Intel"
            " give out themselves have it; install one on the node, or leave trunk out"
        )
    if not found.is_whole:
        return f"{path} has more VLANs than the driver can show, so they could not be put back: empty it"
    return ""


@contextmanager
def changing(
    root: Path, pf_netdev: str, vf_index: int, wanted: str | None, write: Write = Path.write_text
) -> Iterator[None]:
    """Take out of a VF's list what is not wanted, and put in at the end what is missing; None: leave it alone.

    Within, whatever excludes a list can be set or taken back. Raises HardwareError if the driver does not do it.
    """
    if wanted is None:
        yield
        return
    path = path_of(root, pf_netdev, vf_index)
    ids = number_ranges.ids(number_ranges.parse(wanted, HIGHEST)) if wanted else frozenset[int]()
    now = _required(path)
    _send(path, "rem", (now.ids if now.is_whole else ALL) - ids, write)
    yield
    now = _required(path)
    _send(path, "add", ids - now.ids, write)
    now = _required(path)
    if not now.agrees(ids):
        raise HardwareError(
            f"VF {vf_index} of {pf_netdev}: trunk was set to {wanted!r} without an error but is {now.spelled!r}"
        )


def _send(path: Path, word: str, ids: Iterable[int], write: Write) -> None:
    dash = "-" if _driver(path) in _WITH_DASHES else " "
    for first, last in number_ranges.ranges_of(ids):
        text = f"{word} {first}{dash}{last}"
        try:
            write(path, text)
        except OSError as error:
            raise HardwareError(f'the driver refuses "{text}" in {path}: {error.strerror}') from error


def _driver(path: Path) -> str:
    try:
        return os.path.basename(os.readlink(path.parents[2] / "driver"))
    except OSError:
        return "of the PF"


def _required(path: Path) -> _Reading:
    found = _read(path)
    if found is None:
        raise HardwareError(f"the driver has no {path}")
    return found


def _read(path: Path) -> _Reading | None:
    try:
        text = path.read_bytes().decode("ascii", "replace")
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise HardwareError(f"{path} cannot be read: {error.strerror}") from error
    is_whole = text.endswith("\n") or len(text) < ATTRIBUTE_BYTES - 1
    parts = re.split(r"[\s,]+", text.strip().removeprefix(_TITLE).strip())
    if not is_whole:
        parts.pop()  # which may be half an ID
    try:
        return _Reading(number_ranges.ids(r for p in parts if p for r in number_ranges.parse(p, HIGHEST)), is_whole)
    except ValueError as error:
        raise HardwareError(f"{path} shows {text[:80]!r}, which is no list of VLANs") from error
