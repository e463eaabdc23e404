"""What a pod holds, by units and by claims, and what is to be done with it at the pod's ADD.

kubelet prepares a claim once, for its first pod. A second pod of the same claim is announced by nobody, so its ADD
finds out: kubelet's PodResources says that the pod has the claim, and the API server for which pods it is reserved.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from operator import itemgetter
from typing import Any, Protocol

from agent.config import CniSettings, Config, Resource, SharedPool
from agent.config.networks import ADAPTER, Network, network_of_keys
from agent.config.template import filled
from agent.errors import DeviceBusy, DeviceGone, Refused, RequestInvalid, Unavailable, UnknownUnit
from agent.kubelet import checkpoint
from agent.kubelet.podresources import HeldUnit, KubeletAsker, PodDevices, held_units
from agent.model.allocation import NO_SETTINGS, Claim, ClaimRef, ClaimState, Hold, PodRef, VfSettings
from agent.model.device import is_pci_address
from agent.model.fields import at, objects_at
from agent.model.unit_id import SLOT, UnitId
from agent.offer.offer import Offer, Unit
from agent.offer.selection import may_be_nic
from agent.offer.units import plain_offer
from agent.state import Latest
from cni.call import GrantedDevice, Holding, Node
from cni.pods_file import PodsFile

log = logging.getLogger(__name__)


class ClaimReader(Protocol):
    """Asks the API server. May be called on any thread but the event loop's."""

    def get(self, ref: ClaimRef) -> Mapping[str, Any] | None:
        """Read a claim; None if there is none of this UID. Raises Unavailable, and Refused."""


class HeldDevices:
    """Finds the devices that kubelet gave to a pod, and which of them come into its network.

    Methods block, and may run on many threads at once, but not on the loop's. What asks kubelet may raise Unavailable.
    """

    def __init__(
        self,
        config: Latest[Config],
        node: Node,
        kubelet: KubeletAsker,
        offer: Latest[Offer],
        holders: PodsFile,
        reader: Latest[ClaimReader | None],
    ) -> None:
        """`offer` is what kubelet is offered. While there is no `reader` kubelet alone is believed on whose a claim is.

        `holders` know the pods that have something by kubelet's own notes, which outlive a grant where it lists none.
        """
        self._config = config
        self._node = node
        self._ledger = node.ledger
        self._kubelet = kubelet
        self._offer = offer
        self._holders = holders
        self._reader = reader

    @property
    def settings(self) -> CniSettings:
        """What the configuration of this moment says of CNI."""
        return self._config.value.cni

    @property
    def has_late(self) -> bool:
        """Whether the configuration binds a resource late."""
        return bool(self._config.value.late)

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
        config, snapshot = self._config.value, self._node.scans.value
        names = {known.device: known.netdev for known in self._ledger.known_devices()}
        rails = self._ledger.rails()
        return plain_offer(config.resources, snapshot, names, named_rails=config.topology.rails, known_rails=rails)

    def offered(self) -> Mapping[str, str]:
        """Map the PCI devices that resources offer to their resources."""
        return self.offer().network_devices

    def claimed(self, pod: PodRef, device: str) -> Hold | None:
        """Return the hold by which a pod has a device by a claim; None if it has not."""
        return next((hold for _, hold in self._of_claims(pod) if hold.device == device), None)

    def of_place(self, pod: PodRef, place: str) -> Sequence[Hold]:
        """List what was chosen for a pod's claims where these have a place, in the order of the results.

        Raises DeviceBusy for a claim that is not prepared, or that kubelet knows and lost books do not.
        """
        self._refuse_forgotten(pod)
        found = [(claim, hold) for claim, hold in self._of_claims(pod) if hold.device_name == place]
        for claim, _ in found:
            self._require_prepared(claim)
        return [hold for _, hold in found]

    def noted(self) -> Sequence[checkpoint.Entry] | None:
        """List what kubelet's checkpoint counts to containers; None where it cannot be read."""
        return checkpoint.entries(self._config.value.kubelet_dir)

    def _unit(self, unit_id: str) -> Unit | None:
        return self._offer.value.by_id.get(unit_id)

    def devices(self, pod: PodRef) -> Sequence[GrantedDevice]:
        """List the devices that kubelet gave to a pod and that have to do with its network. Runs on the call's thread.

        Those of its claims come first, then those of its units: VFs and whole adapters, all of a rail's too, and each
        shared HCA, once, whose resource names a network. Slots are the binder's. What the pod holds besides is named in
        the books as its; those that are listed here get their pod with their rows (`begin_attach`).
        Raises DeviceBusy for a claim that is not prepared, or that kubelet knows and lost books do not; DeviceGone for
        a unit that nobody knows; UnknownUnit for a device of a resource that is configured no more: what is to be done
        with it, nobody knows; Unavailable if kubelet does not answer.
        """
        self._refuse_forgotten(pod)
        found: dict[str, GrantedDevice] = {}
        for claim, hold in self._of_claims(pod):
            network = self._network(claim, hold)
            if network is not None or hold.kind != "hca":
                self._require_prepared(claim)
                uid, name = claim.ref.uid, hold.resource_name
                given = GrantedDevice(hold.device, name, network, claim_uid=uid, ifname=hold.ifname)
                found.setdefault(hold.device, given)
        return (*found.values(), *self._of_units(pod))

    def _of_units(self, pod: PodRef) -> Sequence[GrantedDevice]:
        """List the devices of a pod's units.

        Once the grants agree with kubelet and none of them is such a device's, none is this pod's either, and
        kubelet need not be asked. Until then kubelet is the authority: the ledger may be a new one.
        """
        config = self._config.value  # one for all of it: kubelet is waited for in between
        wanted = {r.name for r in config.resources if r.joins_network}
        strange = self._of_no_resource(pod, config)
        if not strange and not (wanted and self._may_have(pod, wanted)):
            return ()
        listed = self.pod_devices(pod)
        if listed is None:
            return ()
        found: dict[tuple[str, str], GrantedDevice] = {}
        for held, resource, devices in self._units_of(listed, config):
            name = held.resource_name
            if (name, held.unit_id) in strange:
                raise UnknownUnit(
                    f"container {held.container} has {held.unit_id} of {name}, and the configuration has no resource"
                    " of this name any more, so it cannot come into the pod: put the resource back, or recreate the pod"
                )
            if resource is None or name not in wanted or held.unit_id.startswith(SLOT):
                continue
            if not devices:
                raise DeviceGone(held.unit_id, f"among the units of {name}, though kubelet gave it to {pod}")
            network, offered = config.joined.get(name), self._unit(held.unit_id)
            if network is None and offered is not None and offered.kind == "nic":
                network = ADAPTER
            beside = devices if len(devices) > 1 else ()
            for device in devices:  # several shares may be of one HCA
                found.setdefault((name, device), GrantedDevice(device, name, network, held.unit_id, beside=beside))
        with_rows = {given.unit_id for given in found.values()}
        self._ledger.bind([unit for unit in listed.all_device_ids if unit not in with_rows], pod)
        return tuple(found.values())

    def _may_have(self, pod: PodRef, wanted: Set[str]) -> bool:
        """Return whether a pod may have a unit of some resources, as far as the books know."""
        if not self.is_settled or pod.uid in self._holders.noted:
            return True
        return any(hold.resource_name in wanted and not hold.is_slot for hold in self._ledger.holds())

    def _units_of(
        self, listed: PodDevices, config: Config
    ) -> Iterator[tuple[HeldUnit, Resource | None, tuple[str, ...]]]:
        """List a pod's units, of any plugin, each with its resource if that is ours, and the devices behind it.

        They are in the order of their resources' names and their own. A unit of ours that nobody knows, and a slot
        that is not bound for the pod, have no device; what another plugin calls a unit stands for itself.
        """
        resources = config.by_name
        units = {(held.resource_name, held.unit_id): held for held in reversed(held_units([listed]))}
        for (name, unit_id), held in sorted(units.items(), key=itemgetter(0)):
            resource, hold, offered = resources.get(name), self._ledger.hold(unit_id), self._unit(unit_id)
            if resource is not None and isinstance(resource.compat, SharedPool):
                yield held, resource, tuple(self.offer().adapters_of_pool(name))
            elif unit_id.startswith(SLOT):
                is_its = hold is not None and hold.pod is not None and hold.pod.names == held.pod.names
                yield held, resource, hold.devices if hold is not None and is_its else ()
            elif hold is not None and hold.devices and (resource is not None or hold.resource_name == name):
                yield held, resource, hold.devices
            elif offered is not None and (resource is not None or offered.resource_name == name):
                yield held, resource, offered.devices
            else:
                yield held, resource, () if resource is not None else (unit_id,)

    def _of_no_resource(self, pod: PodRef, config: Config) -> Set[tuple[str, str]]:
        """List resource name and unit of the network devices that may be the pod's, whose resource is gone."""
        names = config.by_name
        return {
            (hold.resource_name, hold.key)
            for hold in self._ledger.holds()
            if hold.resource_name not in names
            and any(is_pci_address(d) and may_be_nic(d, self._node.scans.value) for d in hold.devices)
            and not (UnitId.parse(hold.key).is_share or hold.is_slot)
            and (hold.pod is None or hold.pod.names == pod.names)
        }

    def network_of(self, resource_name: str, device: str) -> Network | None:
        """Return what a device of a resource joins in a chained call; None too if that is not to be told."""
        network = self._config.value.joined.get(resource_name)
        try:
            return self.settled(GrantedDevice(device, resource_name, network, beside=self._beside(device))).network
        except RequestInvalid as error:
            log.error("which network %s of %s has joined is not known: %s", device, resource_name, error)
            return None

    def named_network(self, name: str, device: str) -> Network:
        """Return what a device joins as an entry of the configuration says. Raises RequestInvalid."""
        networks = {network.name: network for network in self._config.value.networks}
        if name not in networks:
            known = ", ".join(networks) or "none"
            raise RequestInvalid(f"network {name} is not in the agent's configuration on this node; there are: {known}")
        facts = self._node.scans.value.by_address.get(device)
        network = networks[name].for_devices("nic" if facts is not None and not facts.is_vf else "vf")
        return self.settled(GrantedDevice(device, "", network)).network or network

    def _beside(self, device: str) -> tuple[str, ...]:
        """List the NICs of a granted rail that this is one of, itself included; none where a unit is one device."""
        return next((hold.devices for hold in self._ledger.holds_on(device) if len(hold.devices) > 1), ())

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
        """Return what the VFs of a resource may send, where their network says nothing of it."""
        resource = self._config.value.by_name.get(resource_name)
        return resource.rates if resource is not None else NO_SETTINGS

    async def held_units(self) -> Sequence[HeldUnit]:
        """List what kubelet says that pods hold of our resources, and have the relay know of what it may not list now.

        Runs on the loop; raises Unavailable.
        """
        await asyncio.to_thread(self._holders.look)
        told = held_units((await self._kubelet.listing()).pods)
        # Units of a pool that stands for a number of containers are in no books. A resource that is configured no more
        # is in the pods that have it all the same.
        names = {r.name for r in self._config.value.resources if not isinstance(r.compat, SharedPool)}
        names |= {hold.resource_name for hold in self._ledger.holds()}
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
        claimed = [hold for claim, hold in self._of_claims(pod) if claim.state is ClaimState.PREPARED]
        listed = self.pod_devices(pod)
        if listed is None and not claimed:
            return None
        whole = {hold.device for hold in claimed if hold.exclusive}
        shared = {hold.device for hold in claimed} - whole
        for held, resource, devices in self._units_of(listed, self._config.value) if listed is not None else ():
            is_share = UnitId.parse(held.unit_id).is_share or (resource is not None and resource.nic_kind == "hca")
            # A unit that neither books nor offer know may be a device by its name.
            (shared if is_share else whole).update(filter(is_pci_address, devices or (held.unit_id,)))
        return Holding(frozenset(whole), frozenset(shared))

    def pod_devices(self, pod: PodRef) -> PodDevices | None:
        """Ask what a pod holds, of any resource; None if kubelet does not know it. Not on the loop.

        Raises Unavailable.
        """
        return self._kubelet.pod(pod)

    # -------------------------------------------------------------------------------------------------- whose it is

    def _refuse_forgotten(self, pod: PodRef) -> None:
        """Refuse a pod that has a claim which is not in the books, where those are new: it would lack its devices."""
        ledger, config = self._ledger, self._config.value
        if not ((ledger.is_new or ledger.recovered_from is not None) and pod.name and config.offers_dra):
            return
        found = self._kubelet.pod(pod)
        known = {(claim.ref.namespace, claim.ref.name) for claim in ledger.claims()}
        for each in found.claimed if found is not None else ():
            if each.driver == config.dra.driver and (each.namespace, each.claim) not in known:
                raise DeviceBusy(
                    f"claim {each.namespace}/{each.claim} was prepared before the books were lost, and they do not know"
                    " its devices: recreate the pod, or restart kubelet, which has its claims prepared again"
                )

    def _of_claims(self, pod: PodRef) -> Sequence[tuple[Claim, Hold]]:
        """List what a pod has by claims. A device to which there is admin access stays where it is, so it is left out.

        kubelet is asked only where a claim of the pod's namespace may be the pod's without the books' knowing.
        """
        claims, namespace = self._ledger.claims(), pod.namespace
        if not claims:
            return ()
        others = [c for c in claims if not c.only_pod and c.ref.namespace == namespace and not c.is_for(pod)]
        if others and pod.name:
            self._learn(others, pod)
        return [(claim, hold) for claim in self._ledger.claims_for(pod) for hold in claim.devices if not hold.admin]

    def _learn(self, claims: Sequence[Claim], pod: PodRef) -> None:
        """Find out which of some claims are a pod's, too."""
        found = self._kubelet.pod(pod)
        told = {(each.namespace, each.claim) for each in found.claimed} if found is not None else set()
        for claim in claims:
            if (claim.ref.namespace, claim.ref.name) in told and (pods := self._pods_of(claim, pod)):
                self._ledger.set_claim_pods(claim.ref.uid, pods)

    def _pods_of(self, claim: Claim, pod: PodRef) -> Sequence[PodRef]:
        """List the pods of a claim that is a pod's, too, as kubelet has made sure before it started that.

        None if the claim is gone: the pod's is another one of this name.
        """
        reserved: list[PodRef] = []
        reader = self._reader.value
        try:
            document = reader.get(claim.ref) if reader is not None else None
            if document is not None:
                reserved = pods_of(document)
                reserved += [pod for pod in claim.pods if groups_of(document) and pod not in reserved]
        except Refused as error:
            log.error("claim %s cannot be read, so its other pods are not known: %s", claim.ref, error)
        except Unavailable as error:
            log.info("claim %s is not read now: %s", claim.ref, error)
        else:
            if reader is not None and document is None:
                log.info("claim %s of the books is gone, and pod %s has another one of this name", claim.ref, pod)
                return ()
        pods = reserved or list(claim.pods)
        return pods if any(each.is_same(pod) for each in pods) else [*pods, pod]

    def _network(self, claim: Claim, device: Hold) -> Network | None:
        if device.network:
            return network_of_keys(device.network).for_devices(device.kind)
        config = self._config.value
        if device.kind != "hca" and device.resource_name not in config.by_name:
            raise UnknownUnit(
                f"claim {claim.ref} has {device.device_name} of {device.resource_name}, and the configuration has no"
                " resource of this name any more, so it cannot come into the pod: put the resource back, or recreate"
                " the claim"
            )
        return config.joined.get(device.resource_name)

    def _require_prepared(self, claim: Claim) -> None:
        if claim.state is not ClaimState.PREPARED:
            raise DeviceBusy(
                f"claim {claim.ref} is {claim.state}: its devices come into no pod until kubelet has had it prepared"
            )
        if claim.boot_id != self._ledger.boot_id:
            raise DeviceBusy(
                f"the devices of claim {claim.ref} have not been found again since the node was booted: kubelet is to"
                " have it prepared once more"
            )


def pods_of(document: Mapping[str, Any]) -> list[PodRef]:
    """List the pods that a claim is reserved for, as the API server has it. Raises Unavailable if that is no claim."""
    namespace = at(document, "metadata.namespace", str)
    return [
        PodRef(namespace, at(entry, "name", str), at(entry, "uid", str))
        for entry in objects_at(document, "status.reservedFor")
        if entry.get("resource") == "pods"
    ]


def groups_of(document: Mapping[str, Any]) -> list[str]:
    """Name the PodGroups that a claim is reserved for (KEP-5729). Their pods are not named. Raises Unavailable."""
    return [
        at(entry, "name", str)
        for entry in objects_at(document, "status.reservedFor")
        if (entry.get("apiGroup"), entry.get("resource")) == ("scheduling.k8s.io", "podgroups")
    ]
