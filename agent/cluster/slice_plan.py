"""What of the wanted ResourceSlices has to be written, and as which generation of the pool. Pure.

The scheduler takes a pool's newest generation, and nothing of a pool whose slices of that generation are not all
there. So slices of one generation always belong together: only one of them may be changed without a new generation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from agent.model.fields import at, objects_at

Document = Mapping[str, Any]
Taint = tuple[str, str, str, str]
"""Device, key, value, effect."""

LINK_REASONS = ("LinkDown", "PortDown")
"""Last word of taints that a switch's failure brings to thousands of nodes at once."""
DROPPED_TAINTS, DROPPED_CAPACITY, DROPPED_LISTS = "taints", "capacity", "listAttributes"
_LISTS = ("bools", "ints", "strings", "versions")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A slice that there should be."""

    name: str
    content: str
    """Digest of all that it says, but for the generation and when taints began."""
    document: Document = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """What is kept of a slice at the API server; its devices may be a hundred kilobytes."""

    name: str
    uid: str
    version: int
    owner: str
    """UID of the Node that it goes with; empty if there is none."""
    generation: int
    content: str
    """As of `Wanted`."""
    times: Mapping[Taint, str] = field(repr=False)
    """When its taints began."""
    resources: frozenset[str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Batch:
    """What was last begun to be written: slices of one generation, by name, and the content of each."""

    generation: int = 0
    contents: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What there is to do: write these, then delete those."""

    generation: int
    writes: tuple[Wanted, ...] = ()
    deletes: tuple[StoredSlice, ...] = ()

    @property
    def is_nothing(self) -> bool:
        """Whether all is as it should be."""
        return not self.writes and not self.deletes


class Change(Enum):
    """What differs between two sets of slices. LINK: nothing but taints of links."""

    NOTHING = 0
    FAULT = 1
    LINK = 2
    STRUCTURE = 3


def wanted_of(documents: Iterable[Document]) -> tuple[Wanted, ...]:
    """Digest the slices that there should be."""
    return tuple(Wanted(str(d["metadata"]["name"]), content_of(d), d) for d in documents)


def stored_of(item: Mapping[str, Any]) -> StoredSlice:
    """Take from a ResourceSlice object what is kept of it. Raises Unavailable if it is none."""
    owners = objects_at(item, "metadata.ownerReferences")
    version = at(item, "metadata.resourceVersion", str)
    return StoredSlice(
        at(item, "metadata.name", str),
        at(item, "metadata.uid", str),
        int(version) if version.isdecimal() else 0,
        next((at(one, "uid", str) for one in owners if one.get("kind") == "Node"), ""),
        at(item, "spec.pool.generation", int, 0),
        content_of(item),
        dict(times_of(item)),
        resources_of([item]),
    )


def content_of(document: Document) -> str:
    """Digest what a slice says, but for the generation and when taints began. What is empty says nothing."""
    spec = dict(at(document, "spec", dict))
    spec["pool"] = {key: value for key, value in at(spec, "pool", dict).items() if key != "generation"}
    spec["devices"] = [_said(device) for device in objects_at(spec, "devices")]
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _said(device: Mapping[str, Any]) -> Mapping[str, Any]:
    found = {key: value for key, value in device.items() if value not in ({}, [], None)}
    if "taints" in found:
        found["taints"] = [
            {k: v for k, v in taint.items() if k != "timeAdded"} for taint in objects_at(found, "taints")
        ]
    return found


def times_of(document: Document) -> Iterator[tuple[Taint, str]]:
    """Yield when each taint of a stored slice began."""
    for device in objects_at(document, "spec.devices"):
        for taint in objects_at(device, "taints"):
            if "timeAdded" in taint:
                yield _taint(device, taint), at(taint, "timeAdded", str)


def taints_of(documents: Iterable[Document]) -> frozenset[Taint]:
    """List all taints of slices."""
    return frozenset(
        _taint(device, taint)
        for document in documents
        for device in document["spec"].get("devices") or ()
        for taint in device.get("taints") or ()
    )


def _taint(device: Mapping[str, Any], taint: Mapping[str, Any]) -> Taint:
    key, effect = at(taint, "key", str), at(taint, "effect", str)
    return at(device, "name", str), key, at(taint, "value", str, ""), effect


def resources_of(documents: Iterable[Document]) -> frozenset[str]:
    """List the resources that devices of slices are of."""
    found = set()
    for document in documents:
        for device in objects_at(document, "spec.devices"):
            found.add(at(device, "attributes.resource.string", str, ""))
    return frozenset(found - {""})


def plan(
    wanted: Sequence[Wanted], stored: Mapping[str, StoredSlice], owner: str, batch: Batch, same: Mapping[str, str]
) -> Plan:
    """Decide what to do.

    `owner` is the UID of the Node. `same` is how the server has stored what was written (content → content): it
    writes amounts in its own way, and drops what it does not know.
    """
    names = {one.name for one in wanted}
    extra = tuple(one for name, one in sorted(stored.items()) if name not in names)
    newest = max([batch.generation, *(one.generation for one in stored.values())])

    def is_right(one: Wanted) -> bool:
        found = stored.get(one.name)
        return (
            found is not None
            and found.generation == newest
            and found.owner == owner
            and found.content in (one.content, same.get(one.content))
        )

    stale = tuple(one for one in wanted if not is_right(one))
    if not stale:
        return Plan(newest, (), extra)
    is_continued = batch == Batch(newest, contents_of(wanted))
    is_alone = newest > 0 and len(stale) == 1 and all(one.generation < newest for one in extra)
    if is_continued or is_alone:
        return Plan(newest, stale, extra)
    return Plan(newest + 1, tuple(wanted), extra)


def contents_of(wanted: Iterable[Wanted]) -> tuple[tuple[str, str], ...]:
    """Name the contents of all slices, for a Batch."""
    return tuple(sorted((one.name, one.content) for one in wanted))


def document_of(one: Wanted, generation: int, node: Mapping[str, str], times: Mapping[Taint, str]) -> dict[str, Any]:
    """Make the object to apply. `node` is name and uid of its owner; taints keep the times at which they began."""
    spec = dict(one.document["spec"])
    spec["pool"] = {**spec["pool"], "generation": generation}
    if "devices" in spec:
        spec["devices"] = [_dated(device, times) for device in spec["devices"]]
    reference = {"apiVersion": "v1", "kind": "Node", "name": node["name"], "uid": node["uid"], "controller": True}
    metadata = {**one.document["metadata"], "ownerReferences": [reference]}
    return {**one.document, "metadata": metadata, "spec": spec}


def _dated(device: Mapping[str, Any], times: Mapping[Taint, str]) -> Mapping[str, Any]:
    if not device.get("taints"):
        return device
    return {
        **device,
        "taints": [
            {**taint, "timeAdded": times[_taint(device, taint)]} if _taint(device, taint) in times else taint
            for taint in device["taints"]
        ],
    }


def change(before: Sequence[Document], after: Sequence[Document]) -> Change:
    """Classify what differs between two sets of slices."""
    if [_untainted(one) for one in before] != [_untainted(one) for one in after]:
        return Change.STRUCTURE
    differing = taints_of(before) ^ taints_of(after)
    if not differing:
        return Change.NOTHING
    is_link = all(key.rpartition("/")[2] in LINK_REASONS for _, key, _, _ in differing)
    return Change.LINK if is_link else Change.FAULT


def _untainted(document: Document) -> dict[str, Any]:
    spec = document["spec"]
    devices = [{k: v for k, v in device.items() if k != "taints"} for device in spec.get("devices") or ()]
    return {**document, "spec": {**spec, "devices": devices}}


def dropped_in(sent: Document, answered: Document) -> frozenset[str]:
    """Return what the server has dropped of what was sent to it: fields of features that are off."""
    found = set()
    answers = {at(device, "name", str): device for device in objects_at(answered, "spec.devices")}
    for device in sent["spec"].get("devices") or ():
        answer = answers.get(device["name"], {})
        if device.get("taints") and not answer.get("taints"):
            found.add(DROPPED_TAINTS)
        if device.get("allowMultipleAllocations") and not answer.get("allowMultipleAllocations"):
            found.add(DROPPED_CAPACITY)
    return frozenset(found)


def has_lists(document: Document) -> bool:
    """Whether a slice has attributes with several values."""
    return any(
        key in value
        for device in document["spec"].get("devices") or ()
        for value in device.get("attributes", {}).values()
        for key in _LISTS
    )
