"""What kubelet gave to a pod, and what is to be done with it at the pod's ADD.

kubelet is asked on the event loop, where its client lives; a CNI call waits for the answer on its own thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from agent.config import CniSettings, Config, Resource, SharedPool
from agent.config.networks import ADAPTER, Network
from agent.config.template import filled
from agent.edits.unit_specs import UnitSpecs
from agent.errors import DeviceGone, RequestInvalid, Unavailable, UnknownUnit
from agent.kubelet import checkpoint
from agent.kubelet.podresources import HeldUnit, Listing, PodDevices, PodResources, held_units
from agent.model.allocation import NO_SETTINGS, Attachment, PodRef, VfSettings
from agent.model.device import is_pci_address
from agent.model.unit_id import UnitId
from agent.offer.offer import Offer, Unit
from agent.offer.selectors import may_be_nic
from agent.offer.units import plain_offer
from agent.state import Latest
from cni.claims import NO_CLAIMS, Claims
from cni.grants import GrantedDevice, Grants, Holding
from cni.holders import Holders
from cni.modes import rdma
from cni.node import Node

if TYPE_CHECKING:
    from agent.kubelet.cri import ContainerRuntime, Sandbox

log = logging.getLogger(__name__)
PODRESOURCES_SECONDS = 5.0
RUNTIME_SECONDS = 5.0
MAX_ASKING = 64
"""So many calls wait for kubelet at once."""

log = logging.getLogger(__name__)


class KubeletAsker:
    """Asks PodResources and the runtime for threads other than the event loop's, on which their clients live."""

    def __init__(
        self, kubelet: PodResources, loop: asyncio.AbstractEventLoop, runtime: ContainerRuntime | None = None
    ) -> None:
        self._kubelet = kubelet
        self._loop = loop
        self._runtime = runtime
        self._asking = threading.BoundedSemaphore(MAX_ASKING)

    def pod(self, pod: PodRef) -> PodDevices | None:
        """Ask what a pod holds, of any resource; None if kubelet does not know it. Not on the loop.

        Raises Unavailable.
        """
        if not self._asking.acquire(blocking=False):
            raise Unavailable(f"{MAX_ASKING} calls wait for kubelet to say what their pods hold: try again later")
        try:
            asked = asyncio.run_coroutine_threadsafe(self._kubelet.get(pod), self._loop)
            try:
                return asked.result(PODRESOURCES_SECONDS)
            except concurrent.futures.TimeoutError as error:
                asked.cancel()
                raise Unavailable(f"kubelet did not say what {pod} holds within {PODRESOURCES_SECONDS:g} s") from error
        finally:
            self._asking.release()

    def pods(self) -> Sequence[PodDevices]:
        """Ask what every pod of the node holds. Not on the loop; raises Unavailable."""
        asked = asyncio.run_coroutine_threadsafe(self._kubelet.listing(), self._loop)
        try:
            return asked.result(PODRESOURCES_SECONDS).pods
        except concurrent.futures.TimeoutError as error:
            asked.cancel()
            raise Unavailable(f"kubelet did not list its pods within {PODRESOURCES_SECONDS:g} s") from error

    def files(self, pod: PodRef, container: str, resource_name: str) -> Sequence[str]:
        """List the device files that a resource's plugin gave to a container, as far as kubelet keeps its answer."""
        noted = checkpoint.containers_of(self._kubelet.folder, pod.uid) if pod.uid else ()
        return next((held.files(resource_name) for held in noted if held.container == container), ())

    def sandboxes(self) -> Sequence[Sandbox]:
        """Ask the runtime for its sandboxes; none if there is no runtime to be asked. Not on the loop.

        Raises Unavailable.
        """
        if self._runtime is None:
            return ()
        asked = asyncio.run_coroutine_threadsafe(self._runtime.sandboxes(), self._loop)
        try:
            return asked.result(RUNTIME_SECONDS)
        except concurrent.futures.TimeoutError as error:
            asked.cancel()
            raise Unavailable(f"the container runtime did not list its sandboxes in {RUNTIME_SECONDS:g} s") from error

    async def listing(self) -> Listing:
        """Ask what every pod holds now. On the loop; raises Unavailable."""
        return await self._kubelet.listing()

    @property
    def newest(self) -> Listing:
        """What kubelet told last of all pods."""
        return self._kubelet.newest.value


class Tells(Protocol):
    """Tells containers of their devices. Methods block."""

    def attached(self, rows: Sequence[Attachment], result: Mapping[str, Any], netns: int) -> None:
        """Tell of the devices that an ADD has brought into a pod. Raises Unavailable."""

    def detached(self, container_id: str, pod: PodRef) -> None:
        """Forget what was told of a sandbox."""


@dataclass(frozen=True, slots=True)
class Promised:
    """What was told to kubelet when units were granted, or claims prepared, and who tells containers more at ADD."""

    verbs_nodes: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Device → the verbs node that its container gets."""
    claims: Claims = NO_CLAIMS
    teller: Tells | None = None
    specs: UnitSpecs | None = None
    """CDI specs of granted units; None where there are none."""


class Granted(Grants):
    """Tells which of the devices that kubelet gave to a pod are to come into its network."""

    def __init__(
        self,
        config: Latest[Config],
        node: Node,
        kubelet: KubeletAsker,
        offer: Latest[Offer],
        holders: Holders,
        promised: Promised,
    ) -> None:
        """`offer` is what kubelet is offered, `promised` what it was told when it got something.

        `holders` know the pods that have something by kubelet's own notes, which outlive a grant where it lists none.
        """
        self._config_cell = config
        self._node = node
        self._ledger = node.ledger
        self._kubelet = kubelet
        self._offer = offer
        self._holders = holders
        self._promised = promised

    @property
    def _config(self) -> Config:
        return self._config_cell.value

    @property
    def settings(self) -> CniSettings:
        """What the configuration of this moment says of CNI."""
        return self._config.cni

    @property
    def pods(self) -> Collection[tuple[str, str]]:
        """Namespace and name of all pods that kubelet listed last, whatever they hold."""
        return self._kubelet.newest.names

    @property
    def is_settled(self) -> bool:
        """Whether the books have agreed with kubelet's word once since the start."""
        return self._holders.is_settled

    def offer(self) -> Offer:
        """Return the newest offer; before the first one, what it would say."""
        offer = self._offer.value
        if offer.offered:
            return offer
        config, snapshot = self._config, self._node.snapshot
        names = {known.device: known.netdev for known in self._ledger.known_devices()}
        rails = self._ledger.rails()
        return plain_offer(config.resources, snapshot, {}, names, named_rails=config.topology.rails, known_rails=rails)

    def offered(self) -> Mapping[str, str]:
        """Map the PCI devices that resources offer to their resources."""
        return self.offer().network_devices

    def verbs_node(self, device: str) -> str | None:
        """Tell which verbs node kubelet was told of a device when it was granted, if that is known."""
        return self._promised.verbs_nodes.get(device)

    def claimed(self, pod: PodRef, device: str) -> GrantedDevice | None:
        """Tell how a pod has a device by a claim; None if it has not."""
        return self._promised.claims.claimed(pod, device)

    def of_place(self, pod: PodRef, place: str) -> Sequence[GrantedDevice]:
        """List the devices that were chosen for a pod's claims where these have a place. Raises AgentError."""
        return self._promised.claims.of_place(pod, place)

    def noted_units(self) -> frozenset[str]:
        """Name the units that kubelet's checkpoint counts to containers; none where it cannot be read."""
        entries = checkpoint.entries(self._config.kubelet_dir) or ()
        return frozenset(unit for entry in entries for unit in entry.unit_ids)

    def follows(self, device: str) -> bool:
        """Tell whether containers get whatever files a unit's device has in its pod: they were told a CDI name."""
        return bool(self._ledger.specs_of(device))

    def entered(self, row: Attachment, netns: int) -> None:
        """Have the CDI specs of a row's claim, or units, name the character devices that its device has in its pod."""
        if row.claim_uid:
            self._promised.claims.entered(row, netns)
            return
        changed = {}
        for unit_id, spec in self._ledger.specs_of(row.device).items():
            mine = {"deviceNodes": spec.nodes[row.device]} if row.device in spec.nodes else spec.edits
            edits = rdma.renumbered(self._node.host, row, netns, mine)
            if edits is not mine and spec.nodes:
                changed[unit_id] = spec.with_nodes(row.device, edits["deviceNodes"])
            elif edits is not mine:
                changed[unit_id] = replace(spec, edits=edits)
        if changed and self._promised.specs is not None:
            log.info("%s has other character devices in its pod: its CDI spec says so", row.device)
            self._promised.specs.say(changed)

    def attached(self, rows: Sequence[Attachment], result: Mapping[str, Any], netns: int) -> None:
        """Have specs and files that tell of devices say what these are in the pod."""
        self._promised.claims.attached(rows, result)
        if self._promised.teller is not None and self._config.tells:
            self._promised.teller.attached(rows, result, netns)

    def detached(self, container_id: str, pod: PodRef) -> None:
        """Have no files left that tell of a sandbox's devices."""
        if self._promised.teller is not None and self._config.tells:
            self._promised.teller.detached(container_id, pod)

    def _unit(self, unit_id: str) -> Unit | None:
        return self._offer.value.by_id.get(unit_id)

    def devices(self, pod: PodRef) -> Sequence[GrantedDevice]:
        """List the devices that kubelet gave to a pod and that have to do with its network. Runs on the call's thread.

        Those of its claims come first, see `cni.claims`, then those of its units. Raises AgentError as either does.
        """
        return (*self._promised.claims.devices(pod), *self._of_units(pod))

    def _of_units(self, pod: PodRef) -> Sequence[GrantedDevice]:
        """List the devices of a pod's units.

        These are VFs and whole adapters, all of a rail's too, and each shared HCA, once, whose resource names a
        network; of a resource that is bound late now, those from before. Slots are the binder's.
        Once the grants agree with kubelet and none of them is such a device's, none is this pod's either, and
        kubelet need not be asked. Until then kubelet is the authority: the ledger may be a new one.
        Raises Unavailable if kubelet does not answer, DeviceGone for a unit that nobody knows, and UnknownUnit for a
        device of a resource that is configured no more: what is to be done with it, nobody knows.
        """
        config = self._config  # one for all of it: kubelet is waited for in between
        wanted = {r.name: r.nic_kind for r in config.resources if r.joins_network}
        granted = self._ledger.granted_devices(wanted)
        if any(r.binding == "late" for r in config.resources):
            granted = {unit: device for unit, device in granted.items() if not UnitId.parse(unit).is_slot}
        strange = self._of_no_resource(pod)
        if not strange and (not wanted or (self.is_settled and not granted and pod.uid not in self._holders.noted)):
            return ()
        found = self.pod_devices(pod)
        if found is None:
            return ()
        self._ledger.bind(found.all_device_ids, pod)
        _refuse(strange, found)
        mine = []
        for name in sorted(wanted):
            network = config.network_of(name)
            shared = set[str]()
            for unit_id in sorted(unit for unit in found.device_ids(name) if not UnitId.parse(unit).is_slot):
                offered = self._unit(unit_id)
                devices = granted.get(unit_id) or (offered.devices if offered is not None else ())
                if not devices:
                    raise DeviceGone(unit_id, f"among the units of {name}, though kubelet gave it to {pod}")
                is_whole = network is None and offered is not None and offered.kind == "nic"
                beside = devices if len(devices) > 1 else ()
                for device in devices:
                    if wanted[name] == "hca" and device in shared:
                        continue  # several shares of one HCA
                    shared.add(device)
                    mine.append(GrantedDevice(device, name, ADAPTER if is_whole else network, beside=beside))
        return mine

    def _of_no_resource(self, pod: PodRef) -> Set[tuple[str, str]]:
        """List resource name and unit of the network devices that may be the pod's, whose resource is gone."""
        return {
            (grant.resource_name, grant.unit_id)
            for grant in self._ledger.grants_beyond(resource.name for resource in self._config.resources)
            if any(is_pci_address(d) and may_be_nic(d, self._node.snapshot) for d in grant.devices)
            and not (UnitId.parse(grant.unit_id).is_share or UnitId.parse(grant.unit_id).is_slot)
            and (grant.pod is None or (grant.pod.namespace, grant.pod.name) == (pod.namespace, pod.name))
        }

    def network_of(self, resource_name: str, device: str) -> Network | None:
        """Return what a device of a resource joins in a chained call; None too if that is not to be told."""
        network = self._config.network_of(resource_name)
        try:
            return self.settled(GrantedDevice(device, resource_name, network, beside=self._beside(device))).network
        except RequestInvalid as error:
            log.error("which network %s of %s has joined is not known: %s", device, resource_name, error)
            return None

    def named_network(self, name: str, device: str) -> Network:
        """Return what a device joins as an entry of the configuration says. Raises RequestInvalid."""
        networks = {network.name: network for network in self._config.networks}
        if name not in networks:
            known = ", ".join(networks) or "none"
            raise RequestInvalid(f"network {name} is not in the agent's configuration on this node; there are: {known}")
        facts = self._node.snapshot.by_address.get(device)
        network = networks[name].for_devices("nic" if facts is not None and not facts.is_vf else "vf")
        return self.settled(GrantedDevice(device, "", network)).network or network

    def _beside(self, device: str) -> tuple[str, ...]:
        """List the NICs of a granted rail that this is one of, itself included; none where a unit is one device."""
        sets = [grant.devices for grant in self._ledger.grants() if grant.others and device in grant.devices]
        return sets[0] if sets else ()

    def settled(self, found: GrantedDevice) -> GrantedDevice:
        """Fill in what a device's network, and its name, say of the place that it stands at. Raises RequestInvalid."""
        network = found.network
        is_template = network is not None and (network.words or network.by_pf)
        if not is_template and "{" not in found.ifname:
            return found
        place = self.offer().place(found.device, found.beside)
        network = network.at(place) if network is not None else None
        if "{" not in found.ifname:
            return replace(found, network=network)
        return replace(found, network=network, ifname="", usual=str(filled(found.ifname, place)))

    def rates_of(self, resource_name: str) -> VfSettings:
        """Tell what the VFs of a resource may send, where their network says nothing of it."""
        return next((r.rates for r in self._config.resources if r.name == resource_name), NO_SETTINGS)

    async def held_units(self) -> Sequence[HeldUnit]:
        """List what kubelet says that pods hold of our resources, and have the relay know of what it may not list now.

        Runs on the loop; raises Unavailable.
        """
        await asyncio.to_thread(self._holders.look)
        told = held_units((await self._kubelet.listing()).pods)
        # Units of a pool that stands for a number of containers are in no books. A resource that is configured no more
        # is in the pods that have it all the same.
        names = {r.name for r in self._config.resources if not isinstance(r.compat, SharedPool)}
        names |= {grant.resource_name for grant in self._ledger.grants()}
        found: dict[tuple[PodRef, str, str], HeldUnit] = {}
        for held in told:
            offered = self._unit(held.unit_id)
            is_offered = offered is not None and offered.resource_name == held.resource_name
            # A slot is ours by its name, whatever has become of its resource.
            if is_offered or held.resource_name in names or UnitId.parse(held.unit_id).is_slot_of(held.resource_name):
                found.setdefault((held.pod, held.resource_name, held.unit_id), held)
        return tuple(found.values())

    def units(self, pod: PodRef) -> Sequence[tuple[str, str]]:
        """List resource name and unit of all that a pod holds, of any plugin. Not on the loop; raises Unavailable."""
        found = self.pod_devices(pod)
        return [(held.resource_name, held.unit_id) for held in held_units([found])] if found is not None else []

    def holding(self, pod: PodRef) -> Holding | None:
        """Ask which PCI devices a pod holds; None if kubelet does not know it. Not on the loop; raises Unavailable."""
        by_claims = self._promised.claims.holding(pod)
        found = self.pod_devices(pod)
        if found is None:
            return by_claims
        resources = {resource.name: resource for resource in self._config.resources}
        whole, shared = set[str](), set[str]()
        for held in held_units([found]):
            resource = resources.get(held.resource_name)
            is_shared = UnitId.parse(held.unit_id).is_share or (resource is not None and resource.nic_kind == "hca")
            (shared if is_shared else whole).update(self._behind(held, resource))
        return Holding(frozenset(whole), frozenset(shared)) | (by_claims or Holding())

    def _behind(self, held: HeldUnit, resource: Resource | None) -> Collection[str]:
        """List the devices that a unit of a pod stands for."""
        if resource is not None and isinstance(resource.compat, SharedPool):
            return self.offer().adapters_of_pool(held.resource_name)
        if UnitId.parse(held.unit_id).is_slot:
            bound = self._ledger.binding_of(held.unit_id)
            mine = bound is not None and (bound.pod.namespace, bound.pod.name) == (held.pod.namespace, held.pod.name)
            return {bound.device} if bound is not None and mine else set()
        granted = self._ledger.granted_devices([held.resource_name]).get(held.unit_id)
        offered = self._unit(held.unit_id)
        is_offered = offered is not None and offered.resource_name == held.resource_name
        return granted or (offered.devices if offered is not None and is_offered else (held.unit_id,))

    def pod_devices(self, pod: PodRef) -> PodDevices | None:
        """Ask what a pod holds, of any resource; None if kubelet does not know it. Not on the loop.

        Raises Unavailable.
        """
        return self._kubelet.pod(pod)


def _refuse(strange: Set[tuple[str, str]], found: PodDevices) -> None:
    for held in held_units([found]):
        if (held.resource_name, held.unit_id) in strange:
            raise UnknownUnit(
                f"container {held.container} has {held.unit_id} of {held.resource_name}, and the configuration has"
                " no resource of this name any more, so it cannot come into the pod: put the resource back, or"
                " recreate the pod"
            )
