"""Templates over the device: `{rail}`, `{plane}`, `{pf}`, `{numa}` and `{vf}` in the texts of an entry of `networks`.

    {name: rails, ifName: "rail{rail}", ipam: {type: host-local, subnet: "10.{rail}.0.0/16"}, vlan: "{rail+100}"}

One entry is then a network for each rail. Numbers may be multiplied and added to, in this order: `{rail*32+1}`. A text
that is nothing but a number's template becomes a number. What comes of it is checked when the configuration is loaded,
for every rail that there may be. Pure.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_interface, ip_network
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from agent.errors import RequestInvalid
from agent.model.fields import join, shown
from agent.model.printable import is_secret

if TYPE_CHECKING:
    from agent.config.networks import Network

Loc = tuple[str | int, ...]
WORDS = ("rail", "plane", "pf", "numa", "vf")
NO_WORDS = frozenset[str]()
USUAL_RAILS, USUAL_PLANES = 8, 2
"""So many there may be where no list says it, and planes of each."""
SAMPLE_VFS, SAMPLE_NUMA_NODES = 16, 4
_TEMPLATE = re.compile(r"\{([A-Za-z]\w*)(?:\*([0-9]{1,5}))?(?:\+([0-9]{1,9}))?\}")
_ALMOST = re.compile(rf"\{{\s*({'|'.join(WORDS)})\b[^{{}}]*\}}?")
"""What was meant as a template and is none: {rail-1}."""
IN_QUOTES = "put the text in quotes: YAML reads { as the start of a mapping"
_NETWORKS = frozenset(("subnet", "range", "dst"))
"""Keys of IPAM plugins and routes that hold a network, the second perhaps with a first address before a dash."""
_ADDRESSES = frozenset(("gateway", "gw", "src", "rangeStart", "rangeEnd", "range_start", "range_end"))
_STRICT = frozenset(("subnet",))
"""host-local refuses one with bits of a host."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a device stands."""

    rail: int | None = None
    """Number of its adapter's rail; None if it has none."""
    pf: str = ""
    """Its adapter's interface in the host; empty if it has none."""
    numa: int | None = None
    """None if the firmware does not say."""
    vf: int | None = None
    """Its index among the VFs of its adapter; None for no VF."""
    adapter: str = ""
    """PCI address of its adapter."""
    plane: int | None = None
    """Which plane of the rail its adapter is, 0 where the rail has one; None if it has no rail."""

    def only(self, words: Iterable[str]) -> Place:
        """Return a place that differs from others by these words alone."""
        known = {word: getattr(self, word) for word in words}
        return Place(**known)

    def __str__(self) -> str:
        told = {"rail": self.rail, "plane": self.plane, "PF": self.pf or None, "NUMA node": self.numa, "VF": self.vf}
        return ", ".join(f"{word} {value}" for word, value in told.items() if value is not None) or "any device"


SAMPLE = Place(0, "pf0", 0, 0, plane=0)
"""Of a network's templates all but what they fill in is known by any place."""


def templates_in(value: Any) -> Iterator[tuple[str, str]]:
    """List the texts with templates: path and text. A secret is none."""
    return ((functools.reduce(join, loc, ""), text) for loc, text in _templates(value))


def _templates(value: Any) -> Iterator[tuple[Loc, str]]:
    return ((loc, each) for loc, each in _values(value) if isinstance(each, str) and _TEMPLATE.search(each))


def unquoted(value: Any) -> Iterator[tuple[Loc, str]]:
    """List the mappings that YAML made of a template without quotes: place and template."""
    for path, each in _values(value):
        if isinstance(each, Mapping) and (text := _bare(each)):
            yield path, text


def _bare(value: Mapping[Any, Any]) -> str:
    """Return the template that a mapping was meant as; empty if it was meant as a mapping."""
    text = f"{{{next(iter(value))}}}" if list(value.values()) == [None] else ""
    return text if _ALMOST.fullmatch(text) else ""


def misplaced(value: Any) -> str:
    """Say where templates belong, for a value that has some and may not; empty for another."""
    if any(unquoted(value)) or any(templates_in(value)):
        return "; templates such as {rail} are understood in the texts of an entry of `networks` only, in quotes"
    return ""


def touches_template(text: str, at: int) -> bool:
    """Return whether a template, or what was meant as one, begins or ends at a place in a text."""
    return any(at in found.span() for found in _ALMOST.finditer(text))


def _values(value: Any, loc: Loc = ()) -> Iterator[tuple[Loc, Any]]:
    """List what is not secret, at any depth: place and value."""
    yield loc, value
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not is_secret(str(key)):
                yield from _values(inner, (*loc, str(key)))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _values(inner, (*loc, index))


def words_of(value: Any) -> frozenset[str]:
    """Return by which of WORDS the texts in a value differ.

    Raises RequestInvalid for a template of another word, or of a form that is not understood.
    """
    for loc, text in misunderstood(value):
        raise RequestInvalid(f"{functools.reduce(join, loc, '')} {text}".lstrip())
    return frozenset(word for _, text in templates_in(value) for word, _, _ in _TEMPLATE.findall(text))


def misunderstood(value: Any) -> Iterator[tuple[Loc, str]]:
    """List templates of another word, or of a form that is not understood: place, and why."""
    for loc, text in _values(value):
        if isinstance(text, str) and (almost := _ALMOST.search(_TEMPLATE.sub("", text))) is not None:
            yield loc, f"has {almost[0]}, which is not understood: take {_forms(almost[1])}"
    for loc, text in _templates(value):
        for word, times, plus in _TEMPLATE.findall(text):
            if word not in WORDS:
                known = ", ".join(f"{{{each}}}" for each in WORDS)
                yield loc, f"has {{{word}}}, which stands for nothing; known are {known}"
            elif word == "pf" and (times or plus):
                yield loc, "counts with {pf}, which is a name"


def _forms(word: str) -> str:
    if word == "pf":
        return "{pf}"
    return f"{{{word}}}, {{{word}+100}}, {{{word}*32}} or {{{word}*32+1}}"


def filled(value: Any, place: Place) -> Any:
    """Copy a tree of JSON with its templates filled in. Raises RequestInvalid for one that the place does not tell."""
    if isinstance(value, str):
        return _text(value, place) if "{" in value else value
    if isinstance(value, Mapping):
        return {key: inner if is_secret(key) else filled(inner, place) for key, inner in value.items()}
    return [filled(inner, place) for inner in value] if isinstance(value, list) else value


def _text(text: str, place: Place) -> str | int:
    def told(match: re.Match[str]) -> str:
        word, times, plus = match.groups()
        value = getattr(place, word)
        if value is None or value == "":
            raise RequestInvalid(
                f"{shown(text)} asks for the {word} of a device of adapter {place.adapter or 'unknown'}, which has none"
                + (": list the adapters under topology.rails" if word in ("rail", "plane") else "")
            )
        return value if word == "pf" else str(value * int(times or 1) + int(plus or 0))

    found = _TEMPLATE.sub(told, text)
    whole = _TEMPLATE.fullmatch(text)
    return int(found) if whole is not None and whole[1] != "pf" else found


# ------------------------------------------------------------------------------------------------------------ checks


def possible(named: Sequence[Sequence[str]]) -> tuple[Place, ...]:
    """List places that devices may have on any node, where `named` are the adapters that the configuration numbers."""
    planes = [len(mine) for mine in named] or [USUAL_PLANES] * USUAL_RAILS
    rails = [
        Place(rail, f"pf{rail}", rail * 2 // len(planes), 0, plane=plane)
        for rail, count in enumerate(planes)
        for plane in range(count)
    ]
    nodes = [Place(0, "pf0", numa, 0, plane=0) for numa in range(SAMPLE_NUMA_NODES)]
    return (*rails, *nodes, *(Place(0, "pf0", 0, vf, plane=0) for vf in range(SAMPLE_VFS)))


def problems(network: Network, places: Iterable[Place]) -> Iterator[tuple[str, str]]:
    """List what a network comes to at some places that cannot be used, or that overlaps: a path in its entry, and why.

    Of each path the first only.
    """
    if not network.words:
        return
    made: list[tuple[Place, Mapping[str, Any]]] = []
    for place in dict.fromkeys(place.only(network.words) for place in places):
        try:
            made.append((place, network.at(place).keys))
        except RequestInvalid as error:
            yield "", f"for {place}: {error}"
            return
    told = {path for path, _ in templates_in(network.keys)}
    wrong: dict[str, str] = {}
    pools: dict[str, list[tuple[Place, _Pool]]] = {}
    for place, keys in made:
        for path, holder in _objects(keys):
            for key, value in holder.items():
                at = join(path, key)
                if at in told and at not in wrong and (text := _unusable(key, value, holder)) is not None:
                    wrong[at] = f"for {place}: {text}"
            of_range = next((join(path, key) for key in ("subnet", "range") if key in holder), None)
            pool = _pool(holder)
            if of_range is not None and pool is not None and any(join(path, key) in told for key in holder):
                pools.setdefault(of_range, []).append((place, pool))
    yield from wrong.items()
    for path, found in pools.items():
        if path not in wrong and (text := _overlap(found)) is not None:
            yield path, text


_Pool = tuple[int, int, int, str]
"""Addresses: family, first, last, as they are written."""


def _objects(value: Any, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, Mapping):
        yield path, value
        for key, inner in value.items():
            yield from _objects(inner, join(path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _objects(inner, join(path, index))


def _unusable(key: str, value: Any, holder: Mapping[str, Any]) -> str | None:
    """Return why the value of a key of addresses cannot be used; None if it can."""
    try:
        if key in _NETWORKS:
            _network(value, strict=key in _STRICT)
        elif key in _ADDRESSES:
            address, inside = ip_address(value), holder.get("subnet")
            if isinstance(inside, str) and address not in _network(inside, strict=False):
                return f"{value} is not in {inside}"
        elif key == "address":
            ip_interface(value)
    except ValueError as error:
        return f"cannot be used: {error}"
    return None


def _network(text: Any, *, strict: bool) -> IPv4Network | IPv6Network:
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is no network")
    return ip_network(text.rpartition("-")[2] if not strict else text, strict=strict)


def _pool(holder: Mapping[str, Any]) -> _Pool | None:
    """Return which addresses an object of an IPAM configuration gives out; None if that is not to be understood."""
    text = str(holder.get("subnet") or holder.get("range"))
    start, dash, end = text.partition("-")
    first = holder.get("rangeStart") or holder.get("range_start") or (start if dash else None)
    last = holder.get("rangeEnd") or holder.get("range_end") or (end.partition("/")[0] if dash else None)
    try:
        network = _network(text, strict=False)
        ends = [ip_address(first) if first else network[0], ip_address(last) if last else network[-1]]
    except ValueError:
        return None
    said = f"{ends[0]}-{ends[1]}" if first or last else text
    return network.version, int(ends[0]), int(ends[1]), said


def _overlap(found: Sequence[tuple[Place, _Pool]]) -> str | None:
    """Return a sentence on two that overlap, and are not the same."""
    different = {pool: (place, pool) for place, pool in reversed(found)}
    for (one, a), (other, b) in pairwise(different[key] for key in sorted(different)):
        if a[0] == b[0] and b[1] <= a[2]:
            return f"{a[3]} for {one} and {b[3]} for {other} overlap"
    return None
