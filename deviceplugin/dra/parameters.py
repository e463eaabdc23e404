"""Opaque parameters of classes and claims → the network that each device is set up with. Pure.

    apiVersion: nodefabric.io/v1alpha1
    kind: Network
    network: rails                  # an entry of the configuration's `networks`; without it, the resource's own
    ifName: rail%d                  # %d is counted up from 0 over all devices of the pod
    mtu: 9000
    addresses: [192.0.2.10/24]
    routes: [{dst: 198.51.100.0/24, gw: 192.0.2.1}]
    trust: "on"                     # any key of a network; of a claim only what `dra.claimMay` lists

What comes later says more: the configured network, then the classes' parameters, then the claim's, key by key. All
that is wrong is told at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_interface, ip_network
from typing import Any

from agent.config import Config, Resource
from agent.config.contradictions import unfit
from agent.config.dra import CLAIM_KEYS
from agent.config.networks import MAX_MTU, MODES, WANTED_IFNAME, Network, is_ifname, network_of_keys
from agent.config.reader import is_plain_json
from agent.config.template import SAMPLE, filled, words_of
from agent.errors import ClaimInvalid, RequestInvalid
from agent.model.fields import join, shown
from agent.model.printable import unknown
from deviceplugin.dra.allocation import Opaque, Result

API_VERSION = "nodefabric.io/v1alpha1"
KIND = "Network"
MAX_ADDRESSES = 16
MAX_PROBLEMS = 32
"""So many are told of a claim: it has room for thousands, which nobody could read, and kubelet would not take."""
OF_ONE = ("addresses", "mac", "guid", "altNames")
"""What no two interfaces have alike."""
NO_KEYS_OF_NETWORKS = ("network", "ifName", "addresses")
_BY_SOURCE: Mapping[str, Any] = {"routing": "source", "ipam": {"type": "static"}}
_TRIED_WITH: Mapping[str, Mapping[str, Any]] = {
    "vlanQoS": {"vlan": 1},
    "vlanProto": {"vlan": 1},
    **dict.fromkeys(("routing", "gateway", "rules"), _BY_SOURCE),
}
"""What a key needs beside it to be looked at alone."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a result's device is set up with."""

    network: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Keys of a network. Empty if nobody said anything: then the resource's own network holds, as it is at the ADD."""
    ifname: str = ""
    """Of its interface in the pod, with %d for a number that ADD finds; empty for the next free one."""


def settings_of(
    configs: Sequence[Opaque], results: Sequence[tuple[Result, Resource]], config: Config
) -> tuple[Setting, ...]:
    """Work out what each result's device is set up with, in their order.

    Raises ClaimInvalid with all that is wrong, up to a number that can be read.
    """
    problems: dict[str, None] = {}
    read = [_of_entry(number, entry, config, problems) for number, entry in enumerate(configs)]
    said: list[Mapping[str, Any]] = []
    found: list[Setting] = []
    for result, resource in results:
        if result.admin:
            said.append({})
            found.append(Setting())
            continue
        mine = [keys for entry, keys in zip(configs, read, strict=True) if entry.is_for(result)]
        by_claim = any(
            "addresses" in keys and not entry.from_class and entry.is_for(result)
            for entry, keys in zip(configs, read, strict=True)
        )
        merged = {key: value for keys in mine for key, value in keys.items()}
        said.append(merged)
        network = _network(result, resource, merged, config, problems)
        if by_claim and _ipam(resource, merged, config):
            problems[
                f"request {result.request} ({resource.name}): the network leases its addresses (ipam), so only a"
                " DeviceClass may set addresses: leave them out of the claim"
            ] = None
        found.append(Setting(network, merged.get("ifName", "")))
    problems |= dict.fromkeys(_repeated(results, said))
    _check_names(found, problems)
    if problems:
        more = len(problems) - MAX_PROBLEMS
        told = [*list(problems)[:MAX_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]
        raise ClaimInvalid("; ".join(told))
    return tuple(found)


# ------------------------------------------------------------------------------------------------- one entry


def _of_entry(number: int, entry: Opaque, config: Config, problems: dict[str, None]) -> Mapping[str, Any]:
    """Return what of an entry's keys is right, each by itself."""
    where = f"parameters of {'a class' if entry.from_class else 'the claim'} (config {number})"

    def note(text: str) -> None:
        problems[f"{where}: {text}"] = None

    given = entry.parameters
    if not isinstance(given, dict) or not is_plain_json(given):
        note("must be a JSON object of a reasonable size")
        return {}
    for key, want in (("apiVersion", API_VERSION), ("kind", KIND)):
        if given.get(key) != want:
            note(f"{key} must be {want}, is {shown(given.get(key))}")
    kept = {}
    for key, value in given.items():
        if key in ("apiVersion", "kind") or value is None:
            continue
        if key not in CLAIM_KEYS:
            note(f"{shown(key)[1:-1]} {unknown(key, CLAIM_KEYS)}")
        elif not entry.from_class and key not in config.dra.claim_may:
            note(f"{key} may be said by a DeviceClass only (dra.claimMay)")
        elif (wrong := _wrong(key, value, config.networks)) is not None:
            note(wrong)
        else:
            kept[key] = value
    return kept


def _wrong(key: str, value: Any, networks: Sequence[Network]) -> str | None:
    """Tell what is wrong with one key, as far as it can be judged alone."""
    if key == "network":
        names = ", ".join(sorted(network.name for network in networks)) or "none"
        is_there = isinstance(value, str) and any(network.name == value for network in networks)
        return None if is_there else f"network {shown(value)} is not configured on this node; there are: {names}"
    if key == "ifName":
        return None if _names(value) else f"ifName must be {WANTED_IFNAME}, is {shown(value)}"
    if key == "addresses":
        return _wrong_addresses(value)
    if key == "mtu":
        fits = type(value) is int and 68 <= value <= MAX_MTU
        return None if fits else f"mtu must be a whole number from 68 to {MAX_MTU}, is {shown(value)}"
    return _wrong_key_of_network(key, value)


def _names(value: Any) -> bool:
    """Tell whether interfaces may be called so, of devices at any place."""
    try:
        return isinstance(value, str) and bool(words_of(value) | {value}) and is_ifname(str(filled(value, SAMPLE)))
    except RequestInvalid:
        return False


def _wrong_key_of_network(key: str, value: Any) -> str | None:
    """Try a key in each mode that might heed it: which one is in force is known when all has been merged."""
    text = None
    for mode in (value,) if key == "mode" else MODES:
        try:
            network_of_keys({"mode": mode, **_TRIED_WITH.get(key, {}), key: value})
            return None
        except RequestInvalid as error:
            text = text or str(error)
    return text


def _wrong_addresses(value: Any) -> str | None:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_ADDRESSES:
        return f"addresses must be a list of 1 to {MAX_ADDRESSES} addresses, is {shown(value)}"
    for i, text in enumerate(value):
        try:
            if not isinstance(text, str) or "/" not in text or "%" in text:
                raise ValueError(text)
            address = ip_interface(text).ip
        except ValueError:
            return f"{join('addresses', i)} must be an address with its prefix, such as 192.0.2.10/24, is {shown(text)}"
        if isinstance(address, IPv6Address):
            address = address.ipv4_mapped or address
        if address.is_loopback or address.is_multicast or address.is_unspecified or str(address) == "255.255.255.255":
            return f"{join('addresses', i)} must be an address that one interface can have, is {shown(text)}"
    return "addresses must not have one twice" if len(set(map(ip_interface, value))) < len(value) else None


# ---------------------------------------------------------------------------------------------- all of a result's


def _network(
    result: Result, resource: Resource, said: Mapping[str, Any], config: Config, problems: dict[str, None]
) -> Mapping[str, Any]:
    """Put together the network of one result's device."""
    if not said.keys() - {"ifName"}:
        return {}

    def note(text: str) -> None:
        problems[f"request {result.request} ({resource.name}): {text}"] = None

    if isinstance(resource.network, Mapping) and "network" not in said:
        mine = ", ".join(sorted(said))
        note(f"each of its PFs has a network of its own: {mine} can be said beside network alone, as by a DeviceClass")
        return {}
    base = _base(resource, said, config)
    if base is None and resource.kind == "hca":
        note("its adapters stay in the host, since neither the resource nor the parameters name a network")
        return {}
    keys = dict(base.keys) if base is not None else {}
    keys |= {key: value for key, value in said.items() if key not in NO_KEYS_OF_NETWORKS}
    if "addresses" in said:
        subnets = list(_subnets(keys.get("ipam")))
        for text in said["addresses"]:
            if subnets and not any(_is_in(text, subnet) for subnet in subnets):
                note(f"addresses: {text} is not in a subnet of the network ({', '.join(map(str, subnets))})")
        keys["ipam"] = {"type": "static", "addresses": [{"address": address} for address in said["addresses"]]}
    if resource.kind == "nic" and "mode" not in keys and not keys.get("vfio") and not keys.get("functionReset"):
        keys["mode"] = "nic"
    try:
        made = network_of_keys(keys)
    except RequestInvalid as error:
        note(str(error))
        return {}
    for text in unfit(resource, made):
        note(f"the network {text}")
    # IPAM plugins keep their leases by the network's name.
    return {"name": base.name, **keys} if base is not None else keys


def _ipam(resource: Resource, said: Mapping[str, Any], config: Config) -> Mapping[str, Any] | None:
    """Return the `ipam` that a result's device would have without `addresses`."""
    base = _base(resource, said, config)
    found: Mapping[str, Any] | None = said.get("ipam") or (base.keys.get("ipam") if base is not None else None)
    return found


def _subnets(ipam: Any) -> Iterator[IPv4Network | IPv6Network]:
    """List the subnets that `ipam` names in the words of host-local (ranges) and whereabouts (ipRanges).

    One that depends on the device ({rail}) cannot be told here.
    """
    if isinstance(ipam, list):
        for inner in ipam:
            yield from _subnets(inner)
    elif isinstance(ipam, Mapping):
        for key in ("ranges", "ipRanges"):
            yield from _subnets(ipam.get(key))
        for key in ("subnet", "range"):
            try:
                yield ip_network(str(ipam.get(key)).rpartition("-")[2], strict=False)
            except ValueError:
                continue


def _is_in(text: str, subnet: IPv4Network | IPv6Network) -> bool:
    mine = ip_interface(text)
    return mine.version == subnet.version and mine.ip in subnet and mine.network.prefixlen >= subnet.prefixlen


def _base(resource: Resource, said: Mapping[str, Any], config: Config) -> Network | None:
    name = said.get("network", resource.network)
    return next((network for network in config.networks if network.name == name), None)


def _repeated(results: Sequence[tuple[Result, Resource]], said: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Tell of what two devices would have alike and must not."""
    for key in OF_ONE:
        seen: list[tuple[str, Any]] = []
        for (result, _), keys in zip(results, said, strict=True):
            values = keys.get(key, [])
            for value in values if isinstance(values, list) else [values]:
                other = next((request for request, known in seen if known == value), None)
                if other is not None:
                    yield (
                        f"{key}: {shown(value)} would be given to a device of request {other} and to one of"
                        f" {result.request}: say it for one request of one device"
                    )
                seen.append((result.request, value))


def _check_names(found: Sequence[Setting], problems: dict[str, None]) -> None:
    """Look whether the interfaces can have their names, as far as the claim alone tells.

    `%d` stays: ADD numbers the interfaces of a whole pod, and another claim of it may name its own alike.
    """
    counts: Counter[str] = Counter()
    for name in (setting.ifname for setting in found):
        counts[name] += 1
        if words_of(name):
            continue  # they tell apart those that would be alike
        longest = name.replace("%d", str(counts[name] - 1))
        if name and "%d" not in name and counts[name] > 1:
            problems[f"ifName {name} is that of two devices: write {name}%d, or a name for each request"] = None
        if len(longest) > 15:
            problems[f"ifName {longest} has more than 15 characters"] = None
