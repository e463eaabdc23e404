"""Resources and networks that name what `cni.protect` keeps for the host. Pure.

A selector that takes such an adapter without naming it is none of these: the adapter is left out of what it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agent.config.covering import selectors_of
from agent.config.values import Network, Resource, Select

THEMSELVES = ("hca", "nic")
"""Kinds that take the very adapters that `pf` and `rootDevices` name; a VF is another device than its PF."""


def contradictions(
    protect: Sequence[str], resources: Sequence[Resource], networks: Sequence[Network]
) -> Iterator[tuple[str, str]]:
    """List the paths at which a protected adapter is named, each with what is wrong there."""
    kept = {entry.lower() for entry in protect}
    for i, resource in enumerate(resources):
        for where, kind, select in selectors_of(resource) if resource.compat is None else ():
            for path, name in _named(f"resources[{i}].{where}", kind, select):
                if name.lower() in kept:
                    yield path, f"{name} is never offered, since cni.protect names it: take it out of one of the two"
    for i, network in enumerate(networks):
        master = network.netconf.get("master")
        if isinstance(master, str) and master in protect:
            yield f"networks[{i}].master", f"{master} carries no pod's interface, since cni.protect names it"


def _named(path: str, kind: str, select: Select) -> Iterator[tuple[str, str]]:
    yield from ((f"{path}.pciAddresses", address) for address in select.pci_addresses)
    yield from ((f"{path}.netdevs", name) for name in select.netdevs)
    if kind in THEMSELVES:
        yield from ((f"{path}.pf", selector.pf) for selector in select.pf)
        yield from ((f"{path}.rootDevices", selector.pf) for selector in select.root_devices)
    for i, other in enumerate(select.any_of):
        yield from _named(f"{path}[{i}]", kind, other)
