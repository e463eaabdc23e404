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
from typing import Annotated, Any

from pydantic import Field, PlainValidator, TypeAdapter

from agent.config import Config, Resource
from agent.config.contradictions import unfit
from agent.config.networks import WANTED_IFNAME, Network, NetworkKeys, is_ifname, network_of_keys
from agent.config.section import Problem, Refusal, is_plain_json, must_be, read, refuse, shown, string
from agent.config.sections import CLAIM_KEYS
from agent.config.template import SAMPLE, filled, misunderstood, words_of
from agent.errors import ClaimInvalid, RequestInvalid
from agent.model.printable import unknown
from deviceplugin.dra.allocated_claim import Opaque, Result

API_VERSION = "nodefabric.io/v1alpha1"
KIND = "Network"
MAX_ADDRESSES = 16
MAX_PROBLEMS = 32
"""So many are told of a claim: it has room for thousands, which nobody could read, and kubelet would not take."""
OF_ONE = ("addresses", "mac", "guid", "altNames")
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
        else:
            kept[key] = value
    wrong: set[str | int] = set()
    for loc, text in misunderstood(kept):
        wrong.add(loc[0])
        problem = f"must be {WANTED_IFNAME}, is {shown(kept['ifName'])}" if loc[0] == "ifName" else text
        note(Problem(loc, problem).sentence)
    meant = {key: value for key, value in kept.items() if key not in wrong}
    said, problems_of_keys = read(_PARAMETERS, filled(meant, SAMPLE) if words_of(meant) else meant)
    for each in problems_of_keys:
        wrong |= {*each.loc[:1]}
        text = f"ifName must be {WANTED_IFNAME}, is {shown(kept.get('ifName'))}"  # as it is written
        note(text if each.loc == ("ifName",) else each.sentence)
    name = said.network
    if name is not None and "network" not in wrong and not any(network.name == name for network in config.networks):
        names = ", ".join(sorted(network.name for network in config.networks)) or "none"
        wrong.add("network")
        note(f"network {shown(name)} is not configured on this node; there are: {names}")
    return {key: value for key, value in kept.items() if key not in wrong}


def _ifname(given: str) -> str:
    if not is_ifname(given):
        raise ValueError
    return given


def _addresses(given: Any) -> Any:
    if not isinstance(given, list) or not 0 < len(given) <= MAX_ADDRESSES:
        raise must_be(f"a list of 1 to {MAX_ADDRESSES} addresses")
    wrong = ((i, _why_no_address(text)) for i, text in enumerate(given))
    refuse(Refusal((i,), f"{why}, is {shown(given[i])}") for i, why in wrong if why is not None)
    if len(set(map(ip_interface, given))) < len(given):
        refuse([Refusal((), "must not have one twice")])
    return given


def _why_no_address(text: Any) -> str | None:
    try:
        if not isinstance(text, str) or "/" not in text or "%" in text:
            raise ValueError(text)
        address = ip_interface(text).ip
    except ValueError:
        return "must be an address with its prefix, such as 192.0.2.10/24"
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback or address.is_multicast or address.is_unspecified or str(address) == "255.255.255.255":
        return "must be an address that one interface can have"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameters(NetworkKeys):
    """What parameters may say. What does not go together is known when all of them are merged."""

    network: Annotated[str | None, string("the name of a network", str)] = None
    ifname: Annotated[str | None, string(WANTED_IFNAME, _ifname), Field(alias="ifName")] = None
    addresses: Annotated[list[str], PlainValidator(_addresses)] = field(default_factory=list)

    @classmethod
    def refused(cls, given: Mapping[str, Any]) -> Iterator[Refusal]:
        return iter(())

    def contradictions(self) -> Iterator[Refusal]:
        return iter(())


_PARAMETERS = TypeAdapter(_Parameters)


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
