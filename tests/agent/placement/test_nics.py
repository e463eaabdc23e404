from __future__ import annotations

from collections import Counter

from agent.placement import Distances, for_pairs, match_nics
from tests.agent.placement.hosts import Host


def test_a_nic_that_is_a_free_gpus_nearest_is_left_when_an_equal_one_is_there() -> None:
    host = Host()
    mine = host.gpu(("pci0000:00", "p"), 0)
    host.gpu(("pci0000:10", "p", "s", "g"), 0)
    rail = host.nic(("pci0000:10", "p", "s", "n"), 0)
    lone = host.nic(("pci0000:20", "p"), 0)
    distances = Distances(host.snapshot())
    assert match_nics(distances, [mine], [rail, lone], 1) == (lone,)
    # Nobody can get that GPU: no rail to keep whole.
    assert match_nics(distances, [mine], [rail, lone], 1, spare_gpus=[]) == (rail,)


def test_vfs_of_a_port_are_taken_in_the_order_of_their_index() -> None:
    host = Host()
    gpu = host.gpu(("pci0000:00", "p", "s", "g"), 0)
    host.nic(("pci0000:00", "p", "s", "n"), 0, vfs=12)
    snapshot = host.snapshot()
    vfs = [d.address for d in sorted(snapshot.devices, key=lambda d: d.vf_index or 0) if d.is_vf]
    assert match_nics(Distances(snapshot), [gpu], vfs[::-1], 12) == tuple(vfs)


def test_of_what_is_joined_in_pairs_half_is_of_one_port_at_most() -> None:
    host = Host()
    for n in range(2):
        host.nic((f"pci0000:{n}0", "n"), n, vfs=4)
    snapshot = host.snapshot()
    distances = Distances(snapshot)
    vfs = [d.address for d in snapshot.devices if d.is_vf]
    kept = Counter(distances.port(device) for device in for_pairs(distances, vfs, 4))
    assert list(kept.values()) == [2, 2]
    assert for_pairs(distances, vfs, 3) == frozenset(vfs)
    assert for_pairs(distances, vfs[:4], 4) < set(vfs[:4])
