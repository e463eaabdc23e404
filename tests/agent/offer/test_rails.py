"""Numbers of rails: which adapters have one, and that it stays the adapter's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agent.cluster.topology.labels import fabric_nics
from agent.health import HealthBook
from agent.model.device import Snapshot
from agent.model.vf_identity import Rail
from agent.offer.books import Reading
from agent.offer.offers import Offers
from agent.offer.rails import rails_of
from agent.offer.selectors import candidates
from agent.placement import Distances
from agent.report.chart.matrix import rails as nearest_nics
from tests.agent.books import open_books
from tests.deviceplugin.machines import change, netdev, node, pci, rdma, without

PFS = ("0000:12:00.0", "0000:22:00.0", "0000:32:00.0", "0000:42:00.0")


def numbered(snapshot: Snapshot, *named: str, known: tuple[Rail, ...] = ()) -> tuple[Rail, ...]:
    return rails_of(snapshot, Distances(snapshot), named, known)


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
    assert [found.device for found in candidates("hca", snapshot)] == list(PFS)
    assert [nic.address for nic in fabric_nics(snapshot)] == list(PFS)
    assert [nic.address for _, nics, _ in nearest_nics(snapshot) for nic in nics] == list(PFS)


def test_a_list_numbers_them_and_one_that_is_not_there_leaves_a_gap() -> None:
    snapshot = node(vfs=1)
    assert numbers(numbered(snapshot, "rail3", "gone0", PFS[0])) == {PFS[3]: 0, PFS[0]: 2}


@pytest.mark.parametrize("named", [(), ("rail0", "rail1", "rail2", "rail3")])
def test_a_number_stays_while_adapters_are_away_and_when_they_come_back(named: tuple[str, ...]) -> None:
    whole = node(vfs=1)
    known = numbered(whole, *named)
    away = without(whole, PFS[1])
    assert numbered(away, *named, known=known) == known
    without_driver = change(whole, PFS[0], netdevs=(), rdma_devices=(), driver=None)
    assert numbered(without_driver, *named, known=known) == known
    assert numbered(whole, *named, known=numbered(away, *named, known=known)) == known


def test_a_number_follows_its_card_to_another_address() -> None:
    whole = node(vfs=1)
    known = numbered(whole)
    renumbered = moved(moved(without(whole, PFS[1]), PFS[2], "0000:31:00.0"), PFS[3], "0000:41:00.0")
    assert {PFS[0]: 0, "0000:31:00.0": 2, "0000:41:00.0": 3}.items() <= numbers(
        numbered(renumbered, known=known)
    ).items()


def test_a_card_that_takes_anothers_place_takes_its_number() -> None:
    whole = node(vfs=1)
    known = numbered(whole)
    replaced = change(whole, PFS[1], rdma_devices=(rdma(1, "b83f:d203:00a0:eeee"),))
    assert numbers(numbered(replaced, known=known)) == numbers(known)
    # In another slot, while a third card is away: it gets what is free.
    other = change(moved(without(whole, PFS[0]), PFS[1], "0000:26:00.0"), "0000:26:00.0", rdma_devices=(rdma(1, "1"),))
    assert numbers(numbered(other, known=known))["0000:26:00.0"] == 0
    # In another slot, and the others are there: they keep theirs.
    assert numbers(numbered(moved(replaced, PFS[1], "0000:48:00.0"), known=known)) == {
        PFS[0]: 0,
        "0000:48:00.0": 1,
        PFS[2]: 2,
        PFS[3]: 3,
    }


def test_all_are_numbered_anew_when_one_more_comes_and_none_is_away() -> None:
    whole = node(vfs=1)
    known = numbered(without(whole, PFS[1]))
    assert numbers(known) == {PFS[0]: 0, PFS[2]: 1, PFS[3]: 2}
    assert numbers(numbered(whole, known=known)) == {pf: n for n, pf in enumerate(PFS)}


def test_a_storage_adapter_is_no_rail_in_place_of_one_that_is_away() -> None:
    whole = with_storage(node(vfs=1))
    known = numbered(whole)
    for gone in PFS:
        reloading = change(whole, gone, netdevs=(), rdma_devices=())
        for away in (without(whole, gone), reloading):
            assert "0000:02:00.0" not in numbers(numbered(away, known=known))
            assert numbers(numbered(away, known=known)) == numbers(known)
            assert numbers(numbered(whole, known=numbered(away, known=known))) == numbers(known)


def test_what_two_cards_have_in_common_tells_nothing() -> None:
    same = (rdma(0, "b83f:d203:00a0:0000"),)
    whole = change(node(vfs=1), PFS[1], rdma_devices=same)
    known = numbered(whole)
    assert numbered(without(whole, PFS[0]), known=known) == known


def test_another_way_to_number_forgets_the_former_one() -> None:
    whole = node(vfs=1)
    listed = numbered(whole, "rail3", "rail2", "rail1", "rail0", known=numbered(whole))
    assert numbers(listed)[PFS[3]] == 0
    assert numbers(numbered(whole, known=listed))[PFS[3]] == 3


def test_offers_have_the_numbers_of_the_books(tmp_path: Path) -> None:
    whole = node(vfs=1)
    with open_books(tmp_path) as books:
        books.keep_rails(numbered(whole))
    with open_books(tmp_path) as books:
        assert books.rails() == numbered(whole)
        offers = Offers(HealthBook(), time.monotonic, books.rails())
    for snapshot in (without(whole, PFS[0]), without(whole, PFS[1]), whole):
        offer = offers.make((), snapshot, Reading())
        assert offer is not None
        assert offer.rail_of[PFS[3]] == 3
        assert offer.with_snapshot(whole).rail_of == offer.rail_of


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
