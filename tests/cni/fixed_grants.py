"""Grants that a test fixes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agent.config import CniSettings
from agent.config.networks import Network
from agent.model.allocation import NO_SETTINGS, PodRef, VfSettings
from cni.call import ANYTHING_GOES, GrantedDevice, Grants


@dataclass
class FixedGrants(Grants):
    """Every pod has the same, unless something answers for each."""

    given: Sequence[GrantedDevice] = ()
    answer: Callable[[PodRef], Sequence[GrantedDevice]] | None = None
    """Says what a pod was given, in place of `given`."""
    resources: Mapping[str, str] = field(default_factory=dict)
    """Offered device → its resource."""
    verbs_nodes: Mapping[str, str] = field(default_factory=dict)
    networks: Mapping[str, Network] = field(default_factory=dict)
    """Resource, or "" for any other → what its devices join in a chained call."""
    rates: VfSettings = NO_SETTINGS
    """Of every resource."""
    units_of: Callable[[PodRef], Iterable[tuple[str, str]]] = lambda pod: ()
    cni: CniSettings = ANYTHING_GOES

    @property
    def settings(self) -> CniSettings:
        return self.cni

    def offered(self) -> Mapping[str, str]:
        return self.resources

    def network_of(self, resource_name: str, device: str) -> Network | None:
        return self.networks.get(resource_name, self.networks.get(""))

    def rates_of(self, resource_name: str) -> VfSettings:
        return self.rates

    def verbs_node(self, device: str) -> str | None:
        return self.verbs_nodes.get(device)

    def devices(self, pod: PodRef) -> Sequence[GrantedDevice]:
        return self.answer(pod) if self.answer is not None else tuple(self.given)

    def units(self, pod: PodRef) -> Iterable[tuple[str, str]]:
        return self.units_of(pod)
