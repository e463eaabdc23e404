"""The configuration of k8s-rdma-shared-dev-plugin: `{"configList": [...]}`, and its ancestor's `{"mode": "hca"}`.

https://github.com/Mellanox/k8s-rdma-shared-dev-plugin, file /k8s-rdma-shared-dev-plugin/config.json. A pool offers
`rdmaHcaMax` units, and each of them is all adapters of the pool. With our own key `"allocation": "one-hca"` a unit is a
share of one adapter, and every adapter has `rdmaHcaMax` of them.
"""

from __future__ import annotations

import re
from typing import Any

from agent.config.compat.go_json import GoReader
from agent.config.compat.pools import SharedPool
from agent.config.compat.sriov import link_type
from agent.config.naming import KUBELETS_OWN, RESOURCE_NAME, hex_id, is_extended
from agent.config.resources import MAX_UNITS, Resource, Select
from agent.model.pf_selector import word

DEFAULT_PREFIX = "rdma"
MODE_UNITS = 1000
"""So many units rdma/hca has under `{"mode": "hca"}` (k8s-rdma-sriov-dev-plugin)."""
_NAME = re.compile(r"[a-zA-Z0-9_]+")


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
        resource = _pool(pool, use_cdi)
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


def _pool(reader: GoReader, use_cdi: bool) -> Resource:
    name, prefix = reader.text("resourceName"), reader.text("resourcePrefix") or DEFAULT_PREFIX
    full_name = f"{prefix}/{name}"
    if not _NAME.fullmatch(name) or not RESOURCE_NAME.fullmatch(full_name):
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
