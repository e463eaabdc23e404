"""The parts that grant, attach and heal: made around one ledger, each knowing those that it asks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agent import cdi, device_info
from agent.clients.cri import ContainerRuntime
from agent.clients.kubelet import PodResources
from agent.config import Config
from agent.errors import AgentError
from agent.events import Events
from agent.granted import Granted
from agent.hardware.host import Host
from agent.health import HealthBook
from agent.inventory import Inventory
from agent.late import checkpoint
from agent.late.binder import Binder
from agent.ledger import Ledger
from agent.metrics import Metrics
from agent.model.reasons import Reason
from agent.model.slots import is_slot_id
from agent.obstacles import NO_POD_NEEDS, Obstacles
from agent.reconcile import Claim, Reconciler, owners
from cni import holders, spool
from cni.attachment import Attachments
from cni.folder_changes import REMOVED, FolderChanges
from cni.others import Others
from cni.server import CniServer
from deviceplugin.assignment import assign
from deviceplugin.gpu_files import GpuFilesOf
from deviceplugin.plugins import DevicePlugins
from deviceplugin.resources import Listed, adapters_behind, list_all, network_devices, vfs_of
from deviceplugin.selectors import may_be_nic

SPECS_SECONDS = 5.0
"""How soon CDI specs are written again that could not be."""


@dataclass(frozen=True)
class Surroundings:
    """What the parts work on, and what they tell of it."""

    config: Callable[[], Config]
    """The configuration of this moment."""
    host: Host
    inventory: Inventory
    kubelet: PodResources
    health: HealthBook
    metrics: Metrics
    obstacles: Obstacles
    events: Events


class Parts:
    """What grants, attaches and heals on one ledger. Nothing of it runs yet; who made it runs and closes it.

    Made on the event loop that kubelet is asked on.
    """

    def __init__(self, around: Surroundings, ledger: Ledger) -> None:
        self._around = around
        self.ledger = ledger
        config, host = around.config(), around.host
        self.runtime = ContainerRuntime(config.runtime_socket) if config.runtime_socket else None
        self._spool = spool.Spool(config.spool_dir)
        self.holders = holders.Holders(
            *(holders.path_of(config.cni_socket), holders.kernel_boot_id(), ledger, config.resources, self._noted)
        )
        self.granted = Granted(
            config,
            ledger,
            around.kubelet,
            asyncio.get_running_loop(),
            unit=lambda unit_id: self.plugins.unit(unit_id),
            may_be_nic=lambda device: may_be_nic(device, around.inventory.snapshot),
            is_settled=lambda: self.reconciler.settled,
            adapters=self._adapters,
            noted=lambda: self.holders.noted,
        )
        self._cdi_folder = FolderChanges(config.cdi_dir, REMOVED)
        self._unwritten: str | None = None
        """Why CDI specs of slots are not written."""
        self._slots = slots = Binder(
            config.kubelet_dir,
            ledger,
            cdi.SlotSpecs(config.cdi_dir),
            resources=lambda: around.config().resources,
            stock=lambda: self.plugins.allocator.offer,
            ask_kubelet=self.granted.ask_kubelet,
            network_of=self.granted.network_of,
            is_settled=lambda: self.reconciler.settled,
        )
        self.attachments = Attachments(
            host,
            ledger,
            lambda: around.inventory.snapshot,
            self.granted.devices,
            netns_folders=config.netns_folders,
            network_of=self.granted.network_of,
            observe_steps=around.metrics.observe_steps,
            foreign_folders=(host.root / "var/lib/cni", host.root / "var/run/cni"),
            slots=slots,
            tell_lost=self._lost,
            others=Others(self._offered, self.granted.units, self.granted.holding, lambda: around.config().cni),
            pod_ended=lambda pod, spooled_at: self.reconciler.ended.note(pod, spooled_at),
            verbs_node=lambda device: self.plugins.allocator.verbs_nodes.get(device),
        )
        self.server = CniServer(
            config.cni_socket, self.attachments, obstacle=self._unable_to_attach, observe=around.metrics.observe_cni
        )
        self.plugins = DevicePlugins(
            config,
            around.inventory,
            ledger,
            observe=around.metrics.observe,
            gpu_files=GpuFilesOf(host.root).read,
            device_info=host.root / device_info.FOLDER.relative_to("/"),
            health=around.health,
            pods=around.kubelet.list,
            granting=slots.forget,
        )
        self.reconciler = Reconciler(
            ledger,
            self.attachments,
            claims=self.claims,
            devices_of_units=self._devices_of_units,
            replay_spool=self._replay,
            count=self.reconciled,
            snapshot=lambda: around.inventory.snapshot,
            ours=self._our_vfs,
            pods=lambda: self.granted.pods,
            sandboxes=self.runtime.sandboxes if self.runtime is not None else None,
            complain=self._tell_of_books,
            slots=slots,
            tell_settled=self.holders.complete,
        )

    async def claims(self) -> Sequence[Claim]:
        """Ask kubelet for the claims of pods, and have the relay know of those that it may not list now.

        Runs on the loop; raises Unavailable.
        """
        await asyncio.to_thread(self.holders.look)
        return await self.granted.claims()

    async def name_owners(self) -> None:
        """Learn soon whose a new grant is, for ever: until that is known no pod starts without the agent."""
        changed, loop = asyncio.Event(), asyncio.get_running_loop()

        def note() -> None:
            if self.holders.has_unknown:
                with contextlib.suppress(RuntimeError):  # the ledger may outlive the loop
                    loop.call_soon_threadsafe(changed.set)

        self.ledger.subscribe(note)
        note()
        await owners.follow(
            changed, self.claims, self.ledger, needed=lambda: self.holders.has_unknown, count=self.reconciled
        )

    def _noted(self) -> frozenset[str] | None:
        """List the UIDs of pods to which kubelet's checkpoint counts what comes into a network."""
        config = self._around.config()
        found = checkpoint.entries(config.kubelet_dir)
        if found is None:
            return None
        names = {resource.name for resource in config.resources if resource.joins_network}
        return frozenset(
            entry.pod_uid for entry in found if entry.resource_name in names or any(map(is_slot_id, entry.unit_ids))
        )

    async def keep_specs(self) -> None:
        """Write CDI specs that somebody removes: until they are back no container that names one starts.

        Runs until cancelled. The reconciler and the device plugins look at them, too, in their own time.
        """
        try:
            while True:
                self._cdi_folder.open()
                self.plugins.look_again()
                try:
                    written = await asyncio.to_thread(self._slots.rewrite)
                except AgentError as error:
                    self._unwritten, written = str(error), ()
                else:
                    self._unwritten = None
                for _ in written:
                    self.reconciled("spec-write", "mended")
                await self._cdi_folder.changed(SPECS_SECONDS if self._unwritten is not None else None)
        finally:
            self._cdi_folder.close()

    @property
    def cdi_problem(self) -> str | None:
        """Tell what is wrong with CDI specs of ours, or with seeing that somebody removes them."""
        problems = (self._unwritten, self.plugins.specs_problem, self._cdi_folder.problem)
        return "; ".join(problem for problem in problems if problem is not None) or None

    def reconciled(self, action: str, reason: str) -> None:
        """Count what was brought into accord, and note it among the recent events."""
        self._around.metrics.reconciled(action, reason)
        self._around.events.reconciled(action, reason)

    def _unable_to_attach(self) -> str | None:
        """Answer CNI's STATUS. The runtime calls the whole node's network not ready while this is not None.

        So a kubelet that has not taken up our resources does not count: no ADD needs that.
        """
        return self._around.obstacles.first(besides=("kubelet", "endpoints", "admin", *NO_POD_NEEDS))

    def _tell_of_books(self, what: str | None) -> None:
        copies = ", ".join(map(str, self.ledger.damaged_copies()))
        self._around.obstacles.set(
            "damage",
            f"{self.ledger.path} was damaged, and is replaced; what was damaged is kept as {copies}: see to the disk,"
            " then remove that"
            if copies
            else None,
        )
        self._around.obstacles.set("ledger", what)
        self._around.health.withhold(Reason.BOOKS_UNWRITABLE if what is not None else None)

    def _lost(self, device: str, text: str) -> None:
        self._around.metrics.reconciled("restore-failed", "host-refused")
        self._around.events.note("detach", device, text, warning=True)

    def _our_vfs(self) -> frozenset[str]:
        """List the VFs that resources offer, before the first offer too."""
        listed = self._listed()
        return vfs_of(listed.units, listed.pools, self._around.inventory.snapshot)

    def _offered(self) -> Mapping[str, str]:
        """Map the PCI devices that resources offer to their resources, before the first offer too."""
        offer = self.plugins.allocator.offer
        if offer.units:
            return offer.network_devices
        listed = self._listed()
        return network_devices(listed.units, listed.pools, self._around.inventory.snapshot)

    def _adapters(self, resource_name: str) -> frozenset[str]:
        """List the adapters of a pool each of whose units is all of them."""
        units = self._listed().units.get(resource_name, ())
        return frozenset(adapters_behind(units, self._around.inventory.snapshot))

    def _listed(self) -> Listed:
        offer = self.plugins.allocator.offer
        if offer.units:
            return Listed(offer.units, offer.pools)
        snapshot, resources = self._around.inventory.snapshot, self._around.config().resources
        names = {k.device: k.netdev for k in self.ledger.known_devices()}
        return list_all(resources, assign(resources, snapshot, names), snapshot)

    def _devices_of_units(self) -> dict[str, str] | None:
        """Map the offered units to devices; None before the first offer, which may be one of nothing."""
        offer = self.plugins.allocator.offer
        if not offer.snapshot.generation:
            return None
        return {unit.unit_id: unit.device for offered in offer.units.values() for unit in offered}

    def replay(self) -> None:
        """Carry out the DELs that lie on disk, and count them. Blocks."""
        for _ in range(self._replay()):
            self.reconciled("replay", "spooled-del")

    def _replay(self) -> int:
        count = self._spool.replay(self.server.answer)
        self._around.metrics.spooled(count)
        return count
