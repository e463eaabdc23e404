"""What kubelet gave to a pod, and what is to be done with it at the pod's ADD.

kubelet is asked on the event loop, where its client lives; a CNI call waits for the answer on its own thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any, Protocol

from agent.clients.kubelet import PodDevices, PodResources
from agent.config import Config, Network, Resource, SharedPool
from agent.errors import DeviceGone, Unavailable, UnknownUnit
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.model.device import is_pci_address
from agent.model.shares import is_share_id
from agent.model.slots import is_slot_id, is_slot_of
from agent.reconcile import Claim
from cni.call import GrantedDevice
from cni.others import Holding

PODRESOURCES_SECONDS = 5.0
MAX_ASKING = 64
"""So many calls wait for kubelet at once."""


class KnownUnit(Protocol):
    """What must be known of an offered unit. `deviceplugin.unit.Unit` is one."""

    @property
    def resource_name(self) -> str:
        """Such as nvidia.com/mig-1g.10gb: some resources are made of others, and in no configuration."""

    @property
    def kind(self) -> str:
        """vf, nic, hca …: what the device is. In another project's pool it differs from unit to unit."""

    @property
    def device(self) -> str:
        """PCI address, or the GPU's UUID."""


class Granted:
    """Tells which of the devices that kubelet gave to a pod are to come into its network."""

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        kubelet: PodResources,
        loop: asyncio.AbstractEventLoop,
        *,
        unit: Callable[[str], KnownUnit | None],
        may_be_nic: Callable[[str], bool],
        is_settled: Callable[[], bool],
        adapters: Callable[[str], Collection[str]] = lambda resource_name: (),
        noted: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """`unit` finds an offered unit by its ID; `is_settled` tells whether the grants agree with kubelet; `noted` are
        the UIDs of pods that have something by kubelet's own notes, which outlive a grant where kubelet lists no pods.

        `may_be_nic` tells a PCI device that may come into a network from another, such as an accelerator; `adapters`
        lists those of a pool each of whose units is all of them.

        `kubelet` is called on `loop` only.
        """
        self._config = config
        self._ledger = ledger
        self._kubelet = kubelet
        self._loop = loop
        self._unit = unit
        self._may_be_nic = may_be_nic
        self._adapters = adapters
        self._is_settled = is_settled
        self._asking = threading.BoundedSemaphore(MAX_ASKING)
        self._noted = noted
        self.pods: frozenset[tuple[str, str]] = frozenset()
        """Namespace and name of all pods that kubelet knew when it was last asked for claims."""
        self.containers: Mapping[str, str] = {}
        """Unit → the container that had it then. An init container's units are not told."""

    def reconfigure(self, config: Config) -> None:
        """Go by another configuration from now on."""
        self._config = config

    def devices(self, pod: PodRef) -> Sequence[GrantedDevice]:
        """List the devices that kubelet gave to a pod and that have to do with its network. Runs on the call's thread.

        These are VFs and whole adapters, rails' too, and each shared HCA, once, whose resource names a network; of a
        resource that is bound late now, those from before. Slots are the binder's.
        Once the grants agree with kubelet and none of them is such a device's, none is this pod's either, and
        kubelet need not be asked. Until then kubelet is the authority: the ledger may be a new one.
        Raises Unavailable if kubelet does not answer, DeviceGone for a unit that nobody knows, and UnknownUnit for a
        device of a resource that is configured no more: what is to be done with it, nobody knows.
        """
        wanted = {r.name: r.nic_kind for r in self._config.resources if r.joins_network}
        granted = self._ledger.granted_devices(wanted)
        if any(r.binding == "late" for r in self._config.resources):
            granted = {unit: device for unit, device in granted.items() if not is_slot_id(unit)}
        strange = self._of_no_resource(pod)
        if not strange and (not wanted or (self._is_settled() and not granted and pod.uid not in self._noted())):
            return ()
        found = self.ask_kubelet(pod)
        if found is None:
            return ()
        self._ledger.bind(found.all_device_ids, pod)
        _refuse(strange, found)
        mine = []
        for name in sorted(wanted):
            conf = self.network_of(name)
            shared = set[str]()
            for unit_id in sorted(unit for unit in found.device_ids(name) if not is_slot_id(unit)):
                offered = self._unit(unit_id)
                device = granted.get(unit_id) or (offered.device if offered is not None else None)
                if device is None:
                    raise DeviceGone(unit_id, f"among the units of {name}, though kubelet gave it to {pod}")
                if wanted[name] == "hca" and device in shared:
                    continue  # several shares of one HCA
                shared.add(device)
                is_whole = conf is None and offered is not None and offered.kind == "nic"
                mine.append(GrantedDevice(device, name, {"mode": "nic"} if is_whole else conf))
        return mine

    def _of_no_resource(self, pod: PodRef) -> Set[tuple[str, str]]:
        """List resource name and unit of the network devices that may be the pod's, whose resource is gone."""
        return {
            (grant.resource_name, grant.unit_id)
            for grant in self._ledger.grants_beyond(resource.name for resource in self._config.resources)
            if is_pci_address(grant.device)
            and self._may_be_nic(grant.device)
            and not (is_share_id(grant.unit_id) or is_slot_id(grant.unit_id))
            and (grant.pod is None or (grant.pod.namespace, grant.pod.name) == (pod.namespace, pod.name))
        }

    def network_of(self, resource_name: str) -> Mapping[str, Any] | None:
        """Return the CNI configuration that a resource's devices are set up with in a chained call."""
        resource = next((r for r in self._config.resources if r.name == resource_name), None)
        if resource is None:
            return None
        network = self._config.network(resource.network) if resource.network is not None else None
        if network is not None:
            return document_for(resource, network)
        return {"mode": "nic"} if resource.nic_kind == "nic" else None

    async def claims(self) -> Sequence[Claim]:
        """List what kubelet says that pods hold of our resources. Runs on the loop; raises Unavailable."""
        pods = await self._kubelet.list()
        self.pods = frozenset((found.pod.namespace, found.pod.name) for found in pods)
        told = _claims_of(pods)
        self.containers = {claim.unit_id: claim.container for claim in told}
        # Units of a pool that stands for a number of containers are in no books. A resource that is configured no more
        # is in the pods that have it all the same.
        names = {r.name for r in self._config.resources if not isinstance(r.compat, SharedPool)}
        names |= {grant.resource_name for grant in self._ledger.grants()}
        found: dict[tuple[PodRef, str, str], Claim] = {}
        for claim in told:
            offered = self._unit(claim.unit_id)
            is_offered = offered is not None and offered.resource_name == claim.resource_name
            # A slot is ours by its name, whatever has become of its resource.
            if is_offered or claim.resource_name in names or is_slot_of(claim.resource_name, claim.unit_id):
                found.setdefault((claim.pod, claim.resource_name, claim.unit_id), claim)
        return tuple(found.values())

    def units(self, pod: PodRef) -> Sequence[tuple[str, str]]:
        """List resource name and unit of all that a pod holds, of any plugin. Not on the loop; raises Unavailable."""
        found = self.ask_kubelet(pod)
        return [(claim.resource_name, claim.unit_id) for claim in _claims_of([found])] if found is not None else []

    def holding(self, pod: PodRef) -> Holding | None:
        """Ask which PCI devices a pod holds; None if kubelet does not know it. Not on the loop; raises Unavailable."""
        found = self.ask_kubelet(pod)
        if found is None:
            return None
        resources = {resource.name: resource for resource in self._config.resources}
        whole, shared = set[str](), set[str]()
        for claim in _claims_of([found]):
            resource = resources.get(claim.resource_name)
            is_shared = is_share_id(claim.unit_id) or (resource is not None and resource.nic_kind == "hca")
            (shared if is_shared else whole).update(self._behind(claim, resource))
        return Holding(frozenset(whole), frozenset(shared))

    def _behind(self, claim: Claim, resource: Resource | None) -> Collection[str]:
        """List the devices that a unit of a pod stands for."""
        if resource is not None and isinstance(resource.compat, SharedPool):
            return self._adapters(claim.resource_name)
        if is_slot_id(claim.unit_id):
            bound = self._ledger.binding_of(claim.unit_id)
            mine = bound is not None and (bound.pod.namespace, bound.pod.name) == (claim.pod.namespace, claim.pod.name)
            return {bound.device} if bound is not None and mine else set()
        granted = self._ledger.granted_devices([claim.resource_name]).get(claim.unit_id)
        offered = self._unit(claim.unit_id)
        is_offered = offered is not None and offered.resource_name == claim.resource_name
        return {granted or (offered.device if offered is not None and is_offered else claim.unit_id)}

    def ask_kubelet(self, pod: PodRef) -> PodDevices | None:
        """Ask what a pod holds, of any resource; None if kubelet does not know it. Not on the loop.

        Raises Unavailable.
        """
        if not self._asking.acquire(blocking=False):
            raise Unavailable(f"{MAX_ASKING} calls wait for kubelet to say what their pods hold: try again later")
        try:
            return ask(self._kubelet, self._loop, pod)
        finally:
            self._asking.release()


def ask(kubelet: PodResources, loop: asyncio.AbstractEventLoop, pod: PodRef) -> PodDevices | None:
    """Ask kubelet what a pod holds, of any resource; None if it does not know it. Not on the loop.

    Raises Unavailable.
    """
    asked = asyncio.run_coroutine_threadsafe(kubelet.get(pod), loop)
    try:
        return asked.result(PODRESOURCES_SECONDS)
    except concurrent.futures.TimeoutError as error:
        asked.cancel()
        raise Unavailable(f"kubelet did not say what {pod} holds within {PODRESOURCES_SECONDS:g} s") from error


def _refuse(strange: Set[tuple[str, str]], found: PodDevices) -> None:
    for claim in _claims_of([found]):
        if (claim.resource_name, claim.unit_id) in strange:
            raise UnknownUnit(
                f"container {claim.container} has {claim.unit_id} of {claim.resource_name}, and the configuration has"
                " no resource of this name any more, so it cannot come into the pod: put the resource back, or"
                " recreate the pod"
            )


def document_for(resource: Resource, network: Network) -> dict[str, Any]:
    """Return the CNI configuration of a network for a resource's devices.

    One that names no mode takes whole adapters as such: the usual mode is for VFs, and for what programs drive.
    """
    is_whole = resource.nic_kind == "nic" and not any(network.netconf.get(key) for key in _OF_PROGRAMS)
    return {**({"mode": "nic"} if is_whole else {}), **network.netconf, "name": network.name}


_OF_PROGRAMS = ("vfio", "functionReset")
"""Keys that mode nic does not have."""


def _claims_of(pods: Sequence[PodDevices]) -> tuple[Claim, ...]:
    """List all that kubelet told, a claim for each unit and container that has it."""
    return tuple(
        Claim(pod.pod, device.resource_name, unit, container.name)
        for pod in pods
        for container in pod.containers
        for device in container.devices
        for unit in device.device_ids
    )
