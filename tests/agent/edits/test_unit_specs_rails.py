"""The CDI specs of rails, which have the files of several NICs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent.config.resources import RailNic
from agent.edits.build import unit_specs
from agent.kubelet.checkpoint import Entry
from agent.model.allocation import Undo
from agent.offer.units import plain_offer
from tests.agent import books
from tests.agent.edits.unit_specs_rig import RAIL, Rig, opened, permuted
from tests.deviceplugin.machines import gpu_uuid, node, without


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with opened(tmp_path) as made:
        yield made


SEVERAL = replace(RAIL, nic=RailNic("hca", shares=2, count=2), environment=("nccl",))


def of_several(rig: Rig) -> tuple[str, tuple[str, ...]]:
    """Grant the rail of the first GPU, and return it with its NICs."""
    rig.resources = (SEVERAL,)
    unit = f"rail-{gpu_uuid(0)}"
    offer = plain_offer(rig.resources, node())
    found = offer.find(SEVERAL.name, unit)
    assert found is not None
    rig.specs.grant(SEVERAL.name, {unit: found.devices}, unit_specs(SEVERAL, [found], offer.snapshot))
    return unit, found.devices


def uverbs(rig: Rig, unit: str) -> list[str]:
    return [path for path in rig.files(unit) if "uverbs" in path]


def test_the_spec_of_a_rail_has_the_files_of_all_its_nics_and_follows_each(rig: Rig) -> None:
    unit, nics = of_several(rig)
    assert nics == ("0000:12:00.0", "0000:22:00.0")
    assert uverbs(rig, unit) == ["/dev/infiniband/uverbs0", "/dev/infiniband/uverbs1"]
    assert "NCCL_IB_HCA==mlx5_0,mlx5_1" in rig.said(unit)["env"]
    rig.renew(permuted(node()))
    assert uverbs(rig, unit) == ["/dev/infiniband/uverbs1", "/dev/infiniband/uverbs2"]
    assert rig.specs.rewrite() == []


def test_a_rail_keeps_all_the_nics_that_it_was_granted_with(rig: Rig) -> None:
    unit, _ = of_several(rig)
    rig.ledger.move_grants({unit: ("0000:22:00.0", "0000:42:00.0")})
    rig.renew(replace(node(), generation=9))
    assert uverbs(rig, unit) == ["/dev/infiniband/uverbs1", "/dev/infiniband/uverbs3"]


@pytest.mark.parametrize("position", range(2))
def test_a_rail_that_misses_one_of_its_nics_has_no_spec_until_it_is_back(rig: Rig, position: int) -> None:
    unit, nics = of_several(rig)
    rig.renew(without(node(), nics[position]))
    assert rig.there() == set()
    rig.renew(replace(node(), generation=9))
    assert len(uverbs(rig, unit)) == 2


def test_lost_books_say_the_files_of_all_nics_again(rig: Rig) -> None:
    unit, nics = of_several(rig)
    said = rig.said(unit)
    rig.ledger.release([unit])
    rig.ledger.grant(SEVERAL.name, {unit: nics})
    offer = plain_offer(rig.resources, node())
    rig.specs.adopt([Entry("uid", "main", SEVERAL.name, (unit,), "")], offer, rig.resources)
    assert rig.said(unit) == said


def test_a_nic_that_has_got_files_on_its_way_into_the_pod_keeps_these_beside_the_others(rig: Rig) -> None:
    unit, nics = of_several(rig)
    rig.ledger.begin_attach(
        books.owner(),
        ifname="net1",
        device=nics[0],
        resource_name=SEVERAL.name,
        undo=Undo("x", "02:00:00:00:01:00", 1500, False, rdma="mlx5_50"),
        netns_path="/nowhere",
        request={},
    )
    rig.renew(permuted(node()))
    assert uverbs(rig, unit) == ["/dev/infiniband/uverbs0", "/dev/infiniband/uverbs2"]
