"""The entries of `resources`."""

from __future__ import annotations

import re

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
    Select,
)

RESOURCE_NAME = re.compile(
    r"(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)*[a-z0-9](?:[a-z0-9-]*[a-z0-9])?/"
    r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
)
MAX_UNITS = 10_000


def read_resource(reader: Reader) -> Resource:
    """Read one entry. Which keys it may have depends on its kind."""
    name = reader.text("name", None, "domain/name, such as rdma/hca", RESOURCE_NAME, about="Name that pods ask for")
    kind = reader.choice("kind", None, KINDS, about="What a unit of it is")
    for key in ("name", "kind"):
        if key not in reader.value:
            reader.note(key, "is missing")
    late, gpu, fabric = kind in LATE_KINDS, kind in ("gpu", "rail"), kind in NETWORK_KINDS
    binding = reader.choice("binding", "early", BINDINGS, about="When the device is chosen") if late else "early"
    resource = Resource(
        name=name or "",
        kind=kind or "",
        select=read_select(reader, "select", kind) if kind != "rail" else Select(),
        shares=_shares(reader) if kind == "hca" else DEFAULT_SHARES,
        management=reader.flag("management", False, about="Hand out umad and issm devices too") if fabric else False,
        network=reader.text(
            "network", None, "the name of a network", NETWORK_NAME, about="Entry of networks that pods join"
        )
        if fabric
        else None,
        binding=binding,
        slots=reader.whole("slots", None, 1, MAX_UNITS, about="Late binding: number of units") if late else None,
        gpu=read_select(reader, "gpu", "gpu") if kind == "rail" else Select(),
        nic=_rail_nic(reader.section("nic")) if kind == "rail" else RailNic(),
        mig=reader.choice("mig", "none", MIG_STRATEGIES, about="How slices of GPUs are offered")
        if kind == "gpu"
        else "none",
        replicas=reader.whole("replicas", 1, 1, MAX_UNITS, about="Containers that take turns on one GPU")
        if kind == "gpu"
        else 1,
        pass_by=reader.words("passBy", PASS_BY, about="How the container gets the GPU") if gpu else (),
        exclude_topology=reader.flag("excludeTopology", False, about="Tell kubelet no NUMA node"),
        environment=reader.words("environment", ENVIRONMENTS, about="Helper variables for libraries") if fabric else (),
    )
    if resource.slots is not None and binding != "late":
        reader.note("slots", "needs binding: late; with early binding each selected device is a unit")
    if kind:
        reader.done()
    return resource


def _shares(reader: Reader) -> int:
    return int(reader.whole("shares", DEFAULT_SHARES, 1, MAX_UNITS, about="Units that one HCA offers"))


def _rail_nic(reader: Reader) -> RailNic:
    kind = str(reader.choice("kind", "vf", RAIL_NIC_KINDS, about="What the NIC half is"))
    nic = RailNic(
        kind=kind,
        select=read_select(reader, "select", kind),
        shares=_shares(reader) if kind == "hca" else DEFAULT_SHARES,
    )
    reader.done()
    return nic
