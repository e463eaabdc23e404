"""How a small agent is configured: device plugins and claims offer the same VFs, and so get in each other's way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.config import CniSettings, Config, Dra, Resource
from agent.model.device import Snapshot
from agent.offer.offer import Offer
from agent.offer.units import plain_offer
from tests.cni import tiny_node
from tests.cni.networks import network

SPECS = "cdi"
"""In the node's folder."""
DRIVER, POOL = "nodefabric.io", "tiny"
GRANTED = Resource("rdma/vf", "vf", network="storage")
LATE = Resource("late/vf", "vf", binding="late", network="late")
CLAIMED = Resource("claimed/vf", "vf", offer="dra")
"""The first VF."""
CLAIMED_LATE = Resource("claimed/late-vf", "vf", offer="dra", binding="late")
"""The others."""
OF_GRANTED: Mapping[str, Any] = {"vlan": 7, "trust": "on"}
OF_LATE: Mapping[str, Any] = {"vlan": 9}
OF_CLAIMED: Mapping[str, Any] = {"vlan": 11, "trust": "on"}
"""What devices are set up with that were granted, chosen for a slot, or given by a claim."""


def config(folder: Path) -> Config:
    """Return the configuration of the agent in a node's folder."""
    networks = (
        network({"name": "storage", **OF_GRANTED, "ipam": ipam(folder, 8)}),
        network({"name": "late", **OF_LATE}),
        network({"name": "claims", **OF_CLAIMED, "ipam": ipam(folder, 11)}),
    )
    return Config(
        resources=(GRANTED, LATE, CLAIMED, CLAIMED_LATE),
        networks=networks,
        cni=CniSettings(require_grant=False),
        dra=Dra(metadata=True),
        kubelet_dir=folder / "kubelet",
        state_dir=folder,
        run_dir=folder,
        cdi_dir=folder / SPECS,
    )


def ipam(folder: Path, number: int) -> dict[str, Any]:
    """Configure addresses, one of each family, from the plugin that notes its calls."""
    ranges = [[{"subnet": f"10.{number}.0.0/16"}], [{"subnet": f"fd{number:02}::/64"}]]
    return {"type": "journalled", "dataDir": str(folder / "leases"), "ranges": ranges}


def offer_of(snapshot: Snapshot) -> Offer:
    """Offer every VF by each resource, as no agent would; of those for claims one has the first, one the others."""
    offers = {r.name: plain_offer((r,), snapshot) for r in (GRANTED, LATE, CLAIMED, CLAIMED_LATE)}
    claimable = {
        r.name: tuple(
            unit for unit in offers[r.name].claimable[r.name] if (unit.device == tiny_node.vf(0)) == (r is CLAIMED)
        )
        for r in (CLAIMED, CLAIMED_LATE)
    }
    return replace(offers[GRANTED.name], pools=offers[LATE.name].pools, claimable=claimable)
