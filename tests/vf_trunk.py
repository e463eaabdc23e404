"""PF drivers that keep a list of VLANs for each VF, as NVIDIA's and Intel's do: what is written to a file changes it.

No driver of the kernel has such a file, so none is in the virtual machine either.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from agent.hardware.sysfs import trunk
from agent.model import number_ranges
from agent.model.allocation import VfSettings
from hack.sim.machine import RecordedVfControl

PAGE = 4096


@dataclass
class TrunkDriver:
    """The driver of a PF. `write` stands where a write to a file of sysfs is."""

    has_dashes: bool = False
    """Intel's way of ranges, in place of NVIDIA's."""
    tag: Callable[[], int] = lambda: 0
    """The VLAN that the PF tags with for the VF: no list goes beside one."""
    said: list[str] = field(default_factory=list)
    """What was written."""
    is_deaf: bool = False
    """Whether it acknowledges all and does nothing."""

    def list_in(self, path: Path) -> frozenset[int]:
        """Tell the whole list of a VF, of which the file may show less."""
        return frozenset(json.loads(path.with_suffix(".whole").read_text()))

    def create(self, path: Path, *ids: int) -> Path:
        """Make the file for a VF, or put other IDs into it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._show(path, frozenset(ids))
        return path

    def write(self, path: Path, text: str) -> None:
        """Do as it is told, or refuse."""
        if not path.exists():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        self.said.append(text)
        word, _, rest = text.partition(" ")
        ids = frozenset(self._asked(rest))
        if word == "add" and self.tag():
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        if not self.is_deaf:
            before = self.list_in(path)
            self._show(path, before | ids if word == "add" else before - ids)

    def _asked(self, text: str) -> Iterator[int]:
        if not self.has_dashes:
            found = re.fullmatch(r"(\d+) (\d+)", text)
            if found is None:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            yield from range(int(found[1]), int(found[2]) + 1)
            return
        for part in re.split(r"[\s,]+", text):  # as the kernel's bitmap_parselist takes it
            first, _, last = part.partition("-")
            yield from range(int(first), int(last or first) + 1)

    def _show(self, path: Path, ids: frozenset[int]) -> None:
        path.with_suffix(".whole").write_text(json.dumps(sorted(ids)))
        if self.has_dashes:
            text = number_ranges.spelled(number_ranges.ranges_of(ids)) + "\n"
        else:
            text = "Allowed 802.1Q VLANs:" + "".join(f" {vlan}" for vlan in sorted(ids)) + "\n" if ids else ""
        path.write_text(text[: PAGE - 1])


class WithTrunk(RecordedVfControl):
    """VF settings of a simulated node, of a PF with such a driver."""

    def __init__(self, folder: Path, driver: TrunkDriver) -> None:
        super().__init__(folder / "vf-settings.json")
        self._root, self._driver = folder / "root", driver

    def read(self, pf_netdev: str, vf_index: int) -> VfSettings:
        """Read all settings of one VF."""
        return replace(super().read(pf_netdev, vf_index), trunk=trunk.read(self._root, pf_netdev, vf_index))

    def apply(self, pf_netdev: str, vf_index: int, settings: VfSettings) -> None:
        """Set those fields that are not None."""
        with trunk.changing(self._root, pf_netdev, vf_index, settings.trunk, self._driver.write):
            self._set(pf_netdev, vf_index, replace(settings, trunk=None))

    def _set(self, pf_netdev: str, vf_index: int, settings: VfSettings) -> None:
        """Set what rtnetlink would."""
        RecordedVfControl(self._path).apply(pf_netdev, vf_index, settings)
