from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from agent.errors import UnitUnhealthy
from agent.ledger import Ledger
from agent.model.device import CharDevice, Snapshot
from agent.offer.offer import Offer
from agent.offer.selection import assign
from agent.offer.units import Inputs, Reading, make_offer, plain_offer
from agent.state import Latest
from deviceplugin.allocation import Allocator
from tests.deviceplugin.desk import Clock
from tests.deviceplugin.rig import RESOURCES
from tests.node import change, gpu_uuid, netdev, node


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger.open(tmp_path / "ledger.db", "boot")
    with contextlib.closing(ledger):
        yield ledger


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def allocator(ledger: Ledger, clock: Clock) -> Iterator[Allocator]:
    with contextlib.closing(Allocator(Latest(Offer()), ledger.grant, lambda unit: None, clock)) as allocator:
        allocator.offer.set(offer(node()))
        yield allocator


def offer(snapshot: Snapshot, quarantined: Mapping[str, str] | None = None) -> Offer:
    return plain_offer(RESOURCES, snapshot, quarantined or {})


def allocate(allocator: Allocator, resource: str, *unit_ids: str) -> object:
    return asyncio.run(allocator.allocate(resource, [unit_ids]))


def everything(allocator: Allocator, resource: str) -> list[str]:
    return [u.unit_id for u in allocator.offer.value.units[resource]]


def test_several_containers_are_answered_one_by_one(allocator: Allocator, ledger: Ledger) -> None:
    answers = asyncio.run(allocator.allocate("rdma/vf", [["0000:12:00.1"], [], ["0000:22:00.1", "0000:22:00.2"]]))
    assert [dict(a.envs).get("PCIDEVICE_RDMA_VF") for a in answers] == [
        "0000:12:00.1",
        None,
        "0000:22:00.1,0000:22:00.2",
    ]
    assert [(hold.key, hold.resource_name, hold.devices, hold.pod) for hold in ledger.holds()] == [
        (vf, "rdma/vf", (vf,), None) for vf in ("0000:12:00.1", "0000:22:00.1", "0000:22:00.2")
    ]


def test_the_verbs_node_of_the_last_answer_about_a_device_is_remembered(allocator: Allocator) -> None:
    of_pf = node().by_address["0000:12:00.0"].rdma_devices
    for number in (5, 8):
        verbs = CharDevice("uverbs", f"/dev/infiniband/uverbs{number}")
        with_rdma = change(node(), "0000:12:00.1", rdma_devices=(replace(of_pf[0], char_devices=(verbs,)),))
        allocator.offer.set(offer(with_rdma))
        allocate(allocator, "rdma/vf", "0000:12:00.1")
        assert allocator.verbs_nodes == {"0000:12:00.1": verbs.path}
    allocator.offer.set(offer(node()))
    allocate(allocator, "rdma/vf", "0000:12:00.1")
    assert allocator.verbs_nodes == {}


def test_a_share_is_refused_that_a_claim_still_has_in_its_place(allocator: Allocator, ledger: Ledger) -> None:
    natural = assign(RESOURCES, node())
    allocator.offer.set(make_offer(Inputs(RESOURCES, node(), natural, Reading(shares_claimed={"0000:22:00.0": 3}))))
    with pytest.raises(UnitUnhealthy, match=r"claims still have as many shares of 0000:22:00\.0"):
        allocate(allocator, "rdma/hca", "hca-b83fd20300a00001-1")
    allocate(allocator, "rdma/hca", "hca-b83fd20300a00001-0")
    assert [hold.key for hold in ledger.holds()] == ["hca-b83fd20300a00001-0"]


def test_a_link_that_is_down_does_not_fail_the_pod_for_good(allocator: Allocator, ledger: Ledger) -> None:
    down = change(node(), "0000:12:00.0", netdevs=(netdev("rail0", carrier=False),), rdma_devices=())
    allocator.offer.set(offer(down))
    assert not allocator.offer.value.by_id["0000:12:00.1"].health.healthy
    allocate(allocator, "rdma/vf", "0000:12:00.1")
    assert len(ledger.holds()) == 1


@pytest.mark.parametrize("later", [0, 6])
def test_a_grant_draws_only_one_partner_of_a_kind_and_an_old_one_none(
    allocator: Allocator, clock: Clock, later: float
) -> None:
    allocate(allocator, "nvidia.com/gpu", gpu_uuid(3))
    if not later:
        allocate(allocator, "rdma/vf", "0000:42:00.1")
    clock.now += later
    free = [i for i in everything(allocator, "rdma/vf") if i != "0000:42:00.1"]
    # The GPU of the third rail is free and alone on its socket: another container's turn.
    assert allocator.prefer("rdma/vf", free, (), 1) == ("0000:32:00.1",)
