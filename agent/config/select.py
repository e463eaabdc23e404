"""Selectors: which devices a resource takes."""

from __future__ import annotations

import re

from agent.config.reader import Reader
from agent.config.values import PfSelector, Select
from agent.model.device import LinkLayer, is_pci_address

_HEX_ID = re.compile(r"(?:0x)?[0-9a-fA-F]{4}")


def read_select(reader: Reader, kind: str | None) -> Select:
    """Read a selector of a resource of this kind."""
    if kind == "gpu":
        for key in reader.value.keys() & {"pf", "netdevs", "rdmaDevices", "linkLayer"}:
            reader.note(key, "matches no GPU; a GPU is selected by vendors, devices, drivers or pciAddresses")
    select = Select(
        vendors=reader.strings("vendors", "a four-digit hexadecimal ID such as 15b3", _hex_id),
        devices=reader.strings("devices", "a four-digit hexadecimal ID such as 101e", _hex_id),
        drivers=reader.strings("drivers", "a driver name", _word),
        pci_addresses=reader.strings("pciAddresses", "a PCI address such as 0000:3b:00.0", _address),
        pf=reader.strings("pf", "NAME or NAME#0-7,9 (a PF's interface or PCI address, then VF indices)", parse_pf),
        netdevs=reader.strings("netdevs", "an interface name", _word),
        rdma_devices=reader.strings("rdmaDevices", "an RDMA device name such as mlx5_0", _word),
        link_layers=reader.strings("linkLayer", "InfiniBand or Ethernet", LinkLayer),
    )
    reader.done()
    return select


def _hex_id(text: str) -> int:
    if not _HEX_ID.fullmatch(text):
        raise ValueError(text)
    return int(text, 16)


def _word(text: str) -> str:
    if not re.fullmatch(r"[^\s/]{1,64}", text) or text in (".", ".."):
        raise ValueError(text)
    return text


def _address(text: str) -> str:
    if not is_pci_address(text.lower()):
        raise ValueError(text)
    return text.lower()


def parse_pf(text: str) -> PfSelector:
    """Read `NAME` or `NAME#0-7,9`. Raises ValueError for anything else."""
    name, sharp, ranges = text.partition("#")
    _word(name)
    if not sharp:
        return PfSelector(name)
    indices: set[int] = set()
    for part in ranges.split(","):
        low, dash, high = part.partition("-")
        if not part.isascii() or not low.isdecimal() or (dash and not high.isdecimal()) or len(part) > 11:
            raise ValueError(text)
        first, last = int(low), int(high if dash else low)
        if not first <= last <= 65535:
            raise ValueError(text)
        indices.update(range(first, last + 1))
    return PfSelector(name, frozenset(indices))
