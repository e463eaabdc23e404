"""Opaque parameters of classes and claims → the network that each device is set up with. Pure.

    apiVersion: nodefabric.io/v1alpha1
    kind: Network
    network: rails                  # an entry of the configuration's `networks`; without it, the resource's own
    ifName: rail%d                  # %d is counted up from 0 over all devices of the pod
    mtu: 9000
    addresses: [192.0.2.10/24]
    routes: [{dst: 198.51.100.0/24, gw: 192.0.2.1}]
    trust: "on"                     # any key of a network; of a claim only what `dra.claimMay` lists

What comes later says more: the configured network, then the classes' parameters, then the claim's, key by key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_interface, ip_network
from typing import Any

from agent.config import Config, Resource
from agent.config.contradictions import unfit
from agent.config.networks import network_of_keys
from agent.config.section import is_plain_json, shown
from agent.config.sections import CLAIM_KEYS
from agent.config.template import words_of
from agent.errors import ClaimInvalid, RequestInvalid
from agent.model.printable import unknown
from deviceplugin.dra.allocated_claim import Opaque, Result

API_VERSION = "nodefabric.io/v1alpha1"
KIND = "Network"
MAX_ADDRESSES = 16
OF_ONE = ("ifName", "addresses", "mac", "guid", "altNames")
"""What no two interfaces have alike."""
NO_KEYS_OF_NETWORKS = ("network", "ifName", "addresses")


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

    Raises ClaimInvalid with all that is wrong in the parameters, or else with the first network that cannot be made.
    """
    wrong = [
        f"parameters of {'a class' if entry.from_class else 'the claim'} (config {number}): {text}"
        for number, entry in enumerate(configs)
        for text in _problems_of(entry, config)
    ]
    if wrong:
        raise ClaimInvalid("; ".join(wrong))
    said: list[Mapping[str, Any]] = []
    found: list[Setting] = []
    for result, resource in results:
        mine = [entry for entry in configs if entry.is_for(result) and not result.admin]
        keys = {
            key: value
            for entry in mine
            for key, value in entry.parameters.items()
            if key in CLAIM_KEYS and value is not None
        }
        by_claim = any(entry.parameters.get("addresses") is not None for entry in mine if not entry.from_class)
        try:
            found.append(_setting(resource, keys, config, by_claim=by_claim))
        except RequestInvalid as error:
            raise ClaimInvalid(f"request {result.request} ({resource.name}): {error}") from error
        said.append(keys)
    _check_alike(said)
    return tuple(found)


def _problems_of(entry: Opaque, config: Config) -> Iterator[str]:
    """List what is wrong with an entry by itself. What the values must be depends on the network."""
    given = entry.parameters
    if not isinstance(given, dict) or not is_plain_json(given):
        yield "must be a JSON object of a reasonable size"
        return
    for key, value in given.items():
        if key in ("apiVersion", "kind") or value is None:
            continue
        if key not in CLAIM_KEYS:
            yield f"{shown(key)[1:-1]} {unknown(key, CLAIM_KEYS)}"
        elif not entry.from_class and key not in config.dra.claim_may:
            yield f"{key} may be said by a DeviceClass only (dra.claimMay)"
    for key, want in (("apiVersion", API_VERSION), ("kind", KIND)):
        if given.get(key) != want:
            yield f"{key} must be {want}, is {shown(given.get(key))}"


def _setting(resource: Resource, said: Mapping[str, Any], config: Config, *, by_claim: bool) -> Setting:
    """Put together the network of one device. Raises RequestInvalid. `by_claim`: the claim says its addresses."""
    own = {key: value for key, value in said.items() if key not in NO_KEYS_OF_NETWORKS}
    name = {"ifName": said["ifName"]} if "ifName" in said else {}
    if not said.keys() - {"ifName"}:
        return Setting(ifname=network_of_keys(name).ifname)
    if isinstance(resource.network, Mapping) and "network" not in said:
        mine = ", ".join(sorted(said))
        raise RequestInvalid(
            f"each of its PFs has a network of its own: {mine} can be said beside network alone, as by a DeviceClass"
        )
    wanted = said.get("network", resource.network)
    base = next((network for network in config.networks if network.name == wanted), None)
    if base is None and "network" in said:
        names = ", ".join(sorted(network.name for network in config.networks)) or "none"
        raise RequestInvalid(f"network {shown(wanted)} is not configured on this node; there are: {names}")
    if base is None and resource.kind == "hca":
        raise RequestInvalid(
            "its adapters stay in the host, since neither the resource nor the parameters name a network"
        )
    keys = {**(base.keys if base is not None else {}), **own}
    if "addresses" in said:
        if by_claim and keys.get("ipam"):
            raise RequestInvalid(
                "the network leases its addresses (ipam), so only a DeviceClass may set addresses: leave them out of"
                " the claim"
            )
        keys["ipam"] = {"type": "static", "addresses": _addresses(said["addresses"], list(_subnets(keys.get("ipam"))))}
    if resource.kind == "nic" and "mode" not in keys and not keys.get("vfio") and not keys.get("functionReset"):
        keys["mode"] = "nic"
    made = network_of_keys(keys | name)
    for text in unfit(resource, made):
        raise RequestInvalid(f"the network {text}")
    # IPAM plugins keep their leases by the network's name.
    return Setting({"name": base.name, **keys} if base is not None else keys, said.get("ifName", ""))


def _addresses(given: Any, subnets: Sequence[IPv4Network | IPv6Network]) -> list[Mapping[str, str]]:
    if not isinstance(given, list) or not 0 < len(given) <= MAX_ADDRESSES:
        raise RequestInvalid(f"addresses must be a list of 1 to {MAX_ADDRESSES} addresses, is {shown(given)}")
    for text in given:
        if not _is_address(text):
            raise RequestInvalid(
                f"addresses must be those of an interface with their prefix, such as 192.0.2.10/24, not {shown(text)}"
            )
        if subnets and not any(_is_in(text, subnet) for subnet in subnets):
            named = ", ".join(map(str, subnets))
            raise RequestInvalid(f"addresses: {text} is not in a subnet of the network ({named})")
    return [{"address": text} for text in given]


def _is_address(text: Any) -> bool:
    try:
        address = ip_interface(text).ip if isinstance(text, str) and "/" in text and "%" not in text else None
    except ValueError:
        return False
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or address
    return address is not None and not (
        address.is_loopback or address.is_multicast or address.is_unspecified or str(address) == "255.255.255.255"
    )


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


def _check_alike(said: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what two devices would have alike. `%d` stays: ADD numbers the interfaces of a whole pod."""
    for key in OF_ONE:
        values = (keys.get(key) or [] for keys in said)
        counts = Counter(each for value in values for each in (value if isinstance(value, list) else [value]))
        for value, count in counts.items():
            if count > 1 and not (key == "ifName" and ("%d" in value or words_of(value))):
                text = f"{key}: {shown(value)} is given {count} times: say it for one request of one device"
                raise ClaimInvalid(f"{text}, or write {value}%d" if key == "ifName" else text)
