"""The invariants: no device is lost, has two owners, is cleaned under its new owner, keeps a setting or is left out.

`violations` compares what was found with what must be. Most holds at any moment, also in the midst of
an ADD and right after a SIGKILL, before anybody has cleaned up: a device that is not as it was has a
row in the ledger, each lease has somebody who will give it back, and what an ADD has promised holds.
The rest is asked for when everything has come to rest (`settled`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from tests.soak.world import HOST, Expected, Hold, Promise, Row, Shape, Violation, World

History = Callable[[str], tuple[str, ...]]
Finding = tuple[str, str]
NO_MAC = "00:00:00:00:00:00"


def violations(
    world: World, expected: Expected, *, settled: bool, history: History = lambda what: ()
) -> tuple[Violation, ...]:
    """Name all that must not be. `history` tells what happened to a device or container so far."""
    found = [*_books(world), *_devices(world, expected), *_promises(world, expected), *_leases(world, expected)]
    found += [*_holds(world, expected), *_slots(world, expected), *_left_out(expected)]
    if not expected.damaged:
        found += _claims(world, expected)
    if settled:
        found += [*_at_rest(world, expected), *_leases_at_rest(world, expected), *_holds_at_rest(world, expected)]
    return tuple(Violation(what, text, history(what)) for what, text in dict.fromkeys(found))


def _books(world: World) -> Iterator[Finding]:
    if world.damage is not None:
        yield "ledger", f"is damaged: {world.damage}"
    seen: dict[str, Row] = {}
    for row in world.rows:
        if row.device in seen:
            other = seen[row.device]
            yield row.device, f"has two owners in the ledger: {_owner(other)} and {_owner(row)}"
        seen[row.device] = row
        if row.device not in world.settings:
            yield row.device, f"is in the ledger for {_owner(row)}, but the node has no such device"


def _devices(world: World, expected: Expected) -> Iterator[Finding]:
    rows = {row.device: row for row in world.rows}
    for device, shape in expected.shapes.items():
        places = world.links.get(device, ())
        if device in expected.unplugged:
            continue
        if not places:
            yield device, "is lost: it has no interface in the host or in any pod"
        if len(places) > 1:
            yield device, f"is in several places: {', '.join(seen.place for seen in places)}"
        row = rows.get(device)
        for seen in places:
            if seen.place != HOST and row is None:
                yield device, f"is in {seen.place}, and nothing in the ledger says so"
            elif seen.place != HOST and row is not None and world.pods.get(seen.place) != row.netns_inode:
                yield device, f"is in {seen.place}, and the ledger gives it to {_owner(row)}, who lives elsewhere"
            elif seen.place == HOST and row is None and seen.shape != shape:
                yield device, f"came back as {seen.shape}, was {shape}, and no row is left to put that right"
        if row is None:
            for name, value in world.settings.get(device, {}).items():
                before = expected.settings[device].get(name)
                if value != before and not _is_own_mac(name, before, value, shape):
                    yield device, f"has {name} {value!r} left behind on its PF, was {before!r}, and has no row"


def _is_own_mac(name: str, before: object, value: object, shape: Shape) -> bool:
    """Allow the PF to enforce the VF's own MAC where it enforced none: mlx5 needs one for the node GUID."""
    return name == "mac" and before == NO_MAC and value == shape.mac


def _promises(world: World, expected: Expected) -> Iterator[Finding]:
    rows = {row.device: row for row in world.rows}
    owners: dict[str, Promise] = {}
    addresses: dict[str, Promise] = {}
    for promise in expected.promises:
        device = promise.device
        if device in owners:
            yield device, f"was promised to {_of(owners[device])} and to {_of(promise)}"
        owners[device] = promise
        for address in promise.addresses:
            if address in addresses:
                yield address, f"was given to {_of(addresses[address])} and to {_of(promise)}"
            addresses[address] = promise
        if promise.netns not in world.pods or device in expected.unplugged | expected.promises_void:
            continue  # whoever was told so is dead, or what was told is
        row = rows.get(device)
        if row is None or (row.container_id, row.cni_ifname) != (promise.container_id, promise.cni_ifname):
            found = f"belongs to {_owner(row)} in the ledger" if row is not None else "is not in the ledger"
            yield device, f"was promised to {_of(promise)} and {found}"
        elif row.state != "attached":
            yield device, f"was promised to {_of(promise)} and is {row.state}, though nobody asked for a DEL"
        yield from _in_the_pod(world, promise)


def _left_out(expected: Expected) -> Iterator[Finding]:
    """Nobody who has a device is ever let through without it."""
    for device, container_id in expected.left_out:
        yield device, f"was given to the pod of container {container_id}, which has started without it"


def _in_the_pod(world: World, promise: Promise) -> Iterator[Finding]:
    device = promise.device
    seen = next((seen for seen in world.links.get(device, ()) if seen.place == promise.netns), None)
    if seen is None:
        yield device, f"was taken from under {_of(promise)}, which lives in {promise.netns}"
        return
    for name, wanted in (("name", promise.ifname), ("mac", promise.mac), ("mtu", promise.mtu)):
        found = getattr(seen.shape, name)
        if wanted is not None and found != wanted:
            yield device, f"has {name} {found!r} in {_of(promise)}, which was told {wanted!r}"
    if not seen.shape.up:
        yield device, f"is down in {_of(promise)}"
    for name, value in promise.settings.items():
        now = world.settings[device].get(name)
        if now != value:
            yield device, f"has {name} {now!r} on its PF, and {_of(promise)} was told {value!r}"


def _holds(world: World, expected: Expected) -> Iterator[Finding]:
    """A device that a claim has is in no other hands."""
    owners: dict[str, Hold] = {}
    for hold in world.holds:  # those of claims come first
        owner = owners.setdefault(hold.device, hold) if hold.via == "claim" else owners.get(hold.device)
        # A claim of an earlier boot has followed its device before kubelet was heard of the grants; it comes into no
        # pod until it is prepared anew, which asks for them.
        is_void = owner is not None and hold.via == "unit" and owner.boot_id != expected.boot_id
        if hold.device and owner is not None and owner is not hold and not is_void:
            yield hold.device, f"is in claim {owner.key}, and {hold.via} {hold.key} has it"
    for row in world.rows:
        owner = owners.get(row.device)
        if owner is not None and row.claim_uid != owner.key and f"pod-of-{row.container_id}" not in owner.pods:
            yield row.device, f"is in claim {owner.key}, and {row.state} for {_owner(row)}, who has no right to it"
        is_ours = owner is not None and row.claim_uid == owner.key
        if row.claim_uid and row.state != "detaching" and row.device not in world.quarantine and not is_ours:
            yield row.device, f"is {row.state} by claim {row.claim_uid}, which is not in the books with it"


def _slots(world: World, expected: Expected) -> Iterator[Finding]:
    """A container that is promised devices through slots finds these devices behind its CDI names."""
    for promise in expected.promises:
        mine = [hold for hold in world.holds if hold.via == "slot" and hold.container_id == promise.container_id]
        if not mine or promise.netns not in world.pods or promise.device in expected.unplugged | expected.promises_void:
            continue
        of_device = [hold for hold in mine if hold.device == promise.device]
        if not of_device:
            yield promise.device, f"was promised to {_of(promise)}, whose slots are bound to others"
        for hold in of_device:
            if hold.key in world.specs and promise.device not in world.specs[hold.key]:
                yield hold.key, f"stands for {promise.device} of {_of(promise)}, and its spec says otherwise"


def _claims(world: World, expected: Expected) -> Iterator[Finding]:
    """What kubelet was answered about claims holds."""
    names: dict[str, tuple[str, ...]] = {}
    states = {hold.key: hold.state for hold in world.holds if hold.via == "claim"}
    for hold in world.holds:
        if hold.via == "claim":
            names[hold.key] = (*names.get(hold.key, ()), hold.cdi_name)
    for uid, text in world.specs.items():
        if uid.startswith("slot-"):
            continue
        if uid not in states:
            yield uid, "has a CDI spec, and is not in the books"
        elif _cdi_names(text) != names[uid]:
            yield uid, f"has the CDI devices {names[uid]} in the books, and its spec says otherwise"
    for uid, told in expected.prepared.items():
        if states.get(uid) != "prepared":
            yield uid, f"was told to be prepared, and is {states.get(uid, 'not')} in the books"
        elif uid not in world.specs or _cdi_names(world.specs[uid]) != told:
            yield uid, f"was told to be prepared with {told}, which no CDI spec has"
        elif uid not in expected.untold:
            for path in _told_by(world.specs[uid]):
                if not _tells_of(uid, world.files.get(path, "")):
                    yield uid, f"was told to be prepared, and {path} tells its containers nothing of it"
    for uid in expected.unprepared & states.keys():
        yield uid, f"was told to be unprepared, and is {states[uid]} in the books"


def _cdi_names(text: str) -> tuple[str, ...]:
    return tuple(device["name"] for device in json.loads(text)["devices"])


def _told_by(text: str) -> Iterator[str]:
    """List the files of ours that a spec brings into containers."""
    for device in json.loads(text)["devices"]:
        yield from (mount["hostPath"].rpartition("/")[2] for mount in device["containerEdits"].get("mounts", ()))


def _tells_of(uid: str, text: str) -> bool:
    try:
        document = json.loads(text)
    except ValueError:
        return False
    return bool(document["metadata"]["uid"] == uid and document["requests"])


def _holds_at_rest(world: World, expected: Expected) -> Iterator[Finding]:
    living = {promise.container_id for promise in expected.promises}
    lasting = [hold for hold in world.holds if hold.via != "unit"]
    for hold in lasting:
        if hold.key not in expected.prepared and hold.container_id not in living:
            yield hold.key, f"still has {hold.device} for {hold.container_id or 'its claim'}, and nobody has it"
        if hold.device not in world.specs.get(hold.key, ""):
            yield hold.key, f"has {hold.device}, and its CDI spec does not say so"
    keys = {hold.key for hold in lasting}
    for key in world.specs.keys() - keys:
        yield key, "has a spec, and nobody has it"
    for path in world.files:
        if path.removeprefix("nodefabric-claim-").partition(".")[0] not in keys:
            yield path, "tells of a claim that is not in the books"


def _leases(world: World, expected: Expected) -> Iterator[Finding]:
    if not expected.leases_are_ours:
        return
    accountable = {(row.container_id, row.ifname) for row in world.rows} | set(world.owed)
    for lease in world.leases:
        if (lease.container_id, lease.ifname) not in accountable:
            yield lease.address, f"is leased to {lease.container_id} {lease.ifname}, and nobody will give it back"
    held = {(lease.address, lease.container_id, lease.ifname) for lease in world.leases}
    for promise in expected.promises:
        if promise.device in expected.promises_void or promise.netns not in world.pods:
            continue
        for address in promise.addresses:
            if (address, promise.container_id, promise.ifname) not in held:
                yield address, f"was given to {_of(promise)}, which lives, and is leased to it no more"


def _at_rest(world: World, expected: Expected) -> Iterator[Finding]:
    promised = {(promise.device, promise.container_id) for promise in expected.promises}
    rows = {row.device for row in world.rows}
    for row in world.rows:
        if (row.device, row.container_id) not in promised:
            yield row.device, f"is still {row.state} for {_owner(row)}, who has no right to it any more"
    for device, shape in expected.shapes.items():
        if device in rows or device in expected.unplugged:
            continue
        for seen in world.links.get(device, ()):
            if seen.place != HOST or seen.shape != shape:
                yield device, f"is free and looks like {seen}, not like {shape}"
    for device, reason in world.quarantine.items():
        yield device, f"is in quarantine for ever: {reason}"
    for file in world.spool:
        yield file, "is still in the spool"


def _leases_at_rest(world: World, expected: Expected) -> Iterator[Finding]:
    if not expected.leases_are_ours:
        return
    for container_id, ifname in world.owed:
        yield f"{container_id} {ifname}", "has leases that are still owed"
    entitled = {(p.container_id, p.ifname): set(p.addresses) for p in expected.promises}
    for lease in world.leases:
        if lease.address not in entitled.get((lease.container_id, lease.ifname), set()):
            yield lease.address, f"is leased to {lease.container_id} {lease.ifname} for nothing"


def _owner(row: Row) -> str:
    return f"container {row.container_id} {row.cni_ifname}"


def _of(promise: Promise) -> str:
    return f"container {promise.container_id} {promise.cni_ifname}"
