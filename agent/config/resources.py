"""The keys of `resources` and of their selectors, declared and read: which a resource may have depends on its kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agent.config import declare
from agent.config.compat.pools import SharedPool, SriovPool
from agent.config.declare import foreign_keys, read_fields
from agent.config.naming import (
    KUBELETS_OWN,
    NETWORK_SCHEMA,
    RESOURCE_NAME,
    hex_id,
    is_extended,
    is_network_name,
    number,
    pci_address,
    pci_class,
    pkey,
    root_device,
)
from agent.config.networks import MAX_RATE
from agent.config.reader import Reader, WrongEntry
from agent.model.allocation import VfSettings
from agent.model.device import LinkLayer
from agent.model.mounts import MOUNT_WORDS, Mount, parse_mount
from agent.model.pf_selector import PfSelector, parse_pf, word

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


def _mount(text: str) -> Mount:
    try:
        return parse_mount(text)
    except ValueError as error:
        raise WrongEntry(error) from error


def _shares() -> Any:
    return declare.only(("hca",), declare.whole(DEFAULT_SHARES, 1, MAX_UNITS, about="Units that one HCA offers"))


@dataclass(frozen=True, slots=True)
class Select:
    """Which devices a resource takes: AND between fields, OR inside one. Empty: no condition."""

    vendors: tuple[int, ...] = declare.strings(f"{_ID} such as 15b3", hex_id, about="PCI vendor IDs, four digits")
    devices: tuple[int, ...] = declare.strings(f"{_ID} such as 101e", hex_id, about="PCI device IDs, four digits")
    classes: tuple[str, ...] = declare.strings(
        "the first 2, 4 or 6 hexadecimal digits of a PCI class",
        pci_class,
        about="PCI class codes by their first 2, 4 or 6 digits: 0207 is InfiniBand",
    )
    drivers: tuple[str, ...] = declare.strings("a driver name", word, about="Kernel drivers")
    pci_addresses: tuple[str, ...] = declare.strings(
        "a PCI address such as 0000:3b:00.0", pci_address, about="PCI addresses of the devices"
    )
    acpi_indexes: tuple[str, ...] = declare.strings(
        "a number in quotes", number, about="The firmware's numbers (`acpi_index` in sysfs), in quotes"
    )
    pf: tuple[PfSelector, ...] = declare.only(
        NETWORK_KINDS,
        declare.strings(
            "NAME or NAME#0-7,9 (a PF's interface or PCI address, then VF indices)",
            parse_pf,
            about="PFs by interface or PCI address, all or with VF indices: `ens1f0`, `ens1f0#0-7,9`",
        ),
    )
    root_devices: tuple[PfSelector, ...] = declare.only(
        NETWORK_KINDS,
        declare.strings(
            "a PF's PCI address, or ADDRESS#0-7,9 with VF indices",
            root_device,
            about="The same by PCI address only; heeded besides `pf`",
        ),
    )
    netdevs: tuple[str, ...] = declare.only(
        NETWORK_KINDS, declare.strings("an interface name", word, about="Interface names in the host")
    )
    rdma_devices: tuple[str, ...] = declare.only(
        NETWORK_KINDS,
        declare.strings("an RDMA device name such as mlx5_0", word, about="RDMA device names: `mlx5_0`"),
    )
    link_layers: tuple[LinkLayer, ...] = declare.only(
        NETWORK_KINDS,
        declare.strings(
            "InfiniBand or Ethernet",
            LinkLayer,
            key="linkLayer",
            schema={"enum": ["InfiniBand", "Ethernet"]},
            about="Link layers of the ports; of the PF's for a VF",
        ),
    )
    pkeys: tuple[int, ...] = declare.only(
        NETWORK_KINDS,
        declare.strings(
            "a partition key such as 0x8001", pkey, key="pKeys", about="First partition key of an InfiniBand port"
        ),
    )
    is_rdma: bool = declare.only(NETWORK_KINDS, declare.flag(False, about="Only devices that have an RDMA device"))
    vdpa_type: str = declare.only(
        NETWORK_KINDS, declare.choice("", VDPA_TYPES, about="Only devices with a vDPA device of this kind")
    )
    """Empty: no condition."""
    need_vhost_net: bool = declare.only(
        NETWORK_KINDS,
        declare.flag(False, about="No condition: hand out /dev/vhost-net and /dev/net/tun with what it takes"),
    )
    any_of: tuple[Select, ...] = ()
    """Besides the above, one of these must take the device; the first that does counts."""


@dataclass(frozen=True, slots=True)
class RailNic:
    """The NIC half of a rail."""

    kind: str = "vf"
    """vf, hca or nic."""
    select: Select = Select()
    shares: int = _shares()
    """So many rails may one HCA serve."""
    count: int | str = declare.count(
        MAX_NICS,
        PLANES,
        about="NICs that each rail has: so many, the nearest to its GPU; planes: one of each plane of the nearest",
    )


@dataclass(frozen=True, slots=True)
class Resource:
    name: str
    kind: str
    """hca, vf, nic (a whole PF or other adapter), gpu, rail (a GPU with its nearest NIC), or accelerator (a
    processing accelerator, PCI class 12)."""
    select: Select = Select()
    gpu: Select = Select()
    """rail only."""
    nic: RailNic = RailNic()
    """rail only."""
    exclude_topology: bool = declare.flag(
        False, about="Tell kubelet no NUMA node, so that its topology manager does not mind"
    )
    management: bool = declare.only(NETWORK_KINDS, declare.flag(False, about="Hand out the umad and issm devices too"))
    network: str | Mapping[str, str] | None = declare.only(
        NETWORK_KINDS,
        declare.value(
            None,
            "the name of a network, or a mapping of PFs (interface or PCI address) to such names",
            is_network_name,
            schema=NETWORK_SCHEMA,
            about="Entry of `networks` that says what becomes of the device in the pod, or one for each PF",
        ),
    )
    """A VF joins it when the CNI request names no device; an HCA's says what interface a pod gets upon its netdev."""
    environment: tuple[str, ...] = declare.only(
        NETWORK_KINDS,
        declare.words(ENVIRONMENTS, about="Variables and files that tell libraries which adapters are theirs"),
    )
    mounts: tuple[Mount, ...] = declare.only(
        NETWORK_KINDS,
        declare.strings(
            MOUNT_WORDS,
            _mount,
            about="Libraries of the host that its containers get, read-only: `HOST` or `HOST:CONTAINER`",
        ),
    )
    """Provider libraries, which must match the kernel's driver."""
    spread: bool = declare.only(
        ("vf", "hca"),
        declare.flag(
            True,
            about="Among devices that are equally near: by load, over all PFs; false: one PF filled before another",
        ),
    )
    min_tx_rate: int | None = declare.only(
        ("vf",),
        declare.whole(
            None,
            0,
            MAX_RATE,
            key="min_tx_rate",
            about="Mbit/s that the PF guarantees each VF, where its network says nothing of rates; 0: none",
        ),
    )
    max_tx_rate: int | None = declare.only(
        ("vf",),
        declare.whole(
            None,
            0,
            MAX_RATE,
            key="max_tx_rate",
            about="Mbit/s that the PF lets each VF send at most, where its network says nothing of rates; 0: any",
        ),
    )
    offer: str = declare.only(
        OFFERED_KINDS,
        declare.choice(
            "devicePlugin",
            OFFERS,
            about="Who hands it out: kubelet's device plugins, or the scheduler by claims (DRA)",
        ),
    )
    binding: str = declare.only(
        LATE_KINDS,
        declare.choice(
            "early",
            BINDINGS,
            about="early: kubelet (with DRA the scheduler) chooses the device; late: it is chosen when the pod's GPUs"
            " are known (device plugin: with the pod's network, so not for hostNetwork, nor shares of an hca)",
        ),
    )
    slots: int | None = declare.only(
        LATE_KINDS,
        declare.whole(
            None, 1, MAX_UNITS, about="Late binding: number of units, if it is to be less than that of devices"
        ),
    )
    shares: int = _shares()
    mig: str = declare.only(
        ("gpu",),
        declare.choice(
            "none",
            MIG_STRATEGIES,
            about="How slices (MIG) are offered: not, instead of their GPU under this name, or by profile",
        ),
    )
    replicas: int = declare.only(
        ("gpu",), declare.whole(1, 1, MAX_UNITS, about="Containers that take turns on one GPU")
    )
    pass_by: tuple[str, ...] = declare.only(
        ("gpu", "rail"),
        declare.words(PASS_BY, about="How the container gets the GPU; default: what the node has"),
    )
    mig_profile: str = ""
    """Not configured: the profile of a resource that `mig: mixed` makes."""
    derived_from: str = ""
    """Not configured: name of the resource that made it."""
    protected: tuple[str, ...] = ()
    """Not configured here: what `cni.protect` names, and no resource takes."""
    bonded: bool = False
    """Not configured here: whether its network joins two VFs of different PFs into one interface."""
    compat: SriovPool | SharedPool | None = None
    """Behave as another project's device plugin does: the resource comes from its configuration."""

    @property
    def networks(self) -> Mapping[str, str]:
        """The networks that its devices join: where the configuration names each, below `network` → its name."""
        if isinstance(self.network, str):
            return {"": self.network}
        return {f".{pf}": name for pf, name in (self.network or {}).items()}

    @property
    def nic_kind(self) -> str:
        """The kind of what a unit brings besides a GPU."""
        return self.nic.kind if self.kind == "rail" else self.kind

    @property
    def rates(self) -> VfSettings:
        """What its VFs may send, where their network says nothing of it."""
        return VfSettings(min_tx_rate=self.min_tx_rate, max_tx_rate=self.max_tx_rate)

    @property
    def has_slots(self) -> bool:
        """Whether kubelet counts slots of it, whose devices are chosen late. Claims are prepared, and need none."""
        return self.binding == "late" and self.offer != "dra"

    @property
    def joins_network(self) -> bool:
        """Whether its units are devices that come into the pod's network."""
        return self.nic_kind in ("vf", "nic") or (self.nic_kind == "hca" and self.network is not None)


LEAVE_OUT = "leave it out"
_INSTEAD = {
    **{("offer", kind): f"a {kind} is offered by device plugins only" for kind in KINDS},
    ("spread", "gpu"): "GPUs are always taken so that switches and NUMA nodes stay whole, so leave it out",
}
UNKNOWABLE = {
    "ddpProfiles": "cannot be looked up here: select the PFs that carry the profile by pf or pciAddresses",
    "auxTypes": "scalable functions are not offered: select VFs or whole adapters",
}


def read_select(reader: Reader, key: str, kind: str | None) -> Select:
    """Read a selector of a resource of this kind: one mapping, or a list of which any may take a device."""
    if not isinstance(reader.value.get(key), list):
        return _one(
            reader.section(key, about="Which devices it takes; of a list, any may take one", or_many=True), kind
        )
    return Select(any_of=tuple(_one(r, kind) for r in reader.sections(key)))


def _one(reader: Reader, kind: str | None) -> Select:
    for key in sorted(reader.value.keys() & foreign_keys(Select, kind or "vf").keys()):
        reader.asked.add(key)
        reader.note(key, f"matches no {kind}; one is selected by vendors, devices, drivers or pciAddresses")
    for key, why in UNKNOWABLE.items():
        if key in reader.value:
            reader.asked.add(key)
            reader.note(key, why)
    select = Select(**read_fields(Select, reader, kind or "vf"))
    if select.is_rdma and select.vdpa_type:
        reader.note("vdpaType", "excludes isRdma")
    reader.done()
    return select


def read_resource(reader: Reader) -> Resource:
    """Read one entry. Which keys it may have depends on its kind."""
    reader.refuse_foreign()  # first: a pool that was copied lacks name and kind, too
    name = reader.text(
        "name", None, "domain/name, such as rdma/hca", RESOURCE_NAME, about="What pods ask for in their limits"
    )
    about = "What a unit is: a share of one HCA, a VF, a whole adapter, a GPU, a GPU with its nearest NIC, …"
    kind = reader.choice("kind", None, KINDS, about=about)
    if name is not None and not is_extended(name):
        reader.note("name", f"{name} {KUBELETS_OWN}")
    for key in ("name", "kind"):
        if key not in reader.value:
            reader.note(key, "is missing")
    found: dict[str, Any] = {}
    if kind == "rail":
        found["gpu"] = read_select(reader, "gpu", "gpu")
        found["nic"] = _rail_nic(reader.section("nic", about="The other half of a rail"))
    else:
        found["select"] = read_select(reader, "select", kind)
    found |= read_fields(Resource, reader, kind)
    for key, kinds in foreign_keys(Resource, kind).items() if kind in KINDS else ():
        if key in reader.value:
            reader.asked.add(key)
            reader.note(key, f"is for {', '.join(kinds)}, not {kind}: {_INSTEAD.get((key, kind), LEAVE_OUT)}")
    if found.get("slots") is not None and found["binding"] != "late":
        reader.note("slots", "needs binding: late; with early binding each selected device is a unit")
    resource = Resource(name=name or "", kind=kind or "", **found)
    for key, text in _of_offer(resource):
        reader.note(key, text)
    if kind:
        reader.done()
    return resource


def _of_offer(resource: Resource) -> Iterator[tuple[str, str]]:
    """List what a resource says that goes with the other offer only, and rates that contradict each other."""
    low, high = resource.min_tx_rate, resource.max_tx_rate
    if low and high and low > high:
        yield "min_tx_rate", f"{low} is above max_tx_rate {high} (Mbit/s)"
    if resource.kind == "hca" and resource.network is None and resource.has_slots:
        for word in (word for word in resource.environment if word in TOLD_AT_ADD):
            yield "environment", f"{word} needs network: without one no file is written"
    if resource.offer == "dra":
        if resource.slots is not None:
            yield "slots", "is for offer: devicePlugin; with dra each place has as many units as devices"
        if len(resource.name) > MAX_ATTRIBUTE:
            yield "name", f"is longer than {MAX_ATTRIBUTE} characters, which DRA has no room for"
    elif resource.kind == "hca" and resource.binding == "late" and resource.shares != 1:
        yield "binding", "late needs shares: 1 for an hca, or offer: dra; with more, kubelet chooses the share"


def _rail_nic(reader: Reader) -> RailNic:
    kind = str(reader.choice("kind", "vf", RAIL_NIC_KINDS, about="What the NIC half is"))
    nic = RailNic(kind=kind, select=read_select(reader, "select", kind), **read_fields(RailNic, reader, kind))
    reader.done()
    return nic
