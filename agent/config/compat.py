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
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agent.config.resources import MAX_UNITS, UNKNOWABLE, Resource, SharedPool, SriovPool
from agent.config.section import Loc, Problem, fold, problems_of, shown
from agent.errors import ConfigError

SRIOV_PREFIX = "intel.com"
SHARED_PREFIX = "rdma"
MODE_UNITS = 1000
"""So many units rdma/hca has under `{"mode": "hca"}` (k8s-rdma-sriov-dev-plugin)."""
KIND_OF = {"netDevice": "vf", "accelerator": "accelerator"}
"""sriov-network-device-plugin's `deviceType` → our kind."""
LINK_TYPES = {"ether": "Ethernet", "infiniband": "InfiniBand"}
"""As netlink and `ip link` call them → as we do."""
_NO_MEANING = ("selectorobj", "selectorobjs", "auxtypes", "pfnetdevices")
"""Keys, folded, that are passed over: the first two are the plugin's own form of `selectors`, which other tools write
out with the rest."""


def _same(*keys: str, **others: str) -> Mapping[str, str]:
    return {**{key: key for key in keys}, **others}


_OF_ANY = _same("vendors", "devices", "drivers", "pciAddresses")
_OF_NICS = _same(
    *_OF_ANY,
    *("acpiIndexes", "rootDevices", "pKeys", "isRdma", "vdpaType", "needVhostNet", "ddpProfiles"),
    pfNames="pf",
    linkTypes="linkLayer",
)
_OF_SHARED = _same("vendors", "drivers", deviceIDs="devices", ifNames="netdevs", linkTypes="linkLayer")
"""Keys of selectors → ours."""
_INFORMATION = TypeAdapter(dict[str, dict[str, str]])


@cache
def _resource() -> TypeAdapter[Resource]:
    """Make the reader of a resource: once it is needed, for that takes a sixtieth of the agent's start."""
    return TypeAdapter(Resource)


def decode(text: str | bytes, source: str) -> Any:
    """Read JSON text. Raises ConfigError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(source, [f"is not JSON: {error}"]) from error


class _File:
    """One file, with what is wrong in it, and what is overlooked."""

    def __init__(self, problems: list[str], warnings: list[str]) -> None:
        self.problems = problems
        self.warnings = warnings

    def note(self, loc: Loc, text: str) -> None:
        self.problems.append(str(Problem(loc, text)))

    def spelled(self, given: Any, words: Mapping[str, str], loc: Loc = ()) -> dict[str, Any]:
        """Return an object's keys as `words` has them, without those that say nothing."""
        if not isinstance(given, dict):
            self.note(loc, f"must be an object, is {shown(given)}")
            return {}
        known = {fold(key): ours for key, ours in words.items()}
        found = {}
        for key, value in given.items():
            if (ours := known.get(fold(key))) is not None:
                if value is not None and value != "":
                    found[ours] = value
            elif fold(key) not in _NO_MEANING:
                self.warnings.append(str(Problem((*loc, key), "is not a known key")))
        return found

    def pools(self, top: Mapping[str, Any], key: str) -> Iterator[tuple[Loc, Any]]:
        """List the pools: place and document."""
        pools = top.get(key, [])
        if not isinstance(pools, list) or not pools:
            self.note((key,), f"must be a list of at least one pool, is {shown(pools)}")
        elif isinstance(pools, list):
            yield from (((key, i), pool) for i, pool in enumerate(pools))

    def selector(self, given: Any, words: Mapping[str, str], loc: Loc) -> dict[str, Any]:
        """Write a selector as one of ours."""
        found = {key: value for key, value in self.spelled(given, words, loc).items() if value != []}
        if isinstance(links := found.get("linkLayer"), list):
            found["linkLayer"] = [LINK_TYPES.get(str(link).lower(), link) for link in links]
        return found

    def resource(
        self, loc: Loc, words: Mapping[str, str], prefix: Any, name: Any, keys: Mapping[str, Any]
    ) -> Resource | None:
        """Read a pool, written as a resource of ours. `words` are those of its selectors."""
        if not isinstance(prefix, str):
            self.note((*loc, "resourcePrefix"), f"must be text, is {shown(prefix)}")
        full_name = f"{prefix}/{name}" if isinstance(name, str) else name
        try:
            return _resource().validate_python({"name": full_name, **keys})
        except ValidationError as error:
            theirs = {ours: key for key, ours in words.items()} | {"name": "resourceName", "select": "selectors"}
            for each in problems_of(error):
                self.note((*loc, *(theirs.get(str(part), part) for part in each.loc)), each.text)
            return None

    def add(self, found: list[Resource], resource: Resource, loc: Loc) -> None:
        if any(other.name == resource.name for other in found):
            self.note((*loc, "resourceName"), f"{resource.name!r} is used twice")
        found.append(resource)


# ------------------------------------------------------------------ sriov-network-device-plugin


def read_sriov(
    document: Any, problems: list[str], warnings: list[str], *, prefix: str = SRIOV_PREFIX, use_cdi: bool = False
) -> tuple[Resource, ...]:
    """Read a document. `prefix` and `use_cdi` are what the plugin's flags --resource-prefix and --use-cdi say."""
    file, found = _File(problems, warnings), list[Resource]()
    keys = ("resourceName", "resourcePrefix", "deviceType", "excludeTopology", "additionalInfo", "selectors")
    for loc, pool in file.pools(file.spelled(document, _same("resourceList")), "resourceList"):
        said = file.spelled(pool, _same(*keys), loc)
        selectors = said.get("selectors", {})
        if selectors == []:
            warnings.append(str(Problem((*loc, "selectors"), "is an empty list, so the pool is left out")))
            continue
        device_type = said.get("deviceType", "netDevice")
        if device_type == "auxNetDevice":
            file.note((*loc, "deviceType"), f"auxNetDevice: {UNKNOWABLE['auxTypes']}")
        elif device_type not in [*KIND_OF]:
            file.note((*loc, "deviceType"), f"must be one of {', '.join(KIND_OF)}, is {shown(device_type)}")
        kind = KIND_OF.get(str(device_type), "vf")
        words = _OF_NICS if kind == "vf" else _OF_ANY
        at = (*loc, "selectors")
        select: Any = (
            [file.selector(each, words, (*at, i)) for i, each in enumerate(selectors)]
            if isinstance(selectors, list)
            else file.selector(selectors, words, at)
        )
        own = {"kind": kind, "select": select, "excludeTopology": said.get("excludeTopology", False)}
        its_prefix = said.get("resourcePrefix", prefix)
        resource = file.resource(loc, words, its_prefix, said.get("resourceName", ""), own)
        information = _information(file, said.get("additionalInfo"), loc)
        if resource is not None:
            _warn_of_repeated_pfs(file, resource, at)
            compat = SriovPool(its_prefix, device_type, information, use_cdi)
            file.add(found, replace(resource, compat=compat), loc)
    return tuple(found)


def _warn_of_repeated_pfs(file: _File, resource: Resource, loc: Loc) -> None:
    for select in (resource.select, *resource.select.any_of):
        for key, named in (("pfNames", select.pf), ("rootDevices", select.root_devices)):
            names = [entry.pf.lower() for entry in named]
            for name in sorted({name for name in names if names.count(name) > 1}):
                text = f"names {name} several times; all entries count here, while the plugin heeds the first only"
                file.warnings.append(str(Problem((*loc, key), text)))


def _information(file: _File, given: Any, loc: Loc) -> dict[str, dict[str, str]] | None:
    if given is None:
        return None
    try:
        return _INFORMATION.validate_python(given)
    except ValidationError as error:
        for each in problems_of(error):
            file.note((*loc, "additionalInfo", *each.loc), each.text)
        return None


# ------------------------------------------------------------------- k8s-rdma-shared-dev-plugin


def read_shared(
    document: Any, problems: list[str], warnings: list[str], *, use_cdi: bool = False
) -> tuple[tuple[Resource, ...], int | None]:
    """Read a document: the resources, and the seconds between rescans if it says so."""
    file, found = _File(problems, warnings), list[Resource]()
    top = file.spelled(document, _same("mode", "configList", "periodicUpdateInterval"))
    if "mode" in top and "configList" not in top:
        if top["mode"] != "hca":
            text = (
                f"{shown(top['mode'])} would make VFs and set them up, which is not done here: make them with the"
                " adapter's own tools, and offer them with a resource of kind vf"
            )
            file.note(("mode",), text)
        return (Resource(name="rdma/hca", kind="hca", compat=SharedPool(MODE_UNITS, use_cdi)),), None
    interval = top.get("periodicUpdateInterval", 0)
    if type(interval) is not int or interval < 0:
        file.note(("periodicUpdateInterval",), f"must be a whole number of seconds from 0, is {shown(interval)}")
        interval = 0
    for loc, pool in file.pools(top, "configList"):
        if (resource := _shared_pool(file, pool, loc, use_cdi)) is not None:
            file.add(found, resource, loc)
    return tuple(found), interval or None


def _shared_pool(file: _File, pool: Any, loc: Loc, use_cdi: bool) -> Resource | None:
    keys = _same("resourceName", "resourcePrefix", "rdmaHcaMax", "devices", "selectors", "allocation")
    said = file.spelled(pool, keys, loc)
    select = file.selector(said.get("selectors", {}), _OF_SHARED, (*loc, "selectors"))
    if devices := said.get("devices"):
        if select:
            file.note((*loc, "devices"), "excludes selectors: keep one of them")
        file.warnings.append(str(Problem((*loc, "devices"), "is deprecated; write selectors.ifNames")))
        select = {"netdevs": devices}
    if not select:
        text = "is missing or empty: say which adapters, by vendors, deviceIDs, drivers, ifNames …"
        file.note((*loc, "selectors"), text)
    most, allocation = said.get("rdmaHcaMax", 0), said.get("allocation", "all")
    if allocation not in ("all", "one-hca"):
        file.note((*loc, "allocation"), f"must be all or one-hca, is {shown(allocation)}")
    own: dict[str, Any] = {"kind": "hca", "select": select}
    if allocation == "one-hca":
        own |= {"shares": most, "management": True}
    elif type(most) is not int or not 0 <= most <= MAX_UNITS:
        file.note((*loc, "rdmaHcaMax"), f"must be a whole number from 0 to {MAX_UNITS}, is {shown(most)}")
    words = {**_OF_SHARED, "rdmaHcaMax": "shares"}
    prefix = said.get("resourcePrefix", SHARED_PREFIX)
    resource = file.resource(loc, words, prefix, said.get("resourceName", ""), own)
    if resource is None or allocation == "one-hca":
        return resource
    return replace(resource, compat=SharedPool(most, use_cdi))
