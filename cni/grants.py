"""What CNI must know of what is not its own: what resources offer, and what kubelet gave to whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from agent.config import CniSettings
from agent.config.networks import Network
from agent.errors import RequestInvalid
from agent.kubelet.podresources import PodDevices
from agent.model.allocation import NO_SETTINGS, Attachment, PodRef, VfSettings

NOTHING: Mapping[str, str] = MappingProxyType({})
ANYTHING_GOES = CniSettings(require_grant=False)


@dataclass(frozen=True, slots=True)
class GrantedDevice:
    """A VF that kubelet granted to a pod, and the network it joins."""

    device: str
    resource_name: str
    network: Network | None
    unit_id: str = ""
    """The slot that the device was chosen for; empty for a unit that names its device itself."""
    claim_uid: str = ""
    """The DRA claim that it was prepared for; empty for a unit."""
    ifname: str = ""
    """Name of its interface in the pod, with %d where a number is to be; empty for `usual`."""
    usual: str = ""
    """The same, but where another has that name a number comes behind it; empty for the next free one."""
    files_only: bool = False
    """Whether its character devices are all of it that the pod gets."""
    beside: tuple[str, ...] = ()
    """All NICs of the rail that it came with, itself included; none where a unit is one device."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What kubelet gave to one pod, as PCI addresses."""

    whole: frozenset[str] = frozenset()
    """VFs and adapters that are the pod's alone."""
    shared: frozenset[str] = frozenset()
    """Adapters of which it has a share."""

    def __or__(self, other: Holding) -> Holding:
        return Holding(self.whole | other.whole, self.shared | other.shared)


class Grants:
    """Whom to ask for it; any thread may. As it stands here nothing is offered or granted, and anything goes.

    `cni.held.HeldDevices` knows more. What asks kubelet may raise Unavailable.
    """

    @property
    def settings(self) -> CniSettings:
        """What the configuration of this moment says of CNI."""
        return ANYTHING_GOES

    @property
    def is_settled(self) -> bool:
        """Whether the books have agreed with kubelet's word once since the start."""
        return True

    def offered(self) -> Mapping[str, str]:
        """Map the PCI devices that resources offer to kubelet to their resources."""
        return NOTHING

    def network_of(self, resource_name: str, device: str) -> Network | None:
        """Return what a device of a resource joins in a chained call; None too if that is not to be told."""
        return None

    def named_network(self, name: str, device: str) -> Network:
        """Return what a device joins as an entry of the configuration says. Raises RequestInvalid."""
        raise RequestInvalid(f"network {name} is not in the agent's configuration")

    def settled(self, found: GrantedDevice) -> GrantedDevice:
        """Fill in what a device's network, and its name, say of the place that it stands at. Raises RequestInvalid."""
        return found

    def rates_of(self, resource_name: str) -> VfSettings:
        """Tell what the VFs of a resource may send, where their network says nothing of it."""
        return NO_SETTINGS

    def verbs_node(self, device: str) -> str | None:
        """Tell which verbs node kubelet was told of a device when it was granted, if that is known."""
        return None

    def devices(self, pod: PodRef) -> Sequence[GrantedDevice]:
        """List the devices that kubelet gave to a pod and that have to do with its network."""
        return ()

    def claimed(self, pod: PodRef, device: str) -> GrantedDevice | None:
        """Tell how a pod has a device by a claim; None if it has not."""
        return None

    def of_place(self, pod: PodRef, place: str) -> Sequence[GrantedDevice]:
        """List the devices that were chosen for a pod's claims where these have a place. Raises AgentError."""
        return ()

    def follows(self, device: str) -> bool:
        """Tell whether containers get whatever files a unit's device has in its pod."""
        return False

    def entered(self, row: Attachment, netns: int) -> None:
        """Have what containers will get agree with what a device became in its pod. Raises AgentError."""

    def attached(self, rows: Sequence[Attachment], result: Mapping[str, Any], netns: int) -> None:
        """Have what containers will get and read agree with what came into their pod, as ADD is to answer.

        The rows are of one pod, whose namespace is given. Raises AgentError.
        """

    def detached(self, container_id: str, pod: PodRef) -> None:
        """Have nothing left of what was told to containers of a sandbox whose DEL has come."""

    def units(self, pod: PodRef) -> Iterable[tuple[str, str]]:
        """List resource name and unit of all that kubelet gave to a pod, of any plugin."""
        return ()

    def pod_devices(self, pod: PodRef) -> PodDevices | None:
        """Ask kubelet what a pod holds, of any resource; None if it does not know the pod."""
        return None

    def holding(self, pod: PodRef) -> Holding | None:
        """Ask kubelet which PCI devices a pod has; None if it does not know the pod."""
        return Holding()


NO_GRANTS = Grants()
