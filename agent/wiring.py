"""The parts that grant, attach and heal, put together around one ledger. `agent.main` opens, runs and closes them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from agent.config import Config
from agent.edits import device_info
from agent.edits.build import GpuFilesOf
from agent.edits.specs import Specs
from agent.edits.unit_specs import UnitSpecs
from agent.hardware.lldp import Neighbour
from agent.kubelet.cri import ContainerRuntime
from agent.kubelet.podresources import KubeletAsker, PodResources
from agent.offer.offer import Offer
from agent.process.conditions import NO_ADD_NEEDS
from agent.reconcile.claims import Claims
from agent.reconcile.grants import Grants, Owners
from agent.reconcile.lost_books import LostBooks
from agent.reconcile.reconciler import Reconciler
from agent.reconcile.spec_watch import SpecWatch
from agent.reconcile.units import Units
from agent.reconcile.view import Outside
from agent.report.report import Report
from agent.state import Latest
from cni import pods_file, spool
from cni.add_facts import FactsWriter, RailFiles
from cni.attachment import BUSY_SECONDS, Attachments, Settings
from cni.call import Node
from cni.pod_devices import ClaimReader, HeldDevices
from cni.server import CniServer
from cni.slots.binder import Binder
from deviceplugin.allocation import Allocator
from deviceplugin.grant_records import GrantRecords
from deviceplugin.plugins import DevicePlugins, Ground
from deviceplugin.preference import Usage


class Parts:
    """What grants, attaches and heals on one ledger. Nothing of it runs yet."""

    def __init__(
        self,
        config: Latest[Config],
        node: Node,
        offer: Latest[Offer],
        kubelet: PodResources,
        report: Report,
        busy_seconds: float = BUSY_SECONDS,
    ) -> None:
        """`offer` gets what device plugins offer to kubelet, `busy_seconds` is how long a pod waits for its devices.

        To be made on the loop that kubelet is asked on.
        """
        at_start, host, ledger = config.value, node.host, node.ledger
        self.settled = Latest(False)
        """Whether the grants have agreed with kubelet's word once since the start."""
        self.holders = pods_file.PodsFile(
            pods_file.path_of(at_start.cni_socket), pods_file.kernel_boot_id(), ledger, config
        )
        self.settled.subscribe(self.holders.complete)
        specs = Specs(ledger, at_start.cdi_dir)
        unit_specs = UnitSpecs(ledger, specs, self.settled)
        self.cdi_specs = specs
        by_cdi = Latest(at_start.cdi_names)
        """Whether early units are handed out by CDI names."""

        # kubelet's door
        devinfo = device_info.GrantedFiles(host.root / device_info.FOLDER.relative_to("/"))
        self.records = GrantRecords(ledger, devinfo, offer, specs, unit_specs)
        allocator = Allocator(offer, self.records.grant, ledger.pod_of, by_cdi=by_cdi)
        ground = Ground(node.scans, ledger, report.health, GpuFilesOf(host.root).read)
        self.plugins = DevicePlugins(config, ground, allocator, self.records, report.metrics.observe)
        self.usage = Usage(kubelet, allocator.preference, node.scans, ledger)

        # the runtime's door
        self.runtime = ContainerRuntime(at_start.runtime_socket) if at_start.runtime_socket else None
        self.asker = KubeletAsker(kubelet, asyncio.get_running_loop(), self.runtime)
        self.claim_reader: Latest[ClaimReader | None] = Latest(None)
        """Asks the API server for claims, while there may be any."""
        self.leaves: Latest[Mapping[str, Neighbour]] = Latest({})
        """Adapter → the switch port at the other end, as far as somebody listens."""
        rail_files = RailFiles(at_start.cdi_dir, offer, self.asker, self.leaves)
        facts = FactsWriter(config, node, specs, rail_files, allocator.verbs_nodes)
        held = HeldDevices(config, node, self.asker, offer, self.holders, self.claim_reader)
        places = Settings(busy_seconds, netns_folders=at_start.netns_folders)
        binder = Binder(config, ledger, specs, offer, held, busy_seconds)
        self.attachments = Attachments(node, held, binder, facts, places)
        unable = partial(report.conditions.first, besides=NO_ADD_NEEDS)
        self.server = CniServer(
            at_start.cni_socket, self.attachments, condition=unable, observe=report.metrics.observe_cni
        )

        # what heals
        replay = partial(spool.replay, at_start.spool_dir, self.server.answer)
        outside = Outside(held, offer, self.runtime, replay, ledger, report)
        lost = LostBooks(ledger, specs, outside)
        grants = Grants(ledger, specs, node.scans, outside, self.settled)
        claims = Claims(ledger, specs, outside, self.claim_reader)
        units = Units(config, ledger, unit_specs, by_cdi, outside, self.settled)
        self.specs = SpecWatch(at_start.cdi_dir, lambda: [*specs.rewrite(), *facts.rewrite()], report)
        holds = (lost, grants, claims, units)
        self.reconciler = Reconciler(ledger, self.attachments, node.scans, outside, grants, holds)
        self.owners = Owners(ledger, self.holders, outside)
