"""CNI while the configuration is wrong: from the books alone.

Nobody knows then what devices are for, so nothing is granted, and none comes into a pod. But pods end, and most that
start have nothing of ours. This serves them until the agent proper takes the books over.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any

from agent.config import Config
from agent.edits.cdi import SlotSpecs
from agent.errors import HardwareError, Unavailable
from agent.hardware.host import Host
from agent.kubelet import checkpoint
from agent.kubelet.podresources import KubeletAsker, PodResources
from agent.ledger import Ledger
from agent.ledger.database import lock_folder
from agent.model.allocation import PodRef
from agent.model.device import is_pci_address
from agent.model.unit_id import UnitId, UnitKind
from agent.state import Latest
from cni import spool
from cni.attachment import Attachments, Settings
from cni.call import Call, Node, Slots
from cni.server import CniServer
from cni.slots.bound import BoundSlots

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
        kubelet = PodResources.of_kubelet(config.kubelet_dir)
        stack.push_async_callback(kubelet.close)
        stack.callback(os.close, await asyncio.to_thread(lock_folder, config.state_dir))
        ledger = await asyncio.to_thread(Ledger.open, config.ledger_path, snapshot.boot_id)
        stack.push_async_callback(asyncio.to_thread, ledger.close)
        node = Node(host, ledger, Latest(snapshot))
        books = _Books(node, config, KubeletAsker(kubelet, asyncio.get_running_loop()), wrong)
        stack.push_async_callback(asyncio.to_thread, books.close)
        # A plugin that hangs would hold up pods that need none: what is to be given back is owed, as at any start.
        await asyncio.to_thread(books.leases.defer)
        server = CniServer(config.cni_socket, books, condition=books.condition, observe=lambda command: nullcontext())
        await asyncio.to_thread(server.start, lambda: spool.Spool(config.spool_dir).replay(server.answer))
        stack.push_async_callback(asyncio.to_thread, server.close)
        log.info("pods end, and those that have no device start, until the configuration is repaired")
        yield


class _Books(Attachments):
    """Ends what is attached, and attaches nothing."""

    def __init__(self, node: Node, config: Config, kubelet: KubeletAsker, wrong: Sequence[str]) -> None:
        bound = BoundSlots(Latest(config), node.ledger, SlotSpecs(config.cdi_dir))
        super().__init__(node, slots=_Slots(bound), settings=Settings(netns_folders=config.netns_folders))
        self._kubelet_dir = config.kubelet_dir
        self._kubelet = kubelet
        self._wrong = wrong

    def condition(self) -> str:
        """Say why no device comes into a pod now."""
        return f"the agent's configuration is wrong: {'; '.join(self._wrong)}"

    def add(self, call: Call) -> Mapping[str, Any]:
        """Pass a pod through that has nothing. Raises Unavailable for any other, and if kubelet does not answer."""
        if call.conf.prev_result is None or not call.conf.is_chained or self._may_have_something(call.pod):
            raise Unavailable(self.condition())
        return call.conf.prev_result

    def _may_have_something(self, pod: PodRef) -> bool:
        """Ask kubelet, whose word counts. Of init containers, and after its start, its notes tell more."""
        noted = checkpoint.containers_of(self._kubelet_dir, pod.uid) if pod.uid else ()
        found = self._kubelet.pod(pod)
        told = found.all_device_ids if found is not None else ()
        units = {*told, *(unit for held in noted for of_one in held.units.values() for unit in of_one)}
        granted = {grant.unit_id for grant in self._node.ledger.grants() if any(map(is_pci_address, grant.devices))}
        return any(unit in granted or _is_of_adapter(unit) for unit in units)


class _Slots(Slots):
    """Lets go of what was bound, and binds nothing."""

    def __init__(self, bound: BoundSlots) -> None:
        self._bound = bound

    def unbind(self, container_id: str, ifname: str) -> None:
        """Let go of what was chosen for a sandbox in calls for this interface."""
        self._bound.unbind(container_id, ifname)


def _is_of_adapter(unit_id: str) -> bool:
    """Tell whether a unit may be one of ours that is no GPU, by its name."""
    return UnitId.parse(unit_id).kind in (UnitKind.DEVICE, UnitKind.SHARE, UnitKind.SLOT, UnitKind.RAIL)
