"""Configurations of other device plugins, read as they are.

They were written for Go's decoder (encoding/json, Unmarshal), and their own examples spell keys in several ways: keys
come in any case, null is absent, unknown keys are overlooked. What it overlooks is noted as a warning; what it refuses
is a problem.

sriov-network-device-plugin: `{"resourceList": [...]}`
https://github.com/k8snetworkplumbingwg/sriov-network-device-plugin, file /etc/pcidp/config.json. Entries come in order,
and a device goes to the first pool, and the first selector of a pool, that takes it.

k8s-rdma-shared-dev-plugin: `{"configList": [...]}`, and its ancestor's `{"mode": "hca"}`
https://github.com/Mellanox/k8s-rdma-shared-dev-plugin, file /k8s-rdma-shared-dev-plugin/config.json. A pool offers
`rdmaHcaMax` units, and each of them is all adapters of the pool. With our own key `"allocation": "one-hca"` a unit is a
share of one adapter, and every adapter has `rdmaHcaMax` of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

from agent.config.resources import (
    KUBELETS_OWN,
    MAX_UNITS,
    RESOURCE_NAME,
    UNKNOWABLE,
    VDPA_TYPES,
    Resource,
    Select,
    SharedPool,
    SriovPool,
    hex_id,
    is_extended,
    number,
    pci_address,
    pkey,
    root_device,
)
from agent.config.section import shown
from agent.errors import ConfigError
from agent.model.device import LinkLayer
from agent.model.pf_selector import parse_pf, word

T = TypeVar("T")


def decode(text: str | bytes, source: str) -> Any:
    """Read JSON text; objects become lists of pairs in `Object`. Raises ConfigError."""
    try:
        return json.loads(text, object_pairs_hook=Pairs, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(source, [f"is not JSON: {error}"]) from error


class Pairs(dict[str, tuple[str, Any]]):
    """A JSON object by lower-case key: the key as written, and the value. The last one of a key counts."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__((key.lower(), (key, value)) for key, value in pairs)


class GoReader:
    """Typed access to one object, noting problems and warnings with their path."""

    def __init__(self, value: Any, path: str, problems: list[str], warnings: list[str]) -> None:
        self.path = path
        self.problems = problems
        self.warnings = warnings
        self.asked: set[str] = set()
        self.value = value if isinstance(value, Pairs) else Pairs([])
        if value is not None and not isinstance(value, Pairs):
            self.note("", f"must be an object, is {_shown(value)}")

    def at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path and key else self.path + key

    def note(self, key: str, text: str) -> None:
        self.problems.append(f"{self.at(key) or 'the document'}: {text}")

    def has(self, key: str) -> bool:
        """Return whether the key is there with anything but null."""
        return self.value.get(key.lower(), ("", None))[1] is not None

    def take(self, key: str, default: T, want: str, kind: type) -> T:
        self.asked.add(key.lower())
        value: Any = self.value.get(key.lower(), (key, None))[1]
        if value is None:
            return default
        if type(value) is kind:
            return cast(T, value)
        self.note(key, f"must be {want}, is {shown(plain(value), key)}")
        return default

    def text(self, key: str) -> str:
        return self.take(key, "", "text", str)

    def flag(self, key: str) -> bool:
        return self.take(key, False, "true or false", bool)

    def whole(self, key: str) -> int:
        value = self.take(key, 0, "a whole number", int)
        if abs(value) < 1 << 63:
            return value
        self.note(key, f"must be a whole number, is {_shown(value)}")
        return 0

    def items(self, key: str) -> list[Any]:
        return self.take(key, [], "a list", list)

    def objects(self, key: str) -> list[GoReader]:
        path = self.at(key)
        return [GoReader(item, f"{path}[{i}]", self.problems, self.warnings) for i, item in enumerate(self.items(key))]

    def object(self, key: str) -> GoReader:
        value = self.take(key, None, "an object", Pairs)
        return GoReader(value, self.at(key), self.problems, self.warnings)

    def strings(self, key: str, want: str, convert: Callable[[str], T]) -> tuple[T, ...]:
        """Read a list of texts, each converted; a conversion says no with ValueError."""
        found = []
        for i, item in enumerate(self.items(key)):
            try:
                if not isinstance(item, str):
                    raise ValueError(item)
                found.append(convert(item))
            except ValueError:
                self.note(f"{key}[{i}]", f"must be {want}, is {_shown(item)}")
        return tuple(found)

    def done(self) -> None:
        """Warn of keys that nobody asked for."""
        for folded, (key, _) in self.value.items():
            if folded not in self.asked:
                self.warnings.append(f"{self.at(key)}: is not a known key")


def plain(value: Any) -> Any:
    """Turn what `decode` made into plain dicts and lists, keys as written."""
    if isinstance(value, Pairs):
        return {key: plain(inner) for key, inner in value.values()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def _shown(value: Any) -> str:
    return shown(plain(value))


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON value")


# ------------------------------------------------------------------ sriov-network-device-plugin


SRIOV_PREFIX = "intel.com"
DEVICE_TYPES = ("netDevice", "accelerator")
LINK_TYPES = {"ether": LinkLayer.ETHERNET, "infiniband": LinkLayer.INFINIBAND}
"""As netlink and `ip link` call them."""
_SRIOV_NAME = re.compile(r"[a-zA-Z0-9_-]+")


def read_sriov(
    document: Any, problems: list[str], warnings: list[str], *, prefix: str = SRIOV_PREFIX, use_cdi: bool = False
) -> tuple[Resource, ...]:
    """Read a document. `prefix` and `use_cdi` are what the plugin's flags --resource-prefix and --use-cdi say."""
    top = GoReader(document, "", problems, warnings)
    pools = top.objects("resourceList")
    top.done()
    if not pools:
        top.note("resourceList", "is empty: it must list at least one pool")
    found: list[Resource] = []
    for pool in pools:
        resource = _sriov_pool(pool, prefix, use_cdi)
        if any(other.name == resource.name for other in found):
            pool.note("resourceName", f"{resource.name!r} is used twice")
        if not resource.select.any_of and _is_empty_list(pool, "selectors"):
            warnings.append(f"{pool.at('selectors')}: is an empty list, so the pool is left out")
        else:
            found.append(resource)
    return tuple(found)


def _sriov_pool(reader: GoReader, default_prefix: str, use_cdi: bool) -> Resource:
    name, prefix = reader.text("resourceName"), reader.text("resourcePrefix") or default_prefix
    full_name = f"{prefix}/{name}"
    if not _SRIOV_NAME.fullmatch(name) or not RESOURCE_NAME.fullmatch(full_name):
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


# ------------------------------------------------------------------- k8s-rdma-shared-dev-plugin


SHARED_PREFIX = "rdma"
MODE_UNITS = 1000
"""So many units rdma/hca has under `{"mode": "hca"}` (k8s-rdma-sriov-dev-plugin)."""
_SHARED_NAME = re.compile(r"[a-zA-Z0-9_]+")


def read_shared(
    document: Any, problems: list[str], warnings: list[str], *, use_cdi: bool = False
) -> tuple[tuple[Resource, ...], int | None]:
    """Read a document: the resources, and the seconds between rescans if it says so."""
    top = GoReader(document, "", problems, warnings)
    if "mode" in top.value and "configlist" not in top.value:
        return _of_mode(top, use_cdi), None
    interval = top.whole("periodicUpdateInterval")
    if interval < 0:
        top.note("periodicUpdateInterval", f"must not be negative, is {interval}")
    pools = top.objects("configList")
    top.done()
    if not pools:
        top.note("configList", "is empty: it must list at least one resource")
    found: list[Resource] = []
    for pool in pools:
        resource = _shared_pool(pool, use_cdi)
        if any(other.name.partition("/")[2] == resource.name.partition("/")[2] for other in found):
            pool.note("resourceName", f"{resource.name.partition('/')[2]!r} is used twice")
        found.append(resource)
    return tuple(found), interval if interval > 0 else None


def _of_mode(top: GoReader, use_cdi: bool) -> tuple[Resource, ...]:
    mode = top.text("mode") or "hca"
    top.asked.add("pfnetdevices")
    top.done()
    if mode != "hca":
        top.note(
            "mode",
            f"{mode!r} would make VFs and set them up, which is not done here: make them with the adapter's own tools,"
            " and offer them with a resource of kind vf",
        )
    return (Resource(name="rdma/hca", kind="hca", compat=SharedPool(MODE_UNITS, use_cdi)),)


def _shared_pool(reader: GoReader, use_cdi: bool) -> Resource:
    name, prefix = reader.text("resourceName"), reader.text("resourcePrefix") or SHARED_PREFIX
    full_name = f"{prefix}/{name}"
    if not _SHARED_NAME.fullmatch(name) or not RESOURCE_NAME.fullmatch(full_name):
        reader.note("resourceName", f"must be a name of letters, digits and _, is {name!r} (in full {full_name!r})")
    elif not is_extended(full_name):
        reader.note("resourcePrefix", f"{full_name} {KUBELETS_OWN}")
    most = reader.whole("rdmaHcaMax")
    if not 0 <= most <= MAX_UNITS:
        reader.note("rdmaHcaMax", f"must be from 0 to {MAX_UNITS}, is {most}")
    devices = reader.strings("devices", "an interface name", word)
    selector = reader.object("selectors")
    select = Select(
        vendors=selector.strings("vendors", "a hexadecimal vendor ID such as 15b3", hex_id),
        devices=selector.strings("deviceIDs", "a hexadecimal device ID such as 101b", hex_id),
        drivers=selector.strings("drivers", "a driver name", word),
        netdevs=selector.strings("ifNames", "an interface name", word),
        link_layers=selector.strings("linkTypes", "ether or infiniband", link_type),
    )
    selector.done()
    if select == Select() and not devices:
        reader.note("selectors", "is missing or empty: say which adapters, by vendors, deviceIDs, drivers, ifNames …")
    if select != Select() and devices:
        reader.note("devices", "excludes selectors: keep one of them")
    if devices:
        reader.warnings.append(f"{reader.at('devices')}: is deprecated; write selectors.ifNames")
        select = Select(netdevs=devices)
    one_hca = _is_one_hca(reader)
    if one_hca and most == 0:
        reader.note("rdmaHcaMax", "must be at least 1 with allocation one-hca")
    reader.done()
    if one_hca:
        return Resource(name=full_name, kind="hca", select=select, shares=most, management=True)
    return Resource(name=full_name, kind="hca", select=select, compat=SharedPool(most, use_cdi))


def _is_one_hca(reader: GoReader) -> bool:
    allocation = reader.text("allocation") or "all"
    if allocation not in ("all", "one-hca"):
        reader.note("allocation", f"must be all or one-hca, is {allocation!r}")
    return allocation == "one-hca"
