"""Stand-ins, which tests fix, for what attachments ask and tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from agent.config import CniSettings, Config
from agent.config.networks import Network
from agent.edits.specs import Specs
from agent.errors import RequestInvalid
from agent.kubelet.podresources import PodDevices
from agent.model.allocation import NO_SETTINGS, Attachment, Hold, PodRef, VfSettings
from agent.state import Latest
from cni.add_facts import FactsWriter
from cni.attachment import USUAL, Attachments, Settings
from cni.call import Call, GrantedDevice, Holding, Node
from cni.pod_devices import HeldDevices
from cni.slots.binder import Binder

ANYTHING_GOES = CniSettings(require_grant=False)


@dataclass
class FixedDevices(HeldDevices):
    """Every pod has the same, unless something answers for each. Without more nothing is offered or held."""

    given: Sequence[GrantedDevice] = ()
    answer: Callable[[PodRef], Sequence[GrantedDevice]] | None = None
    """Says what a pod was given, in place of `given`."""
    resources: Mapping[str, str] = field(default_factory=dict)
    """Offered device → its resource."""
    networks: Mapping[str, Network] = field(default_factory=dict)
    """Resource, or "" for any other → what its devices join in a chained call."""
    rates: VfSettings = NO_SETTINGS
    """Of every resource."""
    units_of: Callable[[PodRef], Sequence[tuple[str, str]]] = lambda pod: ()
    asked_for: Callable[[PodRef], PodDevices | None] = lambda pod: None
    """What kubelet says of a pod."""
    cni: CniSettings = ANYTHING_GOES
    settles: Callable[[], bool] = lambda: True

    @property
    def settings(self) -> CniSettings:
        return self.cni

    @property
    def is_settled(self) -> bool:
        return self.settles()

    def offered(self) -> Mapping[str, str]:
        return self.resources

    def network_of(self, resource_name: str, device: str) -> Network | None:
        return self.networks.get(resource_name, self.networks.get(""))

    def named_network(self, name: str, device: str) -> Network:
        raise RequestInvalid(f"network {name} is not in the agent's configuration")

    def settled(self, found: GrantedDevice) -> GrantedDevice:
        return found

    def rates_of(self, resource_name: str) -> VfSettings:
        return self.rates

    def devices(self, pod: PodRef) -> Sequence[GrantedDevice]:
        return self.answer(pod) if self.answer is not None else tuple(self.given)

    def claimed(self, pod: PodRef, device: str) -> Hold | None:
        return None

    def units(self, pod: PodRef) -> Sequence[tuple[str, str]]:
        return self.units_of(pod)

    def pod_devices(self, pod: PodRef) -> PodDevices | None:
        return self.asked_for(pod)

    def holding(self, pod: PodRef) -> Holding | None:
        return Holding()


class NoSlots(Binder):
    """Binds none."""

    specs = cast(Specs, SimpleNamespace(had_slots=True))

    def __init__(self) -> None: ...

    def bind(self, call: Call, wanted: Callable[[], bool]) -> Sequence[GrantedDevice]:
        return ()

    def unbind(self, container_id: str, ifname: str) -> None: ...


class NoFacts(FactsWriter):
    """Writes none. It may know the verbs nodes that containers were promised."""

    def __init__(self, verbs_nodes: Mapping[str, str] | None = None) -> None:
        self.config = Latest(Config())
        self.verbs_nodes = verbs_nodes if verbs_nodes is not None else {}

    def entered(self, row: Attachment, netns: int) -> None: ...

    def attached(self, rows: Sequence[Attachment], result: Mapping[str, Any], netns: int) -> None: ...

    def detached(self, container_id: str, pod: PodRef) -> None: ...


def attachments_of(
    node: Node,
    held: HeldDevices | None = None,
    slots: Binder | None = None,
    facts: FactsWriter | None = None,
    settings: Settings = USUAL,
) -> Attachments:
    """Make attachments on a node; what is left out is stood in for."""
    return Attachments(node, held or FixedDevices(), slots or NoSlots(), facts or NoFacts(), settings)
