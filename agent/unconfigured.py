"""CNI while the configuration is wrong: from the books alone.

Nobody knows then what devices are for, so nothing is granted, and none comes into a pod. But pods end, and most that
start have nothing of ours. This serves them until the agent proper takes the books over.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any

from agent.cdi import SlotSpecs
from agent.clients.kubelet import PodDevices, PodResources
from agent.config import Config
from agent.errors import HardwareError, Unavailable
from agent.granted import ask
from agent.hardware.host import Host
from agent.late import checkpoint
from agent.late.bound import BoundSlots
from agent.ledger import Ledger
from agent.ledger.lock import claim
from agent.model.allocation import PodRef
from agent.model.device import Snapshot, is_pci_address
from agent.model.gpu_ids import RAIL_PREFIX
from agent.model.shares import is_share_id
from agent.model.slots import is_slot_id
from cni import spool
from cni.attachment import Attachments
from cni.call import Call, GrantedDevice
from cni.server import CniServer

log = logging.getLogger(__name__)


@asynccontextmanager
async def serve(host: Host, config: Config, wrong: Sequence[str]) -> AsyncIterator[None]:
    """Serve CNI with the books and folders of a configuration that is wrong otherwise; `wrong` says how, at any time.

    Raises LedgerError if the books cannot be had, HardwareError if the node cannot be read, and ConfigError if the
    socket cannot be.
    """
    snapshot = await asyncio.to_thread(host.scan)
    if not snapshot.boot_id:
        raise HardwareError("the boot ID cannot be read: mount /proc")
    async with AsyncExitStack() as stack:
        kubelet, loop = PodResources.of_kubelet(config.kubelet_dir), asyncio.get_running_loop()
        stack.push_async_callback(kubelet.close)
        stack.callback(os.close, await asyncio.to_thread(claim, config.state_dir))
        ledger = await asyncio.to_thread(Ledger.open, config.ledger_path, snapshot.boot_id)
        stack.push_async_callback(asyncio.to_thread, ledger.close)
        books = _Books(host, config, ledger, snapshot, lambda pod: ask(kubelet, loop, pod), wrong)
        stack.push_async_callback(asyncio.to_thread, books.close)
        # A plugin that hangs would hold up pods that need none: what is to be given back is owed, as at any start.
        await asyncio.to_thread(books.leases.defer)
        server = CniServer(config.cni_socket, books, obstacle=books.obstacle, observe=lambda command: nullcontext())
        await asyncio.to_thread(server.start, lambda: spool.replay(config.spool_dir, server.answer))
        stack.push_async_callback(asyncio.to_thread, server.close)
        log.info("pods end, and those that have no device start, until the configuration is repaired")
        yield


class _Books(Attachments):
    """Ends what is attached, and attaches nothing."""

    def __init__(
        self,
        host: Host,
        config: Config,
        ledger: Ledger,
        snapshot: Snapshot,
        ask_kubelet: Callable[[PodRef], PodDevices | None],
        wrong: Sequence[str],
    ) -> None:
        slots = _Slots(config.kubelet_dir, ledger, SlotSpecs(config.cdi_dir), tuple)
        super().__init__(
            *(host, ledger, lambda: snapshot, lambda pod: ()), netns_folders=config.netns_folders, slots=slots
        )
        self._kubelet_dir = config.kubelet_dir
        self._ask_kubelet = ask_kubelet
        self._wrong = wrong

    def obstacle(self) -> str:
        """Say why no device comes into a pod now."""
        return f"the agent's configuration is wrong: {'; '.join(self._wrong)}"

    def add(self, call: Call) -> Mapping[str, Any]:
        """Pass a pod through that has nothing. Raises Unavailable for any other, and if kubelet does not answer."""
        if call.conf.prev_result is None or not call.conf.is_chained or self._may_have_something(call.pod):
            raise Unavailable(self.obstacle())
        return call.conf.prev_result

    def _may_have_something(self, pod: PodRef) -> bool:
        """Ask kubelet, whose word counts. Of init containers, and after its start, its notes tell more."""
        noted = checkpoint.containers_of(self._kubelet_dir, pod.uid) if pod.uid else ()
        found = self._ask_kubelet(pod)
        told = found.all_device_ids if found is not None else ()
        units = {*told, *(unit for held in noted for of_one in held.units.values() for unit in of_one)}
        granted = {grant.unit_id for grant in self._ledger.grants() if is_pci_address(grant.device)}
        return any(unit in granted or _is_of_adapter(unit) for unit in units)


class _Slots(BoundSlots):
    """Lets go of what was bound, and binds nothing."""

    def bind(self, call: Call, wanted: Callable[[], bool]) -> Sequence[GrantedDevice]:
        """List nothing."""
        return ()


def _is_of_adapter(unit_id: str) -> bool:
    """Tell whether a unit may be one of ours that is no GPU, by its name."""
    return is_slot_id(unit_id) or is_share_id(unit_id) or unit_id.startswith(RAIL_PREFIX) or is_pci_address(unit_id)
