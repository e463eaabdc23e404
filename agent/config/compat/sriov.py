"""The configuration of sriov-network-device-plugin: `{"resourceList": [...]}`.

https://github.com/k8snetworkplumbingwg/sriov-network-device-plugin, file /etc/pcidp/config.json. Entries come in
order, and a device goes to the first pool, and the first selector of a pool, that takes it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from agent.config.compat.go_json import GoReader
from agent.config.compat.pools import SriovPool
from agent.config.naming import KUBELETS_OWN, RESOURCE_NAME, hex_id, is_extended, number, pci_address, pkey, root_device
from agent.config.resources import UNKNOWABLE, VDPA_TYPES, Resource, Select
from agent.model.device import LinkLayer
from agent.model.pf_selector import parse_pf, word

DEFAULT_PREFIX = "intel.com"
DEVICE_TYPES = ("netDevice", "accelerator")
LINK_TYPES = {"ether": LinkLayer.ETHERNET, "infiniband": LinkLayer.INFINIBAND}
"""As netlink and `ip link` call them."""
_NAME = re.compile(r"[a-zA-Z0-9_-]+")


def read_sriov(
    document: Any, problems: list[str], warnings: list[str], *, prefix: str = DEFAULT_PREFIX, use_cdi: bool = False
) -> tuple[Resource, ...]:
    """Read a document. `prefix` and `use_cdi` are what the plugin's flags --resource-prefix and --use-cdi say."""
    top = GoReader(document, "", problems, warnings)
    pools = top.objects("resourceList")
    top.done()
    if not pools:
        top.note("resourceList", "is empty: it must list at least one pool")
    found: list[Resource] = []
    for pool in pools:
        resource = _pool(pool, prefix, use_cdi)
        if any(other.name == resource.name for other in found):
            pool.note("resourceName", f"{resource.name!r} is used twice")
        if not resource.select.any_of and _is_empty_list(pool, "selectors"):
            warnings.append(f"{pool.at('selectors')}: is an empty list, so the pool is left out")
        else:
            found.append(resource)
    return tuple(found)


def _pool(reader: GoReader, default_prefix: str, use_cdi: bool) -> Resource:
    name, prefix = reader.text("resourceName"), reader.text("resourcePrefix") or default_prefix
    full_name = f"{prefix}/{name}"
    if not _NAME.fullmatch(name) or not RESOURCE_NAME.fullmatch(full_name):
        reader.note("resourceName", f"must be a name of letters, digits, - and _, is {name!r} (in full {full_name!r})")
    elif not is_extended(full_name):
        reader.note("resourcePrefix", f"{full_name} {KUBELETS_OWN}")
    device_type = reader.text("deviceType") or "netDevice"
    if device_type == "auxNetDevice":
        reader.note("deviceType", f"auxNetDevice: {UNKNOWABLE['auxTypes']}")
    elif device_type not in DEVICE_TYPES:
        reader.note("deviceType", f"must be one of {', '.join(DEVICE_TYPES)}, is {device_type!r}")
    exclude = reader.flag("excludeTopology")
    information = _additional_info(reader) if reader.has("additionalInfo") else None
    # The plugin's own in-memory form of `selectors`, which other tools write out with the rest.
    reader.asked |= {"additionalinfo", "selectorobj", "selectorobjs"}
    select = _selectors(reader, device_type)
    reader.done()
    return Resource(
        name=full_name,
        kind="accelerator" if device_type == "accelerator" else "vf",
        select=select,
        exclude_topology=exclude,
        compat=SriovPool(prefix, device_type, information, use_cdi),
    )


def _selectors(reader: GoReader, device_type: str) -> Select:
    """Read `selectors`: an object, or a list of objects of which any may take a device."""
    if isinstance(reader.value.get("selectors", ("", None))[1], list):
        return Select(any_of=tuple(_selector(each, device_type) for each in reader.objects("selectors")))
    return _selector(reader.object("selectors"), device_type)


def _selector(reader: GoReader, device_type: str) -> Select:
    common = Select(
        vendors=reader.strings("vendors", "a hexadecimal vendor ID such as 15b3", hex_id),
        devices=reader.strings("devices", "a hexadecimal device ID such as 101e", hex_id),
        drivers=reader.strings("drivers", "a driver name", word),
        pci_addresses=reader.strings("pciAddresses", "a PCI address such as 0000:3b:02.1", pci_address),
    )
    if device_type == "accelerator":
        reader.done()
        return common
    if reader.items("ddpProfiles"):
        reader.note("ddpProfiles", UNKNOWABLE["ddpProfiles"])
    reader.asked |= {"auxtypes"}
    vdpa_type = reader.text("vdpaType")
    if vdpa_type and vdpa_type not in VDPA_TYPES:
        reader.note("vdpaType", f"must be one of {', '.join(VDPA_TYPES)}, is {vdpa_type!r}")
    select = replace(
        common,
        acpi_indexes=reader.strings("acpiIndexes", "a number in quotes", number),
        pf=reader.strings("pfNames", "NAME or NAME#0-7,9 (a PF's interface, then VF indices)", parse_pf),
        root_devices=reader.strings("rootDevices", "a PF's PCI address, or ADDRESS#0-7,9", root_device),
        link_layers=reader.strings("linkTypes", " or ".join(LINK_TYPES), link_type),
        pkeys=reader.strings("pKeys", "a partition key such as 0x8001", pkey),
        is_rdma=reader.flag("isRdma"),
        vdpa_type=vdpa_type,
        need_vhost_net=reader.flag("needVhostNet"),
    )
    if select.is_rdma and select.vdpa_type:
        reader.note("vdpaType", "excludes isRdma")
    _warn_of_repeated_pfs(reader, select)
    reader.done()
    return select


def link_type(text: str) -> LinkLayer:
    """Read ether or infiniband. Raises ValueError."""
    try:
        return LINK_TYPES[text.lower()]
    except KeyError:
        raise ValueError(text) from None


def _warn_of_repeated_pfs(reader: GoReader, select: Select) -> None:
    for key, named in (("pfNames", select.pf), ("rootDevices", select.root_devices)):
        names = [entry.pf.lower() for entry in named]
        for name in sorted({name for name in names if names.count(name) > 1}):
            reader.warnings.append(
                f"{reader.at(key)}: names {name} several times; all entries count here, while"
                " sriov-network-device-plugin heeds the first only"
            )


def _additional_info(reader: GoReader) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    information = reader.object("additionalInfo")
    for device, inner in information.value.values():
        values = GoReader(inner, information.at(device), reader.problems, reader.warnings)
        found[device] = {key: values.text(key) for key, _ in values.value.values()}
    return found


def _is_empty_list(reader: GoReader, key: str) -> bool:
    return bool(reader.value.get(key.lower(), ("", None))[1] == [])
