"""Numbers of rails: which adapters have one, and that it stays the adapter's own."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import pytest

from agent.cluster.topology.labels import fabric_nics
from agent.config import PfSelector, Resource, Select
from agent.health_history import HealthHistory
from agent.model.device import Snapshot
from agent.model.vf_identity import Rail
from agent.offer.offers import Offers
from agent.offer.rails import rails_of
from agent.offer.selection import offered_candidates
from agent.offer.units import Reading, plain_offer
from agent.placement import Distances
from agent.report.chart import rails as nearest_nics
from tests.node import change, netdev, node, pci, rdma, split, without

PFS = ("0000:12:00.0", "0000:22:00.0", "0000:32:00.0", "0000:42:00.0")


def numbered(
    snapshot: Snapshot,
    *named: str | tuple[str, ...],
    known: tuple[Rail, ...] = (),
    taken: Collection[str] = (),
    is_new: bool = False,
) -> tuple[Rail, ...]:
    listed = [(each,) if isinstance(each, str) else each for each in named]
    return rails_of(snapshot, Distances(snapshot), listed, known, taken, is_new=is_new)


def numbers(rails: tuple[Rail, ...]) -> dict[str, int]:
    return {rail.device: rail.number for rail in rails}


def moved(snapshot: Snapshot, address: str, to: str) -> Snapshot:
    """Another slot, or the buses behind a card that is gone count differently."""
    card = snapshot.by_address[address]
    there = replace(card, address=to, path=(*card.path[:-1], to))
    return replace(snapshot, devices=(*without(snapshot, address).devices, there))


def with_storage(snapshot: Snapshot) -> Snapshot:
    """An adapter of another root port, with no GPU near it, that comes first by its address."""
    far = pci(
        "0000:02:00.0", ("pci0000:00",), 0, rdma_devices=(rdma(9, "b83f:d203:00a0:ffff"),), netdevs=(netdev("stor0"),)
    )
    return replace(snapshot, devices=(far, *snapshot.devices))


def test_rails_are_the_adapters_next_to_gpus_by_pci_address() -> None:
    assert numbers(numbered(with_storage(node(vfs=1)))) == {pf: n for n, pf in enumerate(PFS)}
    without_gpus = replace(with_storage(node(vfs=1)), gpus=())
    assert list(numbers(numbered(without_gpus))) == ["0000:02:00.0", *PFS]


def test_an_accelerators_own_network_function_is_neither_a_rail_nor_an_hca() -> None:
    whole, accelerator = node(vfs=1), "0000:14:00.0"
    of_gaudi = rdma(9, "b83f:d203:00a0:eeee")
    snapshot = replace(
        change(whole, accelerator, pci_class=0x120000, vendor=0x1DA3, rdma_devices=(of_gaudi,)),
        gpus=(),
        accelerators=tuple(replace(gpu, uuid=gpu.pci_address) for gpu in whole.gpus),
    )
    assert numbers(numbered(snapshot)) == {pf: n for n, pf in enumerate(PFS)}
    hcas = offered_candidates(Resource("a/b", "hca"), "hca", snapshot)
    assert [candidate.device for _, candidate in hcas] == list(PFS)
    assert [nic.address for nic in fabric_nics(snapshot)] == list(PFS)
    assert [nic.address for _, nics, _ in nearest_nics(snapshot) for nic in nics] == list(PFS)


def test_a_list_numbers_them_and_one_that_is_not_there_leaves_a_gap() -> None:
    snapshot = node(vfs=1)
    assert numbers(numbered(snapshot, "rail3", "gone0", PFS[0])) == {PFS[3]: 0, PFS[0]: 2}


@pytest.mark.parametrize("whole", [node(vfs=1), split(node(vfs=0))], ids=["one plane", "two planes"])
@pytest.mark.parametrize("is_named", [False, True])
def test_a_number_stays_while_adapters_are_away_and_when_they_come_back(whole: Snapshot, is_named: bool) -> None:
    named = [(d.netdevs[0].name,) for d in whole.devices if d.rdma_devices] if is_named else []
    known = numbered(whole, *named)
    for away in (without(whole, PFS[1]), change(whole, PFS[0], netdevs=(), rdma_devices=(), driver=None)):
        assert numbered(away, *named, known=known) == known
        assert numbered(whole, *named, known=numbered(away, *named, known=known)) == known


def test_a_card_that_takes_anothers_place_takes_its_number() -> None:
    whole = node(vfs=1)
    known = numbered(whole)
    replaced = change(whole, PFS[1], rdma_devices=(rdma(1, "b83f:d203:00a0:eeee"),))
    assert numbers(numbered(replaced, known=known)) == numbers(known)
    # In another slot, while a third card is away: it gets what is free.
    other = change(moved(without(whole, PFS[0]), PFS[1], "0000:26:00.0"), "0000:26:00.0", rdma_devices=(rdma(1, "1"),))
    assert numbers(numbered(other, known=known))["0000:26:00.0"] == 0
    # The same card in another slot: it keeps its own.
    assert numbers(numbered(moved(without(whole, PFS[0]), PFS[2], "0000:36:00.0"), known=known))["0000:36:00.0"] == 2
    # In another slot, and the others are there: they keep theirs.
    assert numbers(numbered(moved(replaced, PFS[1], "0000:48:00.0"), known=known)) == {
        PFS[0]: 0,
        "0000:48:00.0": 1,
        PFS[2]: 2,
        PFS[3]: 3,
    }


@pytest.mark.parametrize(("taken", "is_new"), [((), False), (PFS, True), (PFS, False)])
def test_one_more_card_gets_the_next_number_once_the_numbers_are_final(taken: tuple[str, ...], is_new: bool) -> None:
    whole = node(vfs=1)
    known = numbered(without(whole, PFS[1]), taken=taken)
    assert numbers(known) == {PFS[0]: 0, PFS[2]: 1, PFS[3]: 2}
    by_address = {pf: n for n, pf in enumerate(PFS)}
    is_final = bool(taken) and not is_new
    expected = {**numbers(known), PFS[1]: 3} if is_final else by_address
    assert numbers(numbered(whole, known=known, taken=taken, is_new=is_new)) == expected


@pytest.mark.parametrize("silent", ["0000:03:00.0", "0009:03:00.0"])
def test_a_card_whose_data_direct_function_is_not_known_keeps_the_others_numbers(
    node_snapshot: Callable[[str], Snapshot], silent: str
) -> None:
    whole = node_snapshot("gb300-4gpu")
    every = {pf: number for number, pf in enumerate(sorted(whole.data_direct.of))}
    assert numbers(numbered(whole)) == every
    ids = tuple(each for each in whole.adapter_ids if each[0] != silent)
    assert numbers(numbered(replace(whole, adapter_ids=ids))) == every
    assert numbers(numbered(replace(whole, adapter_ids=()))) == every, "none answers"
    assert numbered(replace(whole, adapter_ids=(), adapter_ids_due=True)) == (), "wait for the answers"


# ------------------------------------------------------------------------------------------------------------- planes


def keys(rails: tuple[Rail, ...]) -> dict[str, tuple[int, int]]:
    return {rail.device: rail.key for rail in rails}


def function(pf: str, plane: int) -> str:
    return f"{pf[:-1]}{plane}"


PLANES = {function(pf, plane): (n, plane) for n, pf in enumerate(PFS) for plane in (0, 1)}
APART = {address: (number, 0) for number, address in enumerate(PLANES)}
SPLIT = split(node(vfs=0))


def beside_two_gpus(snapshot: Snapshot) -> Snapshot:
    """Each adapter has a second GPU below its switch."""
    cards = [d for d in snapshot.devices if d.vendor == 0x10DE]
    second = [replace(d, address=f"{d.address[:-4]}01.0", path=(*d.path[:-1], f"{d.address[:-4]}01.0")) for d in cards]
    gpus = [
        replace(g, uuid=f"{g.uuid}-b", pci_address=f"{g.pci_address[:-4]}01.0", index=g.index + 8)
        for g in snapshot.gpus
    ]
    devices = sorted((*snapshot.devices, *second), key=lambda device: device.address)
    return replace(snapshot, devices=tuple(devices), gpus=(*snapshot.gpus, *gpus))


def with_ids(snapshot: Snapshot, ids: dict[str, str]) -> Snapshot:
    return replace(snapshot, adapter_ids=tuple(sorted(ids.items())))


def of_two_devices(snapshot: Snapshot) -> Snapshot:
    """The second PF of each adapter is another PCI device."""
    for pf in PFS:
        snapshot = moved(snapshot, function(pf, 1), f"{pf[:-4]}08.0")
    return snapshot


SAME_ID = {address: f"adapter-{pf}" for pf in PFS for address in (pf, f"{pf[:-4]}08.0")}


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        (SPLIT, PLANES),
        (split(node(vfs=0), 4), {function(pf, p): (n, p) for n, pf in enumerate(PFS) for p in range(4)}),
        (split(node(vfs=0), device=0x1021), APART),
        (split(node(vfs=0), device=0x101D), APART),
        (beside_two_gpus(SPLIT), APART),
        (replace(SPLIT, gpus=()), APART),
        (with_ids(SPLIT, {function(PFS[0], 1): "adapter-0", PFS[1]: ""}), PLANES),
        (of_two_devices(SPLIT), {a: (n, 0) for n, a in enumerate(SAME_ID)}),
        (with_ids(of_two_devices(SPLIT), SAME_ID), {a: (n // 2, n % 2) for n, a in enumerate(SAME_ID)}),
    ],
    ids=[
        "two functions of one ConnectX-8",
        "four",
        "the two ports of a ConnectX-7",
        "the two ports of a ConnectX-6",
        "a port for each of two GPUs",
        "no GPU",
        "V3 of one of the functions was read",
        "two PCI devices",
        "two PCI devices with the same V3",
    ],
)
def test_functions_of_one_adapter_that_belong_to_one_gpu_are_planes_of_one_rail(
    snapshot: Snapshot, expected: dict[str, tuple[int, int]]
) -> None:
    assert keys(numbered(snapshot)) == expected


def test_numbers_from_before_vital_product_data_was_read_go_when_it_is() -> None:
    """The adapters' PFs stand elsewhere than their Data Direct functions, which are beside the GPUs."""
    functions = [
        replace(card, address=f"{card.address[:-4]}1f.0", device=0x2100, rdma_devices=(), netdevs=())
        for card in (SPLIT.by_address[pf] for pf in PFS)
    ]
    pfs = [replace(d, path=("pci0000:f0", d.address)) if d.rdma_devices else d for d in SPLIT.devices]
    unread = replace(SPLIT, devices=tuple(sorted((*pfs, *functions), key=lambda d: d.address)))
    ids = {d.address: d.address[:-4] for d in unread.devices if d.vendor == 0x15B3}
    due, read = replace(unread, adapter_ids_due=True), with_ids(unread, ids)
    assert numbered(due, taken=PLANES) == ()
    some = numbered(with_ids(due, dict(list(ids.items())[6:])), taken=PLANES)
    others = tuple(replace(rail, number=rail.number + 3) for rail in some)
    for known in (some, others):
        assert keys(numbered(read, known=known, taken=PLANES)) == PLANES
    settled = numbered(read, taken=PLANES)
    for snapshot in (due, unread, with_ids(unread, dict(list(ids.items())[1:]))):
        assert numbered(snapshot, known=settled, taken=PLANES) == settled
    for silent in ids:
        answered = {address: adapter for address, adapter in ids.items() if address != silent}
        assert keys(numbered(with_ids(unread, answered), taken=PLANES)) == PLANES
    assert keys(numbered(unread, taken=PLANES)) == PLANES


def test_a_list_of_lists_makes_planes_of_any_ports_and_a_plain_entry_is_one_plane() -> None:
    ports = split(node(vfs=0), device=0x1021)
    listed = numbered(ports, ("rail1p1", "rail0p0"), "rail2p0", ("gone0", function(PFS[3], 1)))
    assert keys(listed) == {
        function(PFS[1], 1): (0, 0),
        PFS[0]: (0, 1),
        PFS[2]: (1, 0),
        function(PFS[3], 1): (2, 1),
    }


def test_a_card_with_fewer_planes_takes_the_whole_number_of_one_that_is_away() -> None:
    known = numbered(SPLIT)
    fewer = without(SPLIT, PFS[0], function(PFS[0], 1))
    new = change(moved(SPLIT, PFS[0], "0000:16:00.0"), "0000:16:00.0", rdma_devices=(rdma(9, "b83f:d203:00a0:eeee"),))
    card = new.by_address["0000:16:00.0"]
    found = numbered(replace(fewer, devices=(*fewer.devices, card)), known=known)
    assert [rail.key for rail in found] == [(0, 0), *(key for key in PLANES.values() if key[0])]
    assert keys(found)["0000:16:00.0"] == (0, 0)


# -------------------------------------------------------------------------------------------------- what resources take


def xe9680() -> Snapshot:
    """Storage ports below the switches of two GPUs, whose addresses come before the adapters' to the fabric."""
    storage = [
        pci(
            f"0000:{bus}:00.{port}",
            card.path[:-1],
            0,
            rdma_devices=(rdma(90, f"1:{bus}{port}"),),
            netdevs=(netdev("s"),),
        )
        for bus, card in (("11", node().by_address[PFS[0]]), ("31", node().by_address[PFS[2]]))
        for port in (0, 1)
    ]
    snapshot = node(vfs=1)
    return replace(snapshot, devices=tuple(sorted((*snapshot.devices, *storage), key=lambda device: device.address)))


XE9680 = xe9680()
ALL = numbers(numbered(XE9680))
BY_PORT = {pf: number for number, pf in enumerate(PFS)}


def test_numbers_count_only_adapters_that_a_resource_takes_if_any_does() -> None:
    assert [ALL[pf] for pf in PFS] == [2, 3, 6, 7]
    assert numbers(numbered(XE9680, taken=PFS)) == BY_PORT
    vfs = Resource("rdma/vf", "vf", Select(pf=tuple(PfSelector(pf) for pf in PFS)))
    assert numbers(plain_offer([vfs], XE9680).rails) == BY_PORT
    gpus = Resource("nvidia.com/gpu", "gpu")
    assert numbers(plain_offer([gpus], XE9680).rails) == ALL


def test_numbers_from_before_a_resource_took_an_adapter_go_and_those_of_an_earlier_version_stay() -> None:
    first = numbered(XE9680)
    assert numbers(numbered(XE9680, known=first, taken=PFS)) == BY_PORT
    earlier = tuple(replace(rail, is_settled=True) for rail in first)
    assert numbers(numbered(XE9680, known=earlier, taken=PFS)) == ALL


def test_numbers_stay_while_nothing_is_taken_and_as_vfs_come_one_port_after_the_other() -> None:
    known = numbered(XE9680, taken=PFS)
    waiting = numbered(XE9680, known=known)
    assert (waiting[:4], len(waiting)) == (known, 8)
    assert numbered(XE9680, known=waiting, taken=PFS) == known
    away = numbered(without(XE9680, PFS[0]), known=known)
    assert (away[:4], away[4].number) == (known, 4)
    for count in range(1, 5):
        assert numbered(XE9680, known=known, taken=PFS[-count:]) == known
    growing: tuple[Rail, ...] = ()
    for pf in reversed(PFS):
        growing = numbered(XE9680, known=growing, taken=[*numbers(growing), pf], is_new=True)
    assert growing == known


STORAGE = "0000:02:00.0"
FAR_STORAGE = with_storage(node(vfs=1))
OUT_OF_ORDER = tuple(replace(rail, number=3 - rail.number) for rail in reversed(numbered(FAR_STORAGE, taken=PFS)))


@pytest.mark.parametrize("known", [numbered(FAR_STORAGE, taken=PFS), OUT_OF_ORDER], ids=["by address", "another order"])
@pytest.mark.parametrize("away", [(), PFS[3:], PFS[:1]], ids=["all there", "the last away", "the first away"])
def test_numbers_stay_over_a_boot_in_which_storage_is_there_before_the_vfs(
    known: tuple[Rail, ...], away: tuple[str, ...]
) -> None:
    booted, rails = without(FAR_STORAGE, *away), known
    for vfs in range(5):
        rails = numbered(booted, known=rails, taken=[STORAGE, *(pf for pf in PFS[:vfs] if pf not in away)])
        assert numbers(rails) == numbers(known)
    assert numbered(FAR_STORAGE, known=rails, taken=[STORAGE, *PFS]) == known


def test_a_plane_whose_vfs_come_first_is_of_the_rail_of_the_others() -> None:
    known = numbered(SPLIT, taken=PFS)
    first = [function(pf, 1) for pf in PFS]
    assert keys(numbered(SPLIT, known=known, taken=first)) == PLANES


@pytest.mark.parametrize(("seconds", "restarts", "expected"), [(599.0, False, 0), (600.0, False, 3), (2.0, True, 3)])
def test_numbers_are_final_ten_minutes_after_the_first_and_at_a_restart(
    seconds: float, restarts: bool, expected: int
) -> None:
    resources = (Resource("rdma/hca", "hca", Select(pf=tuple(PfSelector(pf) for pf in PFS))),)
    clock = [1000.0]
    offers = Offers(HealthHistory(), lambda: clock[0])
    for now, away in ((1000.0, PFS[:2]), (1001.0, PFS[:1]), (1000.0 + seconds, ())):
        clock[0] = now
        made = offers.make(resources, without(XE9680, *away), Reading())
        if restarts:
            offers = Offers(HealthHistory(), lambda: clock[0], made.rails)
    assert made.rail_of[PFS[0]] == expected
