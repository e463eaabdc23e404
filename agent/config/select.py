"""Selectors: which devices a resource takes."""

from __future__ import annotations

import re
from dataclasses import replace

from agent.config.reader import Reader
from agent.config.values import VDPA_TYPES, Select
from agent.model.device import LinkLayer, is_pci_address
from agent.model.pf_selector import PfSelector, parse_pf, word

OF_NETWORK = {
    "pf",
    "rootDevices",
    "netdevs",
    "rdmaDevices",
    "linkLayer",
    "pKeys",
    "isRdma",
    "vdpaType",
    "needVhostNet",
}
UNKNOWABLE = {
    "ddpProfiles": "cannot be looked up here: select the PFs that carry the profile by pf or pciAddresses",
    "auxTypes": "scalable functions are not offered: select VFs or whole adapters",
}
_ID = "a four-digit hexadecimal ID"
_CLASS = re.compile(r"(?:0x)?([0-9a-f]{2}(?:[0-9a-f]{2}){0,2})")
_PKEY = re.compile(r"(?:0x)?[0-9a-fA-F]{1,4}")
_HEX_ID = re.compile(r"(?:0x)?[0-9a-fA-F]{4}")


def read_select(reader: Reader, key: str, kind: str | None) -> Select:
    """Read a selector of a resource of this kind: one mapping, or a list of which any may take a device."""
    if not isinstance(reader.value.get(key), list):
        return _one(
            reader.section(key, about="Which devices it takes; of a list, any may take one", or_many=True), kind
        )
    return Select(any_of=tuple(_one(r, kind) for r in reader.sections(key)))


def _one(reader: Reader, kind: str | None) -> Select:
    is_network = kind not in ("gpu", "accelerator")
    if not is_network:
        for key in sorted(reader.value.keys() & OF_NETWORK):
            reader.asked.add(key)
            reader.note(key, f"matches no {kind}; one is selected by vendors, devices, drivers or pciAddresses")
    for key, why in UNKNOWABLE.items():
        if key in reader.value:
            reader.asked.add(key)
            reader.note(key, why)
    select = Select(
        vendors=reader.strings("vendors", f"{_ID} such as 15b3", hex_id, about="PCI vendor IDs, four digits"),
        devices=reader.strings("devices", f"{_ID} such as 101e", hex_id, about="PCI device IDs, four digits"),
        classes=reader.strings(
            "classes",
            "the first 2, 4 or 6 hexadecimal digits of a PCI class",
            _class,
            about="PCI class codes by their first 2, 4 or 6 digits: 0207 is InfiniBand",
        ),
        drivers=reader.strings("drivers", "a driver name", word, about="Kernel drivers"),
        pci_addresses=reader.strings(
            "pciAddresses", "a PCI address such as 0000:3b:00.0", pci_address, about="PCI addresses of the devices"
        ),
        acpi_indexes=reader.strings(
            "acpiIndexes",
            "a number in quotes",
            number,
            about="The firmware's numbers (`acpi_index` in sysfs), in quotes",
        ),
    )
    select = _network_select(reader, select) if is_network else select
    reader.done()
    return select


def _network_select(reader: Reader, common: Select) -> Select:
    select = replace(
        common,
        pf=reader.strings(
            "pf",
            "NAME or NAME#0-7,9 (a PF's interface or PCI address, then VF indices)",
            parse_pf,
            about="PFs by interface or PCI address, all or with VF indices: `ens1f0`, `ens1f0#0-7,9`",
        ),
        root_devices=reader.strings(
            "rootDevices",
            "a PF's PCI address, or ADDRESS#0-7,9 with VF indices",
            root_device,
            about="The same by PCI address only; heeded besides `pf`",
        ),
        netdevs=reader.strings("netdevs", "an interface name", word, about="Interface names in the host"),
        rdma_devices=reader.strings(
            "rdmaDevices", "an RDMA device name such as mlx5_0", word, about="RDMA device names: `mlx5_0`"
        ),
        link_layers=reader.strings(
            "linkLayer",
            "InfiniBand or Ethernet",
            LinkLayer,
            schema={"enum": ["InfiniBand", "Ethernet"]},
            about="Link layers of the ports; of the PF's for a VF",
        ),
        pkeys=reader.strings(
            "pKeys", "a partition key such as 0x8001", pkey, about="First partition key of an InfiniBand port"
        ),
        is_rdma=reader.flag("isRdma", False, about="Only devices that have an RDMA device"),
        vdpa_type=reader.choice("vdpaType", "", VDPA_TYPES, about="Only devices with a vDPA device of this kind"),
        need_vhost_net=reader.flag(
            "needVhostNet", False, about="No condition: hand out /dev/vhost-net and /dev/net/tun with what it takes"
        ),
    )
    if select.is_rdma and select.vdpa_type:
        reader.note("vdpaType", "excludes isRdma")
    return select


def hex_id(text: str) -> int:
    if not _HEX_ID.fullmatch(text):
        raise ValueError(text)
    return int(text, 16)


def _class(text: str) -> str:
    found = _CLASS.fullmatch(text.lower())
    if not found:
        raise ValueError(text)
    return found[1]


def number(text: str) -> str:
    if not text.isascii() or not text.isdecimal() or len(text) > 10:
        raise ValueError(text)
    return text


def pkey(text: str) -> int:
    if not _PKEY.fullmatch(text):
        raise ValueError(text)
    return int(text, 16)


def root_device(text: str) -> PfSelector:
    found = parse_pf(text)
    return PfSelector(pci_address(found.pf), found.vf_indices)


def pci_address(text: str) -> str:
    if not is_pci_address(text.lower()):
        raise ValueError(text)
    return text.lower()
