"""Names and addresses in a configuration that this node does not have, with those that it has. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import takewhile

from agent.config import Resource, Select
from agent.config.contradictions import selectors_of
from agent.model.device import PciDevice, Snapshot, is_pci_address
from agent.model.listed import some
from agent.offer.selectors import ACCELERATOR_CLASS

MOST_LISTED = 8


def absent(resource: Resource, snapshot: Snapshot) -> Iterator[tuple[str, str, str]]:
    """List what a resource names and the node does not have: path in the resource, what is wrong, what is there."""
    for where, kind, select in selectors_of(resource):
        yield from _in_select(where, kind, select, snapshot)
    for where, _ in resource.networks.items():
        if where:
            yield from _missing(f"network{where}", "PF", where[1:], *_pfs(snapshot))


def near_first(name: str, names: Iterable[str]) -> Sequence[str]:
    """Order names by how alike they are: those that begin alike come first."""

    def unlikeness(other: str) -> tuple[float, ...]:
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(name, other, strict=False)))
        return -alike, -SequenceMatcher(None, name, other).ratio()

    return sorted(sorted(set(names)), key=unlikeness)


def _in_select(path: str, kind: str, select: Select, snapshot: Snapshot) -> Iterator[tuple[str, str, str]]:
    mine = [d for d in snapshot.devices if _is_of(kind, d)]
    adapters, away = _pfs(snapshot)
    for i, selector in enumerate(select.pf):
        yield from _missing(f"{path}.pf[{i}]", "PF", selector.pf, adapters, away)
    for i, selector in enumerate(select.root_devices):
        yield from _missing(f"{path}.rootDevices[{i}]", "PF", selector.pf, adapters, away)
    netdevs = [n.name for d in mine for n in d.netdevs if not n.is_representor]
    for i, name in enumerate(select.netdevs):
        yield from _missing(f"{path}.netdevs[{i}]", "interface of this kind", name, netdevs, any(map(_is_away, mine)))
    rdma = [r.name for d in mine for r in d.rdma_devices]
    in_pods = any(r.absent for d in snapshot.devices for r in d.rdma_devices)
    for i, name in enumerate(select.rdma_devices):
        yield from _missing(f"{path}.rdmaDevices[{i}]", "RDMA device of this kind", name, rdma, in_pods)
    gpus = [gpu.pci_address for gpu in snapshot.all_gpus]
    addresses = gpus if kind == "gpu" else [d.address for d in mine]
    for i, name in enumerate(select.pci_addresses):
        if name not in snapshot.by_address:
            yield from _missing(f"{path}.pciAddresses[{i}]", "device", name, addresses)
    for i, other in enumerate(select.any_of):
        yield from _in_select(f"{path}[{i}]", kind, other, snapshot)


def _missing(
    path: str, what: str, name: str, there: Sequence[str], may_be_away: bool = False
) -> Iterator[tuple[str, str, str]]:
    """Say what is missing. A name may be away with an interface or RDMA device that is in a pod; no address is."""
    alike = [each for each in there if is_pci_address(each) == is_pci_address(name.lower())]
    if name.lower() in (each.lower() for each in there) or (may_be_away and not is_pci_address(name.lower())):
        return
    listed = some(near_first(name, alike), MOST_LISTED)
    yield path, f"no {what} here is called {name}", f"here are {listed}" if alike else "there is none at all"


def _pfs(snapshot: Snapshot) -> tuple[Sequence[str], bool]:
    """List the adapters by interface and by address, and tell whether interfaces of some may be in pods."""
    found = [d for d in snapshot.devices if _is_of("nic", d)]
    names = [n.name for d in found for n in d.netdevs if not n.is_representor]
    return [*names, *(d.address for d in found)], any(map(_is_away, found))


def _is_of(kind: str, device: PciDevice) -> bool:
    if kind in ("nic", "hca"):
        return not device.is_vf and (device.is_network or bool(device.netdevs or device.rdma_devices))
    return device.is_vf if kind == "vf" else device.pci_class >> 16 == ACCELERATOR_CLASS


def _is_away(device: PciDevice) -> bool:
    """Tell whether a device lacks the interface that its driver would make for it."""
    lacks = device.driver is not None and not device.netdevs
    return lacks and not (device.is_for_programs or device.is_for_rdma_alone)
