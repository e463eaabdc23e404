"""Settings of VFs through their PFs' interfaces, on the real kernel."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from pathlib import Path

from agent.errors import HardwareError
from agent.hardware import vf_guid, vf_settings
from agent.hardware.rtnetlink import LinkSocket, translated
from agent.model.allocation import VfSettings

SETTLE_SECONDS = 2.0
"""How long a driver may take until a VF's setting holds."""
POLL_SECONDS = 0.05

log = logging.getLogger(__name__)


class PfNetlink:
    """`host.VfControl` on the real kernel."""

    def __init__(
        self,
        settle_seconds: float = SETTLE_SECONDS,
        root: Path = Path("/"),
        open_links: Callable[[], LinkSocket] = LinkSocket,
    ) -> None:
        self._settle_seconds = settle_seconds
        self._root = root
        self._open_links = open_links

    def guids(self, pf_netdev: str, vf_index: int) -> tuple[str, str] | None:
        """Read the node and port GUID that a PF has for a VF; None if it does not tell."""
        return vf_guid.read(pf_netdev, vf_index, self._root)

    def set_guids(self, pf_netdev: str, vf_index: int, node: str, port: str) -> None:
        """Give both GUIDs to a VF, which takes them when its driver is bound anew, and read them back."""
        vf_guid.write(pf_netdev, vf_index, node, port, self._root)

    def read(self, pf_netdev: str, vf_index: int) -> VfSettings:
        """Read what a PF enforces on one VF.

        rtnetlink can only list all VFs of a PF at once, so this is not for the common path of
        a VF whose settings nobody asked to change.
        """
        with translated(f"read VF {vf_index} of {pf_netdev}"), self._open_links() as links:
            return _read(links, pf_netdev, vf_index)

    def traffic(self, pf_netdev: str) -> bytes | None:
        """Read a PF's link message with what it counted of its VFs, undecoded; None if it is gone."""
        with translated(f"read what {pf_netdev} counts"), self._open_links() as links:
            found = links.find_with_vfs(pf_netdev, statistics=True)
        return found[1] if found is not None else None

    def apply(self, pf_netdev: str, vf_index: int, settings: VfSettings) -> None:
        """Set those settings that are not None, one by one, and read them back until they hold.

        Drivers set a MAC asynchronously, answer EAGAIN or EBUSY while the VF is being reset, or refuse single
        attributes; one request per attribute tells which it was, and the reading tells whether it holds.
        """
        if settings.is_empty:
            return
        deadline = time.monotonic() + self._settle_seconds
        with translated(f"look at VF {vf_index} of {pf_netdev}"), self._open_links() as links:
            pf = links.find(pf_netdev)
            if pf is None:
                raise HardwareError(f"PF interface {pf_netdev} is gone")
            if not vf_settings.is_complete(settings):
                before = _read_back(links, pf_netdev, vf_index)
                if before is not None:  # else what is lacking counts as 0
                    settings = vf_settings.completed(settings, before)
            wrong = tuple(VfSettings.__dataclass_fields__)
            while wrong:
                for what, names, attribute in vf_settings.changes(vf_index, settings):
                    if set(names) & set(wrong):
                        with translated(f"set {what} of VF {vf_index} on {pf_netdev}"):
                            _insist(links, pf.ifindex, attribute, deadline)
                after = _read_back(links, pf_netdev, vf_index)
                if after is None:
                    return  # each request has been acknowledged
                wrong = vf_settings.differing(settings, after)
                if wrong and time.monotonic() > deadline:
                    wanted, found = getattr(settings, wrong[0]), getattr(after, wrong[0])
                    raise HardwareError(
                        f"VF {vf_index} of {pf_netdev}: {wrong[0]} was set to {wanted!r} without an error"
                        f" but is {found!r} after {self._settle_seconds:g} s"
                    )
                if wrong:
                    time.sleep(POLL_SECONDS)


def _read_back(links: LinkSocket, pf_netdev: str, vf_index: int) -> VfSettings | None:
    """Read what a PF enforces on a VF; None if it has more VFs than fit into one answer."""
    try:
        return _read(links, pf_netdev, vf_index)
    except OSError as error:
        if error.errno != errno.EMSGSIZE:
            raise
    log.warning("%s has too many VFs to be asked what it enforces on VF %d", pf_netdev, vf_index)
    return None


def _read(links: LinkSocket, pf_netdev: str, vf_index: int) -> VfSettings:
    found = links.find_with_vfs(pf_netdev)
    settings = vf_settings.find(found[1], vf_index) if found is not None else None
    if settings is None:
        raise HardwareError(f"{pf_netdev} has no VF {vf_index}: look at its sriov_numvfs")
    return settings


def _insist(links: LinkSocket, ifindex: int, attribute: bytes, deadline: float) -> None:
    """Repeat a request that the driver cannot take at the moment (i40e EAGAIN, ice EBUSY: the VF is being reset)."""
    while True:
        try:
            return links.set_vf(ifindex, attribute)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EBUSY) or time.monotonic() > deadline:
                raise
        time.sleep(POLL_SECONDS)
