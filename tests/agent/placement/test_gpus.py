from __future__ import annotations

from collections import Counter

from agent.model.device import NumaNode
from agent.placement import Distances, choose_gpus, choose_pairs
from tests.agent.placement.hosts import Host, uuid


def numbers(gpus: tuple[str, ...]) -> list[int]:
    return [int(gpu.removeprefix("GPU-").partition("-")[0], 16) for gpu in gpus]


def sockets(per_socket: int = 4, *, switch: int = 1) -> Host:
    """Two sockets; so many GPUs below each switch, each with a NIC if it is alone."""
    host = Host()
    for number in range(2 * per_socket):
        place = number // switch
        host.gpu((f"pci0000:{place:02x}", "p", "s", f"g{number}"), number // per_socket)
    return host


def test_what_must_be_included_comes_first_and_draws_the_rest() -> None:
    distances = Distances(sockets().snapshot())
    assert numbers(choose_gpus(distances, distances.gpus, (uuid(6),), 3)) == [6, 4, 5]
    assert choose_gpus(distances, distances.gpus, (uuid(6), uuid(1)), 1) == (uuid(6),)
    assert choose_gpus(distances, distances.gpus, (), 0) == ()


def test_replicas_of_one_gpu_are_not_taken_together() -> None:
    distances = Distances(sockets(switch=2).snapshot())
    free = [f"{uuid(g)}::{n}" for g in range(3) for n in range(4)]
    assert Counter(distances.gpu(name) for name in choose_gpus(distances, free, (), 3)) == dict.fromkeys(
        map(uuid, range(3)), 1
    )
    assert len(choose_gpus(distances, free, (), 5)) == 5


def test_the_least_shared_gpu_is_taken() -> None:
    distances = Distances(sockets(switch=2).snapshot())
    free = [f"{uuid(g)}::{n}" for g in range(3) for n in range(4)]
    load = {uuid(0): 2, uuid(1): 1, uuid(2): 3}
    assert distances.gpu(choose_gpus(distances, free, (), 1, (), load)[0]) == uuid(1)


def test_slices_of_one_gpu_are_used_up_before_another_is_cut_into() -> None:
    host = Host()
    for number in range(3):
        host.gpu((f"pci0000:{number}0", "p"), 0, parts=3)
    distances = Distances(host.snapshot())
    free = ["MIG-0-0", "MIG-0-1", "MIG-0-2", "MIG-1-1", "MIG-1-2", "MIG-2-0", "MIG-2-1", "MIG-2-2"]
    assert choose_gpus(distances, free, (), 1) == ("MIG-1-1",)
    assert {distances.gpu(name) for name in choose_gpus(distances, free, (), 3)} <= {uuid(0), uuid(2)}


def test_gpus_and_their_nics_are_on_numa_nodes_that_the_firmware_calls_near() -> None:
    rows = ((10, 12, 32, 32), (12, 10, 32, 32), (32, 32, 10, 12), (32, 32, 12, 10))
    host = Host(numa_nodes=tuple(NumaNode(n, (n,), 1, distances=row) for n, row in enumerate(rows)))
    gpus = [host.gpu((f"pci0000:{n}0", "p"), n) for n in (0, 2, 1, 3)]
    nic = host.nic(("pci0000:f0", "p"), 2)
    distances = Distances(host.snapshot())
    assert set(choose_gpus(distances, gpus, (gpus[0],), 2)) == {gpus[0], gpus[2]}, "of one socket"
    free = [gpus[0], gpus[2], gpus[3]]
    assert choose_pairs(distances, free, [nic], 1) == ((gpus[3], nic),), "none is on the NIC's node"
