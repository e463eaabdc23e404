from __future__ import annotations

from collections.abc import Callable

import pytest

from agent.model.device import NumaNode, Snapshot
from agent.model.locality import Locality
from agent.placement import Distances
from agent.placement.distances import FINE
from tests.agent.placement.hosts import Host, uuid

SWITCH = ("pci0000:10", "p", "s")


def rail() -> Snapshot:
    host = Host()
    host.nic((*SWITCH, "a"), vfs=2)
    host.gpu((*SWITCH, "b"), parts=2)
    return host.snapshot()


@pytest.mark.parametrize(
    "name",
    [uuid(0), "0", "0:1", "nvidia0", "nvidia0/gi1", "MIG-0-1", f"MIG-{uuid(0)}/7/0", f"{uuid(0)}::4", "MIG-0-0::2"],
)
def test_a_gpu_is_known_by_every_name_of_it_and_its_parts(name: str) -> None:
    distances = Distances(rail())
    assert distances.gpu(name) == uuid(0)
    assert distances.port(name) == uuid(0)
    assert distances.distance(name, distances.gpus[0]) is Locality.SELF


def test_a_vf_is_where_its_pf_is() -> None:
    snapshot = rail()
    distances = Distances(snapshot)
    pf, vf = snapshot.devices[0].address, snapshot.devices[2].address
    assert distances.port(vf) == pf
    assert distances.distance(vf, uuid(0)) is distances.distance(uuid(0), pf) is Locality.PIX
    assert distances.distance(vf, pf) is Locality.SELF


def test_what_is_not_there_is_far_from_everything() -> None:
    distances = Distances(rail())
    assert distances.distance("0000:ff:00.0", uuid(0)) is Locality.SYS
    assert distances.distance("", uuid(0)) is Locality.SYS
    assert distances.span("0000:ff:00.0", uuid(0)) == Locality.SYS * FINE + 255


def two_bridges(numa: tuple[int, int], nodes: tuple[NumaNode, ...]) -> tuple[Locality, int]:
    host = Host(numa_nodes=nodes)
    nic = host.nic(("pci0000:00", "p"), numa[0])
    gpu = host.gpu(("pci0000:40", "p"), numa[1])
    distances = Distances(host.snapshot())
    return distances.distance(nic, gpu), distances.span(nic, gpu) % FINE


def nodes(*rows: tuple[int, ...]) -> tuple[NumaNode, ...]:
    return tuple(NumaNode(n, (n,), 1, distances=row) for n, row in enumerate(rows))


TWO, THREE = nodes((10, 21), (21, 10)), nodes((10, 12, 32), (12, 10, 32), (32, 32, 10))


@pytest.mark.parametrize(
    ("numa", "there", "expected"),
    [
        ((-1, -1), TWO, (Locality.SYS, 255)),
        ((-1, 0), TWO, (Locality.SYS, 255)),
        ((-1, -1), nodes((10,)), (Locality.NODE, 0)),
        ((-1, -1), (), (Locality.NODE, 0)),
        ((0, 1), THREE, (Locality.SYS, 12)),
        ((0, 2), THREE, (Locality.SYS, 32)),
    ],
)
def test_between_host_bridges_numa_nodes_count(
    numa: tuple[int, int], there: tuple[NumaNode, ...], expected: tuple[Locality, int]
) -> None:
    assert two_bridges(numa, there) == expected


def test_an_nvlink_that_one_end_tells_of_is_one() -> None:
    host = Host()
    host.gpu(SWITCH, nvlinks=[(1, 4)])
    host.gpu(SWITCH)
    distances = Distances(host.snapshot())
    assert distances.links(uuid(0), uuid(1)) == distances.links(uuid(1), uuid(0)) == 4


def test_of_pairs_below_several_switches_that_with_fewer_bridges_is_nearer(
    node_snapshot: Callable[[str], Snapshot],
) -> None:
    snapshot = node_snapshot("mi250-8gpu")
    distances = Distances(snapshot)
    nics = [d.address for d in snapshot.devices if d.sriov_totalvfs]
    gpu = distances.gpus[2]
    assert [distances.between(gpu, nic).name for nic in nics] == ["PXB", "PXB", "SYS", "SYS"]
    assert [distances.span(gpu, nic) % FINE for nic in nics] == [8, 4, 21, 21]
    assert distances.nearest(gpu, nics) == (nics[1],)
    assert distances.nearest(gpu, nics[2:]) == tuple(nics[2:])
    assert distances.nearest(gpu, ()) == ()
