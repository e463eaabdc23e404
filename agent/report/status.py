"""The status document: what the node offers, who holds what, and what is wrong.

The same document feeds the /status endpoint, the status page, `nodefabric status` and tests. It holds only what
changes when something happens, and no clock, so that two documents of one state are the same to the byte.
`docs/status-json.md` describes it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from http.client import HTTPException
from types import MappingProxyType
from typing import Any

from agent.config import Endpoints
from agent.edits.add_facts import NOTED
from agent.errors import Unavailable
from agent.ledger.database import Books
from agent.model.allocation import (
    Attachment,
    AttachmentState,
    Claim,
    Hold,
    OwedLease,
    Quarantine,
)
from agent.model.device import NO_NUMA_NODE, Gpu, Netdev, PciDevice, RdmaDevice, Snapshot
from agent.model.health import text_of
from agent.model.unit_id import UnitId
from agent.model.vf_identity import RailKey
from agent.offer.left_out import LeftOut
from agent.offer.offer import Unit
from agent.process import sockets
from agent.process.conditions import NO_POD_NEEDS
from agent.report import chart
from agent.report.events import Event
from agent.report.facts import DriverState, Facts, Held

NOTHING: Mapping[str, Any] = MappingProxyType(dict.fromkeys(("tree", "gpus", "nics", "rails"), ()))
"""The hardware of a node that nobody has looked at."""
NO_RAILS: Mapping[str, RailKey] = MappingProxyType({})


ANSWER_SECONDS = 5.0
FORMAT = 2
"""Counts up when a key changes its meaning or goes; new keys may come without that."""


def build(
    facts: Facts,
    *,
    node: str,
    version: str,
    kinds: Mapping[str, str],
    conditions: Mapping[str, str],
    events: Sequence[Event] = (),
    left_out: Sequence[LeftOut] = (),
) -> dict[str, Any]:
    """Make the document. `kinds` maps resource names to their kind, `conditions` checks to what is wrong.

    `events` come newest first, `left_out` is what no resource offers.
    """
    granted, holders = facts.granted, facts.held
    attached = {row.device for row in facts.attachments}
    rails = {unit.unit_id: gpu for units in facts.units.values() for unit in units if (gpu := unit.gpu)}
    return {
        "format": FORMAT,
        "node": node,
        "version": version,
        "ready": conditions.keys() <= NO_POD_NEEDS,
        "obstacles": dict(conditions),
        "snapshot": {"generation": facts.snapshot.generation, "scanMilliseconds": round(facts.scan_milliseconds, 1)},
        "resources": [
            {
                "name": name,
                "kind": kinds.get(name, ""),
                "units": len(units),
                "healthy": sum(unit.health.healthy for unit in units),
                "granted": sum(unit.unit_id in granted for unit in units),
                "attached": len({unit.device for unit in units if not attached.isdisjoint(unit.devices)}),
                "unhealthy": [
                    {"unit": unit.unit_id, "reason": unit.health.reason} for unit in units if not unit.health.healthy
                ],
            }
            for name, units in facts.units.items()
        ],
        "reasons": _reasons(facts.units),
        "hardware": describe(facts.snapshot, facts.rails),
        "offers": _offers(facts.units, kinds, granted),
        "notOffered": [each.document() for each in left_out],
        "slots": _slots(facts.units, granted),
        "held": [_held(each) for each in holders],
        "grants": [_hold(hold, facts.containers.get(hold.key), rails.get(hold.key, "")) for hold in facts.holds],
        "attachments": [_attachment(row) for row in facts.attachments],
        **_of_claims(facts.driver, facts.claims, holders),
        **_held_back(facts.quarantines, facts.owed_leases),
        "problems": [asdict(problem) for problem in facts.snapshot.problems],
        "events": [asdict(event) for event in events],
    }


def without_agent(found: Books, *, node: str, version: str, problem: str) -> dict[str, Any]:
    """Make the document from the books alone. `problem` says what is wrong with the agent.

    What the hardware is like, and so the resources, only a running agent knows.
    """
    facts = Facts(
        Snapshot(),
        holds=found.holds,
        attachments=found.attachments,
        quarantines=found.quarantines,
        owed_leases=found.owed_leases,
        claims=found.claims,
    )
    document = build(facts, node=node, version=version, kinds={}, conditions={"agent": problem})
    del document["snapshot"]
    return document | {"hardware": dict(NOTHING)}


def _counts(units: Sequence[Unit], granted: Mapping[str, str]) -> dict[str, Any]:
    return {
        "units": len(units),
        "healthy": sum(unit.health.healthy for unit in units),
        "granted": sum(unit.unit_id in granted for unit in units),
        "reasons": list(dict.fromkeys(unit.health.reason for unit in units if not unit.health.healthy)),
    }


def _offers(
    units: Mapping[str, Sequence[Unit]], kinds: Mapping[str, str], granted: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Count the units of each device in each resource; `_slots` counts those without a device."""
    found: dict[tuple[str, str], list[Unit]] = {}
    for name, of_resource in units.items():
        for unit in of_resource:
            for device in filter(None, (*unit.devices, unit.gpu)):
                found.setdefault((device, name), []).append(unit)
    return [
        {"device": device, "resource": name, "kind": kinds.get(name, ""), **_counts(mine, granted)}
        for (device, name), mine in found.items()
    ]


def _slots(units: Mapping[str, Sequence[Unit]], granted: Mapping[str, str]) -> list[dict[str, Any]]:
    """Count the slots of each resource and NUMA node, and how many of these have a device now."""
    found: dict[tuple[str, int], list[Unit]] = {}
    for name, of_resource in units.items():
        for unit in of_resource:
            if not unit.device or UnitId.parse(unit.unit_id).is_slot:
                found.setdefault((name, unit.numa_node), []).append(unit)
    return [
        {
            "resource": name,
            "numaNode": numa_node if numa_node >= 0 else None,
            "bound": sum(bool(granted.get(unit.unit_id)) for unit in mine),
            **_counts(mine, granted),
        }
        for (name, numa_node), mine in found.items()
    ]


def _reasons(units: Mapping[str, Sequence[Unit]]) -> dict[str, str]:
    """Explain the reason words that occur; empty for a word that nobody explains."""
    words = {str(unit.health.reason) for found in units.values() for unit in found if not unit.health.healthy}
    return {word: text_of(word) for word in sorted(words)}


def _held_back(quarantines: Sequence[Quarantine], owed_leases: Sequence[OwedLease]) -> dict[str, Any]:
    """List the devices in quarantine, and the addresses whose interfaces are gone."""
    return {
        "quarantine": [{"device": q.device, "reason": q.reason, "since": q.since} for q in quarantines],
        "owedLeases": [
            {
                "container": lease.container_id,
                "ifname": lease.ifname,
                "plugin": ((lease.request.get("network") or {}).get("ipam") or {}).get("type", ""),
                "since": lease.since,
                "triedAt": lease.tried_at or None,
                "problem": lease.problem,
            }
            for lease in owed_leases
        ],
    }


def _held(each: Held) -> dict[str, Any]:
    return {
        "device": each.device or (each.hold.key if each.hold is not None else ""),
        "resource": each.resource_name,
        "how": each.how,
        "pods": [str(pod) for pod in each.pods],
        "ifname": each.row.ifname if each.row is not None else "",
        "addresses": _addresses(each.row) if each.row is not None else [],
        "state": each.state,
        "since": each.since,
    }


def _hold(hold: Hold, container: str | None = None, gpu: str = "") -> dict[str, Any]:
    return {
        "unit": hold.key,
        "resource": hold.resource_name,
        "device": hold.device,
        "pod": str(hold.pod) if hold.pod else None,
        "container": container,
        "since": hold.since,
        **({"devices": list(hold.devices)} if len(hold.devices) > 1 else {}),
        **({"gpu": gpu} if gpu else {}),
    }


def _addresses(row: Attachment) -> list[str]:
    answer = row.result or {}
    index = next((i for i, found in enumerate(answer.get("interfaces", [])) if found.get("name") == row.ifname), None)
    return [ip["address"] for ip in answer.get("ips", []) if ip.get("interface") == index]


def _attachment(row: Attachment) -> dict[str, Any]:
    return {
        "device": row.device,
        "mode": row.undo.mode,
        "netdev": row.undo.netdev,
        "resource": row.resource_name,
        "ifname": row.ifname,
        "addresses": _addresses(row),
        "pod": str(row.owner.pod),
        "container": row.owner.container_id,
        "state": row.state.value,
        "since": row.since,
        **({"rdmaDevice": told["name"], "gidIndex": told["gid_index"]} if (told := row.request.get(NOTED)) else {}),
    }


def describe(snapshot: Snapshot, rails: Mapping[str, RailKey] = NO_RAILS) -> dict[str, Any]:
    """Describe GPUs, NICs and VFs, and how they hang together. `rails` has the numbers and planes of adapters."""
    return {
        "tree": chart.tree(snapshot),
        "gpus": [_gpu(gpu, snapshot) for gpu in snapshot.all_gpus],
        "nics": [_nic(nic, snapshot, rails.get(nic.address)) for nic in snapshot.devices if chart.is_nic(nic)],
        "rails": [
            {
                "gpu": gpu.uuid,
                "nics": [nic.address for nic in nics],
                "locality": place.name if place is not None else None,
            }
            for gpu, nics, place in chart.rails(snapshot)
        ],
        "nearness": _nearness(snapshot),
    }


def _nearness(snapshot: Snapshot) -> dict[str, Any]:
    why = chart.why_not_known(snapshot)
    return {
        "known": why is None,
        "source": snapshot.places.source or None,
        "reason": why[0] if why is not None else None,
        "unknownNics": list(chart.unknown_nics(snapshot)),
    }


def _gpu(gpu: Gpu, snapshot: Snapshot) -> dict[str, Any]:
    device = snapshot.by_address.get(gpu.pci_address)
    return {
        "uuid": gpu.uuid,
        "index": gpu.index,
        "address": gpu.pci_address,
        "name": gpu.name,
        "memoryBytes": gpu.memory_bytes,
        "numaNode": _numa(device),
        "driver": device.driver if device is not None else None,
        "nvlinks": sum(links for _, links in gpu.nvlinks),
        "migMode": gpu.mig_mode,
        "migDevices": [{"uuid": mig.uuid, "profile": mig.profile} for mig in gpu.mig_devices],
        "ailments": list(gpu.ailments),
    }


def _nic(device: PciDevice, snapshot: Snapshot, rail: RailKey | None) -> dict[str, Any]:
    number, plane = rail or (None, None)
    return {
        "address": device.address,
        "rail": number,
        "plane": plane,
        "numaNode": _numa(device),
        "dataDirect": snapshot.data_direct.of.get(device.address),
        "driver": device.driver,
        "netdevs": [_netdev(netdev) for netdev in device.netdevs if not netdev.is_representor],
        "rdma": [_rdma(rdma) for rdma in device.rdma_devices],
        "totalVfs": device.sriov_totalvfs,
        "vfs": [_vf(snapshot.by_address[vf]) for vf in device.vfs if vf in snapshot.by_address],
    }


def _vf(vf: PciDevice) -> dict[str, Any]:
    return {
        "address": vf.address,
        "index": vf.vf_index,
        "driver": vf.driver,
        "netdev": vf.netdev.name if vf.netdev is not None else None,
        "rdma": vf.rdma_devices[0].name if vf.rdma_devices else None,
    }


def _netdev(netdev: Netdev) -> dict[str, Any]:
    return {
        "name": netdev.name,
        "state": netdev.operstate,
        "mtu": netdev.mtu,
        "speedMbps": netdev.speed_mbps,
        "linkLayer": netdev.link_layer.value,
    }


def _rdma(rdma: RdmaDevice) -> dict[str, Any]:
    return {
        "name": rdma.name,
        "firmware": rdma.fw_version,
        "ports": [
            {"number": port.number, "state": port.state, "linkLayer": port.link_layer.value, "rateGbps": port.rate_gbps}
            for port in rdma.ports
        ],
    }


def _numa(device: PciDevice | None) -> int | None:
    return device.numa_node if device is not None and device.numa_node != NO_NUMA_NODE else None


def _of_claims(driver: DriverState | None, claims: Sequence[Claim], holders: Iterable[Held]) -> dict[str, Any]:
    """Describe driver and claims. A node that has neither has no such keys."""
    found: dict[str, Any] = {}
    if driver is not None:
        found["dra"] = {
            "driver": driver.name,
            "registered": driver.is_registered,
            "problem": driver.problem or None,
            "slices": driver.slices,
            "dropped": sorted(driver.dropped),
            "devices": [
                {"resource": resource, "health": health, "count": count} for resource, health, count in driver.devices
            ],
        }
    if driver is not None or claims:
        # Several pods may have a part of one adapter: that one still has it comes before another's being on its way.
        ordered = sorted(holders, key=lambda each: each.state == AttachmentState.ATTACHED)
        states = {each.hold.key: each.state for each in ordered if each.hold is not None and each.hold.claim_uid}
        found["claims"] = [_claim(claim, states) for claim in claims]
    return found


def _claim(claim: Claim, states: Mapping[str, str]) -> dict[str, Any]:
    return {
        "namespace": claim.ref.namespace,
        "name": claim.ref.name,
        "uid": claim.ref.uid,
        "state": claim.state.value,
        "since": claim.since,
        "pods": [str(pod) for pod in claim.pods],
        "devices": [
            {
                "request": hold.request,
                "name": hold.device_name,
                "device": hold.device,
                "resource": hold.resource_name,
                "kind": hold.kind,
                "admin": hold.admin,
                "state": states[hold.key],
                **({"share": hold.share_id} if hold.share_id else {}),
            }
            for hold in claim.devices
        ],
    }


class Waiting(Unavailable):
    """An agent runs, and offers nothing until its configuration is right for this node."""


def ask(endpoints: Endpoints) -> dict[str, Any]:
    """Ask the agent for its status document. Raises Unavailable."""
    url = endpoints.url("status")
    try:
        with sockets.get(url, ANSWER_SECONDS) as answer:
            document = json.load(answer)
    except (OSError, ValueError, HTTPException) as error:
        raise Unavailable(
            f"the agent does not answer at {url} ({error}): is it running with this configuration?"
        ) from error
    if not isinstance(document, dict) or "format" not in document:
        found = document.get("obstacles") if isinstance(document, dict) else None
        why = f": {found['config']}" if isinstance(found, dict) and found.get("config") else ""
        raise Waiting(f"the agent at {url} waits for its configuration to be repaired, and offers nothing yet{why}")
    return document


COMPRESSION = 1
"""A 1,024-VF document shrinks to a tenth with the fastest, in a few milliseconds."""


@dataclass(frozen=True, slots=True)
class Served:
    """One state of the document."""

    tag: str
    """Entity tag (RFC 9110), with its quotes: the same document has the same one, in any agent."""
    plain: bytes
    compressed: bytes


def served(document: Any) -> Served:
    """Write a document as bytes, plain and compressed."""
    plain = json.dumps(document, separators=(",", ":"), default=str).encode() + b"\n"
    tag = hashlib.sha256(plain).hexdigest()[:32]
    return Served(f'"{tag}"', plain, gzip.compress(plain, COMPRESSION, mtime=0))
