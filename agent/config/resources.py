"""The entries of `resources`."""

from __future__ import annotations

import re
from typing import Any

from agent.config.networks import NETWORK_NAME
from agent.config.reader import Reader
from agent.config.select import read_select
from agent.config.values import (
    BINDINGS,
    DEFAULT_SHARES,
    ENVIRONMENTS,
    KINDS,
    LATE_KINDS,
    MIG_STRATEGIES,
    NETWORK_KINDS,
    PASS_BY,
    RAIL_NIC_KINDS,
    RailNic,
    Resource,
)

RESOURCE_NAME = re.compile(
    r"(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)*[a-z0-9](?:[a-z0-9-]*[a-z0-9])?/"
    r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
)
KUBELETS_OWN = "is a name of Kubernetes' own, which kubelet refuses: take a domain of yours"
MAX_UNITS = 10_000


def read_resource(reader: Reader) -> Resource:
    """Read one entry. Which keys it may have depends on its kind."""
    name = reader.text(
        "name", None, "domain/name, such as rdma/hca", RESOURCE_NAME, about="What pods ask for in their limits"
    )
    about = "What a unit is: a share of one HCA, a VF, a whole adapter, a GPU, a GPU with its nearest NIC, …"
    kind = reader.choice("kind", None, KINDS, about=about)
    if name is not None and not is_extended(name):
        reader.note("name", f"{name} {KUBELETS_OWN}")
    for key in ("name", "kind"):
        if key not in reader.value:
            reader.note(key, "is missing")
    about = "Tell kubelet no NUMA node, so that its topology manager does not mind"
    found: dict[str, Any] = {"exclude_topology": reader.flag("excludeTopology", False, about=about)}
    if kind == "rail":
        found |= _rail(reader)
    else:
        found["select"] = read_select(reader, "select", kind)
    if kind in NETWORK_KINDS:
        found |= _network_keys(reader)
    if kind in LATE_KINDS:
        found |= _binding(reader)
    if kind == "hca":
        found["shares"] = _shares(reader)
    if kind == "gpu":
        found |= _sharing_of_gpus(reader)
    if kind in ("gpu", "rail"):
        about = "How the container gets the GPU; default: what the node has"
        found["pass_by"] = reader.words("passBy", PASS_BY, about=about)
    if kind:
        reader.done()
    return Resource(name=name or "", kind=kind or "", **found)


def is_extended(name: str) -> bool:
    """Tell whether kubelet takes a resource of this name from a plugin (core/v1/helper, IsExtendedResourceName)."""
    domain = name.partition("/")[0]
    return not domain.endswith("kubernetes.io") and not domain.startswith("requests.")


def _network_keys(reader: Reader) -> dict[str, Any]:
    network = "Entry of `networks` that says what becomes of the device in the pod"
    environment = "Variables that tell libraries which adapters are theirs"
    return {
        "management": reader.flag("management", False, about="Hand out the umad and issm devices too"),
        "network": reader.text("network", None, "the name of a network", NETWORK_NAME, about=network),
        "environment": reader.words("environment", ENVIRONMENTS, about=environment),
    }


def _binding(reader: Reader) -> dict[str, Any]:
    about = "early: kubelet chooses the device; late: it is chosen with the pod's network (not for hostNetwork)"
    binding = reader.choice("binding", "early", BINDINGS, about=about)
    about = "Late binding: number of units, if it is to be less than that of devices"
    slots = reader.whole("slots", None, 1, MAX_UNITS, about=about)
    if slots is not None and binding != "late":
        reader.note("slots", "needs binding: late; with early binding each selected device is a unit")
    return {"binding": binding, "slots": slots}


def _sharing_of_gpus(reader: Reader) -> dict[str, Any]:
    about = "How slices (MIG) are offered: not, instead of their GPU under this name, or by profile"
    return {
        "mig": reader.choice("mig", "none", MIG_STRATEGIES, about=about),
        "replicas": reader.whole("replicas", 1, 1, MAX_UNITS, about="Containers that take turns on one GPU"),
    }


def _shares(reader: Reader) -> int:
    return int(reader.whole("shares", DEFAULT_SHARES, 1, MAX_UNITS, about="Units that one HCA offers"))


def _rail(reader: Reader) -> dict[str, Any]:
    return {
        "gpu": read_select(reader, "gpu", "gpu"),
        "nic": _rail_nic(reader.section("nic", about="The other half of a rail")),
    }


def _rail_nic(reader: Reader) -> RailNic:
    kind = str(reader.choice("kind", "vf", RAIL_NIC_KINDS, about="What the NIC half is"))
    nic = RailNic(
        kind=kind,
        select=read_select(reader, "select", kind),
        shares=_shares(reader) if kind == "hca" else DEFAULT_SHARES,
    )
    reader.done()
    return nic
