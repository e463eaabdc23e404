"""The keys of `resources` and of their selectors, declared and read: which a resource may have depends on its kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from agent.config.networks import MAX_RATE, NETWORK_NAME, of_rates
from agent.config.section import (
    Flag,
    Many,
    Once,
    OneOrMany,
    Refusal,
    Section,
    choice,
    keys_of,
    matching,
    must_be,
    shown,
    string,
    value,
    whole,
    wrong,
)
from agent.model.allocation import VfSettings
from agent.model.device import LinkLayer, is_pci_address
from agent.model.mounts import MOUNT_WORDS, Mount, parse_mount
from agent.model.pf_selector import PfSelector, parse_pf, word

T = TypeVar("T")
KINDS = ("hca", "vf", "nic", "gpu", "rail", "accelerator")
NETWORK_KINDS = ("vf", "hca", "nic", "rail")
RAIL_NIC_KINDS = ("vf", "hca", "nic")
OFFERED_KINDS = ("hca", "vf", "nic")
"""Kinds that DRA can offer; for GPUs there are other drivers."""
OFFERS = ("devicePlugin", "dra")
LATE_KINDS = OFFERED_KINDS
BINDINGS = ("early", "late")
MIG_STRATEGIES = ("none", "single", "mixed")
PASS_BY = ("cdi", "envvar", "volume-mounts", "device-specs")
ENVIRONMENTS = ("nccl", "ucx", "nvshmem", "mvapich2", "rails", "ncclTopo")
TOLD_AT_ADD = ("rails", "ncclTopo")
"""Words for files, which are written when the devices are in the pod."""
VDPA_TYPES = ("vhost", "virtio")
DEFAULT_SHARES = 63
"""A RoCE port has 128 GIDs and a sharer takes two (v1 and v2): about 63 pods fit one HCA."""
MAX_UNITS = 10_000
MAX_NICS = 64
"""Of one rail."""
PLANES = "planes"
"""Instead of a number: as many as the adapter has planes."""
MAX_ATTRIBUTE = 64
"""Length of a text in a DRA device's attributes, of which the resource's name is one."""
_ID = "a four-digit hexadecimal ID"


_NUMBER_OF_UNITS = whole(1, MAX_UNITS)


RESOURCE_NAME = re.compile(
    r"(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)*[a-z0-9](?:[a-z0-9-]*[a-z0-9])?/"
    r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
)
KUBELETS_OWN = "is a name of Kubernetes' own, which kubelet refuses: take a domain of yours"
_PF = re.compile(r"[^\s/]{1,15}")
"""An interface, or a PCI address."""
NETWORK_SCHEMA = {
    "anyOf": [
        {"type": "string", "pattern": f"^(?:{NETWORK_NAME.pattern})$"},
        {"type": "object", "additionalProperties": {"type": "string", "pattern": f"^(?:{NETWORK_NAME.pattern})$"}},
    ]
}


def _spelled(pattern: str, convert: Callable[[str], T]) -> Callable[[str], T]:
    def read(text: str) -> T:
        if not re.fullmatch(pattern, text):
            raise ValueError(text)
        return convert(text)

    return read


def _hexadecimal(text: str) -> int:
    return int(text, 16)


hex_id = _spelled(r"(?:0x)?[0-9a-fA-F]{4}", _hexadecimal)
"""Reads a PCI vendor or device ID."""
pci_class = _spelled(r"(?:0[xX])?[0-9a-fA-F]{2}(?:[0-9a-fA-F]{2}){0,2}", lambda text: text.lower().removeprefix("0x"))
"""Reads the first digits of a PCI class code."""
number = _spelled("[0-9]{1,10}", str)
"""Reads a number of the firmware's, as text."""
pkey = _spelled(r"(?:0x)?[0-9a-fA-F]{1,4}", _hexadecimal)
"""Reads a partition key."""


def root_device(text: str) -> PfSelector:
    """Read a PF's PCI address, perhaps with VF indices."""
    found = parse_pf(text)
    return PfSelector(pci_address(found.pf), found.vf_indices)


def pci_address(text: str) -> str:
    """Read a PCI address."""
    if not is_pci_address(text.lower()):
        raise ValueError(text)
    return text.lower()


def is_extended(name: str) -> bool:
    """Return whether kubelet takes a resource of this name from a plugin (core/v1/helper, IsExtendedResourceName)."""
    domain = name.partition("/")[0]
    return not domain.endswith("kubernetes.io") and not domain.startswith("requests.")


def is_network_name(value: Any) -> bool:
    """Return whether a value is a network's name, or names one for each of some PFs."""
    if not isinstance(value, dict):
        return isinstance(value, str) and NETWORK_NAME.fullmatch(value) is not None
    return bool(value) and all(
        isinstance(pf, str) and _PF.fullmatch(pf) and isinstance(name, str) and is_network_name(name)
        for pf, name in value.items()
    )


@dataclass(frozen=True, slots=True)
class SriovPool:
    """What an entry of sriov-network-device-plugin's `resourceList` says besides its selectors."""

    prefix: str
    """intel.com"""
    device_type: str = "netDevice"
    """netDevice or accelerator."""
    additional_info: Mapping[str, Mapping[str, str]] | None = None
    """By PCI address or `*`."""
    use_cdi: bool = False


@dataclass(frozen=True, slots=True)
class SharedPool:
    """What an entry of k8s-rdma-shared-dev-plugin's `configList` says besides its selectors."""

    hca_max: int
    """So many units, whatever number of HCAs; each unit is all HCAs."""
    use_cdi: bool = False


@dataclass(frozen=True, slots=True)
class Only:
    """The kinds of resources that have a key."""

    kinds: tuple[str, ...]


def only(*kinds: str) -> Only:
    return Only(kinds)


OF_NETWORK = only(*NETWORK_KINDS)


_KINDS: dict[type[Any], Mapping[str, tuple[str, ...]]] = {}
"""Made once: type hints are slow to read."""


def kinds_of(cls: type[Any]) -> Mapping[str, tuple[str, ...]]:
    """Map the keys that not all kinds have to those that do."""
    if cls in _KINDS:
        return _KINDS[cls]
    hints, names = get_type_hints(cls, include_extras=True), keys_of(cls)
    found = ((key, getattr(hints[name], "__metadata__", ())) for key, name in names.items())
    _KINDS[cls] = {key: each.kinds for key, said in found for each in said if isinstance(each, Only)}
    return _KINDS[cls]


def _mount(given: Any) -> Mount:
    if not isinstance(given, str):
        raise must_be(MOUNT_WORDS, is_text=True)
    try:
        return parse_mount(given)
    except ValueError as error:
        raise wrong(f"{shown(given)}: {error}") from error


def _not_kubelets(name: str) -> str:
    if not is_extended(name):
        raise wrong(f"{name} {KUBELETS_OWN}")
    return name


def _joined(found: Iterable[Select]) -> Select:
    return Select(any_of=tuple(found))


def _many(given: Any) -> int | str:
    if given == PLANES or (type(given) is int and 1 <= given <= MAX_NICS):
        return given  # type: ignore[no-any-return]
    raise ValueError


def _network(given: Any) -> Any:
    if not is_network_name(given):
        raise ValueError
    return given


@dataclass(frozen=True, slots=True)
class Select(Section):
    """Which devices a resource takes: AND between fields, OR inside one. Empty: no condition."""

    vendors: Many[Annotated[int, string(f"{_ID} such as 15b3", hex_id)]] = ()
    """PCI vendor IDs, four digits"""
    devices: Many[Annotated[int, string(f"{_ID} such as 101e", hex_id)]] = ()
    """PCI device IDs, four digits"""
    classes: Many[Annotated[str, string("the first 2, 4 or 6 hexadecimal digits of a PCI class", pci_class)]] = ()
    """PCI class codes, first 2, 4 or 6 digits: 0207 is InfiniBand"""
    drivers: Many[Annotated[str, string("a driver name", word)]] = ()
    """Kernel drivers"""
    pci_addresses: Many[Annotated[str, string("a PCI address such as 0000:3b:00.0", pci_address)]] = ()
    """PCI addresses of the devices"""
    acpi_indexes: Many[Annotated[str, string("a number in quotes", number)]] = ()
    """`acpi_index` in sysfs, in quotes"""
    pf: Annotated[
        Many[
            Annotated[
                PfSelector,
                string("NAME or NAME#0-7,9 (a PF's interface or PCI address, then VF indices)", parse_pf),
            ]
        ],
        OF_NETWORK,
    ] = ()
    """PFs by interface or PCI address, with or without VF indices: `ens1f0#0-7,9`"""
    root_devices: Annotated[
        Many[Annotated[PfSelector, string("a PF's PCI address, or ADDRESS#0-7,9 with VF indices", root_device)]],
        OF_NETWORK,
    ] = ()
    """The same by PCI address only; both must match"""
    netdevs: Annotated[Many[Annotated[str, string("an interface name", word)]], OF_NETWORK] = ()
    """Interface names in the host"""
    rdma_devices: Annotated[Many[Annotated[str, string("an RDMA device name such as mlx5_0", word)]], OF_NETWORK] = ()
    """RDMA device names: `mlx5_0`"""
    link_layers: Annotated[
        Many[
            Annotated[
                LinkLayer,
                string("InfiniBand or Ethernet", LinkLayer, {"enum": ["InfiniBand", "Ethernet"]}),
            ]
        ],
        OF_NETWORK,
        Field(alias="linkLayer"),
    ] = ()
    """Link layers of the ports; of the PF's for a VF"""
    pkeys: Annotated[
        Many[Annotated[int, string("a partition key such as 0x8001", pkey)]], OF_NETWORK, Field(alias="pKeys")
    ] = ()
    """First partition key of an InfiniBand port"""
    is_rdma: Annotated[Flag, OF_NETWORK] = False
    """Only devices that have an RDMA device"""
    # Empty: no condition.
    vdpa_type: Annotated[str, choice(*VDPA_TYPES), OF_NETWORK] = ""
    """Only devices with a vDPA device of this kind"""
    need_vhost_net: Annotated[Flag, OF_NETWORK] = False
    """No condition: hand out /dev/vhost-net and /dev/net/tun too"""
    any_of: SkipJsonSchema[tuple[Select, ...]] = ()
    """Besides the above, one of these must take the device; the first that does counts."""

    @classmethod
    def refused(cls, given: Mapping[str, Any]) -> Iterator[Refusal]:
        for refusal in super(Select, cls).refused(given):
            why = UNKNOWABLE.get(str(refusal.loc[0]))
            yield refusal if why is None else Refusal(refusal.loc, why)

    def contradictions(self) -> Iterator[Refusal]:
        if self.is_rdma and self.vdpa_type:
            yield Refusal(("vdpaType",), "excludes isRdma")


def _of_kind(selector: Any, kind: Any) -> Iterator[Refusal]:
    """List what no device of a kind has, in a selector or a list of them."""
    for i, one in enumerate(selector) if isinstance(selector, list) else [(None, selector)]:
        for key, kinds in kinds_of(Select).items():
            if isinstance(one, dict) and key in one and kind in KINDS and kind not in kinds:
                text = f"matches no {kind}; one is selected by vendors, devices, drivers or pciAddresses"
                yield Refusal((key,) if i is None else (i, key), text)


def _below(loc: str, found: Iterable[Refusal]) -> Iterator[Refusal]:
    return (Refusal((loc, *each.loc), each.text) for each in found)


@dataclass(frozen=True, slots=True)
class RailNic(Section):
    """The NIC half of a rail."""

    # vf, hca or nic.
    kind: Annotated[str, choice(*RAIL_NIC_KINDS)] = "vf"
    """What the NIC half is"""
    select: Annotated[Select, OneOrMany(_joined)] = Select()
    """Which devices it takes"""
    # So many rails may one HCA serve.
    shares: Annotated[int, _NUMBER_OF_UNITS, only("hca")] = DEFAULT_SHARES
    """Units that one HCA offers"""
    count: Annotated[
        int | str,
        value(
            f"a whole number from 1 to {MAX_NICS}, or {PLANES}",
            _many,
            {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_NICS}, {"const": PLANES}]},
        ),
    ] = 1
    """NICs of each rail: the nearest ones, or one of each plane of the nearest"""

    @classmethod
    def refused(cls, given: Mapping[str, Any]) -> Iterator[Refusal]:
        yield from super(RailNic, cls).refused(given)
        kind = given.get("kind", "vf")
        if "shares" in given and kind in ("vf", "nic"):
            yield Refusal(("shares",), f"is for hca, not {kind}: leave it out")


@dataclass(frozen=True)  # without slots: it remembers what follows from its keys
class Resource(Section):
    name: Annotated[str, matching("domain/name, such as rdma/hca", RESOURCE_NAME), AfterValidator(_not_kubelets)]
    """What pods ask for in their limits"""
    # hca, vf, nic (a whole PF or other adapter), gpu, rail (a GPU with its nearest NIC), or accelerator (a processing
    # accelerator, PCI class 12).
    kind: Annotated[str, choice(*KINDS)]
    """What a unit is: a share of an HCA, a VF, a whole adapter, a GPU, a GPU with its nearest NIC, an accelerator"""
    select: Annotated[Select, OneOrMany(_joined), only("hca", "vf", "nic", "gpu", "accelerator")] = Select()
    """Which devices it takes"""
    # rail only.
    gpu: Annotated[Select, OneOrMany(_joined), only("rail")] = Select()
    """Which devices it takes"""
    # rail only.
    nic: Annotated[RailNic, only("rail")] = RailNic()
    """The other half of a rail"""
    exclude_topology: Flag = False
    """Report no NUMA node to kubelet: the topology manager ignores this resource"""
    management: Annotated[Flag, OF_NETWORK] = False
    """Hand out the umad and issm devices too"""
    # A VF joins it when the CNI request names no device; an HCA's says what interface a pod gets upon its netdev.
    network: Annotated[
        str | Mapping[str, str] | None,
        value(
            "the name of a network, or a mapping of PFs (interface or PCI address) to such names",
            _network,
            NETWORK_SCHEMA,
        ),
        OF_NETWORK,
    ] = None
    """Entry of `networks` that the device joins, or one for each PF"""
    environment: Annotated[Once[Annotated[str, choice(*ENVIRONMENTS)]], OF_NETWORK] = ()
    """Variables and files by which libraries find their adapters"""
    # Provider libraries, which must match the kernel's driver.
    mounts: Annotated[
        Many[Annotated[Mount, PlainValidator(_mount), WithJsonSchema({"type": "string"})]], OF_NETWORK
    ] = ()
    """Libraries of the host for its containers, read-only: `HOST` or `HOST:CONTAINER`"""
    spread: Annotated[Flag, only("vf", "hca")] = True
    """Among equally near devices: spread over all PFs; false: fill one PF first"""
    min_tx_rate: Annotated[int | None, whole(0, MAX_RATE), only("vf"), Field(alias="min_tx_rate")] = None
    """Mbit/s guaranteed to each VF whose network has no rates; 0: none"""
    max_tx_rate: Annotated[int | None, whole(0, MAX_RATE), only("vf"), Field(alias="max_tx_rate")] = None
    """Mbit/s that each VF may send, if its network has no rates; 0: any"""
    offer: Annotated[str, choice(*OFFERS), only(*OFFERED_KINDS)] = "devicePlugin"
    """Who hands it out: kubelet, or the scheduler by claims (DRA)"""
    binding: Annotated[str, choice(*BINDINGS), only(*LATE_KINDS)] = "early"
    """early: kubelet (DRA: the scheduler) chooses the device; late: the agent, when the pod's GPUs are known (by limits
    not for hostNetwork, nor shares of an hca)"""
    slots: Annotated[int | None, _NUMBER_OF_UNITS, only(*LATE_KINDS)] = None
    """Late binding: number of units, if less than that of devices"""
    shares: Annotated[int, _NUMBER_OF_UNITS, only("hca")] = DEFAULT_SHARES
    """Units that one HCA offers"""
    mig: Annotated[str, choice(*MIG_STRATEGIES), only("gpu")] = "none"
    """How MIG slices are offered: not, under this name, or by profile"""
    replicas: Annotated[int, _NUMBER_OF_UNITS, only("gpu")] = 1
    """Containers that take turns on one GPU"""
    pass_by: Annotated[Once[Annotated[str, choice(*PASS_BY)]], only("gpu", "rail")] = ()
    """How the container gets the GPU; default: what the node has"""
    mig_profile: SkipJsonSchema[str] = ""
    """Not configured: the profile of a resource that `mig: mixed` makes."""
    derived_from: SkipJsonSchema[str] = ""
    """Not configured: name of the resource that made it."""
    protected: SkipJsonSchema[tuple[str, ...]] = ()
    """Not configured here: what `cni.protect` names, and no resource takes."""
    bonded: SkipJsonSchema[bool] = False
    """Not configured here: whether its network joins two VFs of different PFs into one interface."""
    compat: SkipJsonSchema[SriovPool | SharedPool | None] = None
    """Behave as another project's device plugin does: the resource comes from its configuration."""

    @property
    def networks(self) -> Mapping[str, str]:
        """The networks that its devices join: where the configuration names each, below `network` → its name."""
        if isinstance(self.network, str):
            return {"": self.network}
        return {f".{pf}": name for pf, name in (self.network or {}).items()}

    @cached_property
    def nic_kind(self) -> str:
        """The kind of what a unit brings besides a GPU."""
        return self.nic.kind if self.kind == "rail" else self.kind

    @cached_property
    def rates(self) -> VfSettings:
        """What its VFs may send, where their network says nothing of it."""
        return VfSettings(min_tx_rate=self.min_tx_rate, max_tx_rate=self.max_tx_rate)

    @cached_property
    def has_slots(self) -> bool:
        """Whether kubelet counts slots of it, whose devices are chosen late. Claims are prepared, and need none."""
        return self.binding == "late" and self.offer != "dra"

    @cached_property
    def joins_network(self) -> bool:
        """Whether its units are devices that come into the pod's network."""
        return self.nic_kind in ("vf", "nic") or (self.nic_kind == "hca" and self.network is not None)

    @classmethod
    def known(cls, given: Mapping[str, Any]) -> Iterable[str]:
        kinds, kind = kinds_of(cls), given.get("kind")
        return (key for key in keys_of(cls) if kind not in KINDS or kind in kinds.get(key, KINDS))

    @classmethod
    def refused(cls, given: Mapping[str, Any]) -> Iterator[Refusal]:
        kind = given.get("kind")
        yield from super().refused(given)
        if isinstance(kind, str) and kind in KINDS:
            for key, kinds in kinds_of(cls).items():
                if key in given and kind not in kinds:
                    yield Refusal(
                        (key,), f"is for {', '.join(kinds)}, not {kind}: {_INSTEAD.get((key, kind), LEAVE_OUT)}"
                    )
        yield from _below("select", _of_kind(given.get("select"), kind))
        yield from _below("gpu", _of_kind(given.get("gpu"), "gpu"))
        if isinstance(nic := given.get("nic"), dict):
            found = _of_kind(nic.get("select"), nic.get("kind", "vf"))
            yield from _below("nic", _below("select", found))

    def contradictions(self) -> Iterator[Refusal]:
        if self.slots is not None and self.binding != "late":
            text = "needs binding: late; with early binding each selected device is a unit"
            yield Refusal(("slots",), text)
        yield from self._of_offer()

    def _of_offer(self) -> Iterator[Refusal]:
        """List what goes with the other offer only, and rates that contradict each other."""
        yield from of_rates(self.min_tx_rate, self.max_tx_rate)
        if self.kind == "hca" and self.network is None and self.has_slots:
            for word in (word for word in self.environment if word in TOLD_AT_ADD):
                text = f"{word} needs network: without one no file is written"
                yield Refusal(("environment",), text)
        if self.offer == "dra":
            if self.slots is not None:
                text = "is for offer: devicePlugin; with dra each place has as many units as devices"
                yield Refusal(("slots",), text)
            if len(self.name) > MAX_ATTRIBUTE:
                yield Refusal(("name",), f"is longer than {MAX_ATTRIBUTE} characters, which DRA has no room for")
        elif self.kind == "hca" and self.binding == "late" and self.shares != 1:
            text = "late needs shares: 1 for an hca, or offer: dra; with more, kubelet chooses the share"
            yield Refusal(("binding",), text)


LEAVE_OUT = "leave it out"
_INSTEAD = {
    **{("offer", kind): f"a {kind} is offered by device plugins only" for kind in KINDS},
    ("spread", "gpu"): "GPUs are always taken so that switches and NUMA nodes stay whole, so leave it out",
}
UNKNOWABLE = {
    "ddpProfiles": "cannot be looked up here: select the PFs that carry the profile by pf or pciAddresses",
    "auxTypes": "scalable functions are not offered: select VFs or whole adapters",
}
