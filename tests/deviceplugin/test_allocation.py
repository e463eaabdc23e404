"""What Allocate answers, records, and refuses."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from agent.errors import UnitUnhealthy
from agent.model.device import CharDevice, Snapshot
from agent.offer.selection import assign
from agent.offer.units import Inputs, Reading, make_offer, plain_offer
from tests.deviceplugin.desk import GPU, HCA, VF, Desk, desk
from tests.node import change, gpu_uuid, netdev, node

RESOURCES = (HCA, VF, GPU)


def offer(d: Desk, snapshot: Snapshot) -> None:
    d.allocator.offer.set(plain_offer(RESOURCES, snapshot))


def allocate(d: Desk, resource: str, *unit_ids: str) -> None:
    asyncio.run(d.allocator.allocate(resource, [unit_ids]))


def test_several_containers_are_answered_one_by_one() -> None:
    with desk(*RESOURCES) as d:
        asked = [["0000:12:00.1"], [], ["0000:22:00.1", "0000:22:00.2"]]
        answers = asyncio.run(d.allocator.allocate("rdma/vf", asked))
        told = [dict(a.envs).get("PCIDEVICE_RDMA_VF") for a in answers]
        assert told == ["0000:12:00.1", None, "0000:22:00.1,0000:22:00.2"]
        assert [(hold.key, hold.resource_name, hold.devices, hold.pod) for hold in d.books.holds] == [
            (vf, "rdma/vf", (vf,), None) for vf in ("0000:12:00.1", "0000:22:00.1", "0000:22:00.2")
        ]


def test_the_verbs_node_of_the_last_answer_about_a_device_is_remembered() -> None:
    of_pf = node().by_address["0000:12:00.0"].rdma_devices
    with desk(*RESOURCES) as d:
        for number in (5, 8):
            verbs = CharDevice("uverbs", f"/dev/infiniband/uverbs{number}")
            offer(d, change(node(), "0000:12:00.1", rdma_devices=(replace(of_pf[0], char_devices=(verbs,)),)))
            allocate(d, "rdma/vf", "0000:12:00.1")
            assert d.allocator.verbs_nodes == {"0000:12:00.1": verbs.path}
        offer(d, node())
        allocate(d, "rdma/vf", "0000:12:00.1")
        assert d.allocator.verbs_nodes == {}


def test_a_share_is_refused_that_a_claim_still_has_in_its_place() -> None:
    with desk(*RESOURCES) as d:
        inputs = Inputs(RESOURCES, node(), assign(RESOURCES, node()), Reading(shares_claimed={"0000:22:00.0": 1}))
        d.allocator.offer.set(make_offer(inputs))
        with pytest.raises(UnitUnhealthy, match=r"claims still have as many shares of 0000:22:00\.0"):
            allocate(d, "rdma/hca", "hca-b83fd20300a00001-1")
        allocate(d, "rdma/hca", "hca-b83fd20300a00001-0")
        assert [hold.key for hold in d.books.holds] == ["hca-b83fd20300a00001-0"]


def test_a_link_that_is_down_does_not_fail_the_pod_for_good() -> None:
    with desk(*RESOURCES) as d:
        offer(d, change(node(), "0000:12:00.0", netdevs=(netdev("rail0", carrier=False),), rdma_devices=()))
        assert not d.allocator.offer.value.by_id["0000:12:00.1"].health.healthy
        allocate(d, "rdma/vf", "0000:12:00.1")
        assert len(d.books.holds) == 1


@pytest.mark.parametrize("later", [0, 6])
def test_a_grant_draws_only_one_partner_of_a_kind_and_an_old_one_none(later: float) -> None:
    with desk(*RESOURCES) as d:
        allocate(d, "nvidia.com/gpu", gpu_uuid(3))
        if not later:
            allocate(d, "rdma/vf", "0000:42:00.1")
        d.clock.now += later
        d.used.add("0000:42:00.1")
        # The GPU of the third rail is free and alone on its socket: another container's turn.
        assert d.prefer(VF) == ("0000:32:00.1",)
