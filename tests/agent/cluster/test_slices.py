"""The publisher of slices against the stand-in for the API server, over real HTTP. Writes are counted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from agent.cluster.apiserver import ApiServer
from agent.cluster.slices import FEATURES, PUBLISHING, remove_all
from hack.sim.cluster.apiserver import ApiServerStandIn, Fault
from hack.sim.cluster.dra import gates
from hack.sim.cluster.kinds import SLICE, Target
from tests.agent.cluster.slice_publishing import DOWN, OURS, QUICK, Rig, pool, pool_slice, tainted
from tests.awaiting import until


async def test_slices_are_published_once_go_with_the_node_and_stay_at_the_end(
    server: ApiServerStandIn, api: ApiServer
) -> None:
    rig = Rig(server, api)
    async with rig.running():
        await rig.publishes(pool(3))
        await rig.quiet()
        assert rig.writes == 3
        assert rig.generations() == [1, 1, 1]
    assert len(rig.stored()) == 3
    node, stored = server.state.get("Node", "n"), server.state.get("ResourceSlice", "0")
    assert node is not None
    assert stored is not None
    (owner,) = stored["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Node", node["metadata"]["uid"])


async def test_an_agent_that_starts_writes_nothing_that_is_there_and_deletes_nothing_before_it_knows(
    server: ApiServerStandIn, api: ApiServer
) -> None:
    async with Rig(server, api).running() as rig:
        await rig.publishes(pool(3))
    async with Rig(server, api).running() as rig:
        await until(lambda: server.state.counts.watches == 2)
        await rig.quiet()
        rig.slices.set(pool(3))
        await rig.quiet()
        assert (rig.writes, len(rig.stored())) == (3, 3)
        rig.slices.set(())
        await until(lambda: not rig.stored())


async def test_as_little_is_written_as_the_scheduler_allows(server: ApiServerStandIn, api: ApiServer) -> None:
    async with Rig(server, api).running() as rig:
        await rig.publishes(pool(3))
        await rig.publishes((pool_slice(0, 3, ["vf-9"]), *pool(3)[1:]))
        server.state.delete("ResourceSlice", "1")
        await until(lambda: len(rig.stored()) == 3)
        found = server.state.get("ResourceSlice", "2")
        assert found is not None
        found["spec"]["devices"] = []
        server.state.write("ResourceSlice", "2", found, "somebody")
        await until(lambda: rig.stored()["2"]["devices"])
        await rig.quiet()
        assert (rig.writes, rig.generations()) == (3 + 1 + 1 + 1, [1, 1, 1])
        await rig.publishes((pool(3)[0], pool_slice(1, 3, ["vf-8"]), pool(3)[2]))
        await until(lambda: rig.generations() == [2, 2, 2])
        await rig.publishes(pool(2))
        await until(lambda: rig.generations() == [3, 3])
        await rig.quiet()
        assert (rig.writes, server.state.counts.deletes) == (6 + 3 + 2, 1 + 1)


async def test_changes_that_come_together_are_written_together(server: ApiServerStandIn, api: ApiServer) -> None:
    async with Rig(server, api, replace(QUICK, structure=0.5)).stepping() as rig:
        rig.slices.set(pool(1))
        await rig.watched(0)
        await rig.publisher.step(0.0)
        for number in range(20):
            rig.slices.set((pool_slice(0, 1, ["vf-0", f"vf-{number + 1}"]),))
            assert await rig.publisher.step(10 + number / 100) == 10.5
        assert rig.writes == 1
        await rig.publisher.step(10.5)
        assert rig.stored()["0"]["devices"][-1]["name"] == "vf-20"
        assert await rig.publisher.step(10.5) == math.inf
        assert rig.writes == 2


async def test_a_fault_waits_less_than_another_structure_and_faults_of_links_are_spread(
    server: ApiServerStandIn, api: ApiServer
) -> None:
    async with Rig(server, api, replace(QUICK, structure=600.0, link_jitter=600.0)).running() as rig:
        await rig.publishes(pool(1))
        rig.publisher.chance = lambda: 1.0
        rig.slices.set((tainted(pool(1)[0], "vf-0", DOWN),))
        await rig.quiet()
        rig.slices.set((tainted(pool(1)[0], "vf-0", {**DOWN, "key": "nodefabric.io/Quarantined"}),))
        await until(lambda: rig.writes == 2)


async def test_taints_keep_their_time_through_writes_and_through_a_wipe(
    server: ApiServerStandIn, api: ApiServer
) -> None:
    async with Rig(server, api).running() as rig:
        server.state.now = lambda: "2026-01-01T00:00:00Z"
        rig.slices.set((tainted(pool(1)[0], "vf-0", DOWN),))
        await until(lambda: rig.stored())
        server.state.now = lambda: "2026-01-01T00:05:00Z"
        grown = tainted(pool_slice(0, 1, ["vf-0", "vf-1"]), "vf-0", DOWN)
        rig.slices.set((tainted(grown, "vf-1", DOWN),))
        await until(lambda: len(rig.stored()["0"]["devices"]) == 2)
        times = ["2026-01-01T00:00:00Z", "2026-01-01T00:05:00Z"]
        assert [d["taints"][0]["timeAdded"] for d in rig.stored()["0"]["devices"]] == times
        server.state.now = lambda: "2026-01-01T00:09:00Z"
        server.state.delete_collection(Target(SLICE), {"spec.nodeName": "n"})
        await until(lambda: rig.stored())
        assert [d["taints"][0]["timeAdded"] for d in rig.stored()["0"]["devices"]] == times
        await rig.quiet()


async def test_kubelets_wipe_is_healed_by_one_write_a_slice_a_second_after_it_began(
    server: ApiServerStandIn, api: ApiServer
) -> None:
    async with Rig(server, api, replace(QUICK, heal=1.0)).stepping() as rig:
        rig.slices.set(pool(5))
        await rig.watched(0)
        await rig.publisher.step(0.0)
        await rig.watched(5)
        assert await rig.publisher.step(0.0) == math.inf
        for number, name in enumerate(rig.stored()):  # one after the other, as kubelet does
            server.state.delete("ResourceSlice", name)
            await rig.watched(4 - number)
            assert await rig.publisher.step(10 + number / 100) == 11
        assert rig.writes == 5
        await rig.publisher.step(11)
        assert rig.writes == 10
        assert rig.generations() == [1] * 5
        assert await rig.publisher.step(11) == math.inf
        assert rig.writes == 10
        told = [(event.kind, event.subject, event.text) for event in rig.events.listed()]
        assert told == [("reconcile", "slices-rewritten", "changed-by-others")]
        assert rig.published.value == 5


async def test_a_publisher_that_is_begun_again_follows_the_slices_again(
    server: ApiServerStandIn, api: ApiServer
) -> None:
    rig = Rig(server, api)
    for _ in range(2):
        async with rig.running():
            await rig.publishes(pool(2))
            server.state.delete("ResourceSlice", "1")
            await until(lambda: len(rig.stored()) == 2)
    assert server.state.counts.applies == 2 + 1 + 1


async def test_slices_of_other_drivers_and_nodes_are_let_be_also_by_an_uninstall(
    server: ApiServerStandIn, api: ApiServer
) -> None:
    for name, driver, node in (("gpu", "gpu.nvidia.com", "n"), ("far", "nodefabric.io", "m")):
        document = pool_slice(0, 1, ["x"])
        document["spec"] |= {"driver": driver, "nodeName": node, "pool": {"name": node, "resourceSliceCount": 1}}
        server.state.write("ResourceSlice", name, document, "other")

    async with Rig(server, api).running() as rig:
        await rig.publishes(pool(3))
        rig.slices.set(pool(2))
        await until(lambda: len(rig.stored()) == 2)
    assert remove_all(api, OURS) == 2
    assert remove_all(api, OURS) == 0
    assert [server.state.get("ResourceSlice", name) is None for name in ("gpu", "far")] == [False, False]


def allocatable(server: ApiServerStandIn, amount: str) -> None:
    """Have the Node say so much of what a device plugin offers."""
    node = server.state.get("Node", "n")
    assert node is not None
    node["status"]["allocatable"] = {"rdma/vf": amount}
    server.state.write("Node", "n", node, "kubelet")


async def test_a_resource_is_published_once_no_plugin_offers_it_any_more(
    server: ApiServerStandIn, api: ApiServer
) -> None:
    allocatable(server, "4")
    async with Rig(server, api, replace(QUICK, released=600.0)).running() as rig:
        await rig.publishes(pool(1, "rdma/other"))  # which no plugin offers
        rig.slices.set(pool(1))
        await rig.quiet()
        assert rig.writes == 1
        allocatable(server, "0")
        await until(lambda: rig.writes == 2)
        allocatable(server, "3")  # a resource that is published is not taken back
        await rig.publishes(pool(2))


async def test_a_resource_that_a_plugin_goes_on_to_offer_is_published_after_a_while(
    server: ApiServerStandIn, api: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    allocatable(server, "4")
    async with Rig(server, api).running() as rig:
        await rig.publishes(pool(1))
    assert "rdma/vf by a device plugin" in caplog.text


async def test_a_server_that_is_away_is_said_and_waited_for(server: ApiServerStandIn, api: ApiServer) -> None:
    async with Rig(server, api).running() as rig:
        await rig.publishes(pool(2))
        server.state.set_fault(Fault(status=503))
        rig.slices.set((pool_slice(0, 2, ["vf-9"]), pool(2)[1]))
        await until(lambda: "503" in rig.conditions.found.get(PUBLISHING, ""))
        await until(lambda: server.state.counts.failures > 3)
        assert rig.published.value == 1
        server.state.set_fault(None)
        await until(lambda: rig.stored()["0"]["devices"][0]["name"] == "vf-9")
        await until(lambda: PUBLISHING not in rig.conditions.found)
        assert rig.writes == 3


async def test_a_batch_that_the_server_broke_off_is_gone_on_with(server: ApiServerStandIn, api: ApiServer) -> None:
    async with Rig(server, api).running() as rig:
        server.state.set_fault(Fault(drop=True, path="/apis/resource.k8s.io/v1/resourceslices/2"))
        rig.slices.set(pool(4))
        await until(lambda: server.state.counts.failures > 2)
        server.state.set_fault(None)
        await until(lambda: len(rig.stored()) == 4)
        await rig.quiet()
        assert rig.generations() == [1] * 4
        assert rig.writes == 4


async def test_a_node_that_was_removed_and_has_come_back_owns_its_slices_anew(
    server: ApiServerStandIn, api: ApiServer
) -> None:
    async with Rig(server, api).running() as rig:
        await rig.publishes(pool(2))
        server.state.delete("Node", "n")
        uid = server.state.add_node("n")
        server.state.delete_collection(Target(SLICE), {"spec.nodeName": "n"})  # the garbage collector
        await until(lambda: len(rig.stored()) == 2)
        await rig.quiet()
        for name in ("0", "1"):
            found = server.state.get("ResourceSlice", name)
            assert found is not None
            assert [one["uid"] for one in found["metadata"]["ownerReferences"]] == [uid]


async def test_amounts_that_the_server_writes_in_its_own_way_are_not_written_again_and_again(
    server: ApiServerStandIn, api: ApiServer
) -> None:
    async with Rig(server, api).running() as rig:
        document = pool_slice(0, 1, ["hca-1"])
        document["spec"]["devices"][0]["capacity"] = {"nodefabric.io/shares": {"value": "1000"}}
        rig.slices.set((document,))
        await until(lambda: rig.stored())
        found = server.state.get("ResourceSlice", "0")
        assert found is not None
        assert found["spec"]["devices"][0]["capacity"]["nodefabric.io/shares"]["value"] == "1k"
        await rig.quiet()
        assert rig.writes == 1


@pytest.mark.parametrize(
    ("gate", "word", "more"),
    [
        (gates.TAINTS, "taints", {"taints": [dict(DOWN)]}),
        (gates.CAPACITY, "capacity", {"allowMultipleAllocations": True}),
        (gates.LISTS, "listAttributes", {"attributes": {"gpu.nvidia.com/uuid": {"strings": ["GPU-1", "GPU-2"]}}}),
    ],
)
async def test_what_the_cluster_drops_is_noticed_and_said_and_the_slices_that_come_of_it_are_written_at_once(
    server: ApiServerStandIn, api: ApiServer, gate: str, word: str, more: dict[str, Any]
) -> None:
    server.state.gates -= {gate}

    async with Rig(server, api, replace(QUICK, structure=20.0)).running() as rig:
        rich = pool_slice(0, 1, ["vf-0", "vf-1"])
        rich["spec"]["devices"][0] |= more
        rig.slices.set((rich,))
        await until(lambda: rig.dropped.value)
        assert rig.dropped.value == {word}
        await rig.publishes(pool(1))
        await rig.quiet()
        assert gate in rig.conditions.found[FEATURES]
        assert PUBLISHING not in rig.conditions.found
        assert rig.writes == (1 if word == "listAttributes" else 2)


async def test_of_a_pool_that_the_cluster_drops_a_part_of_the_rest_is_not_written(
    server: ApiServerStandIn, api: ApiServer
) -> None:
    """The scheduler takes nothing of a pool whose slices are not all there: nobody sees devices without shares."""
    server.state.gates -= {gates.CAPACITY}

    async with Rig(server, api, replace(QUICK, structure=20.0)).running() as rig:
        rich = [pool_slice(number, 3, [f"hca-{number}"]) for number in range(3)]
        for document in rich:
            document["spec"]["devices"][0]["allowMultipleAllocations"] = True
        rig.slices.set(tuple(rich))
        await until(lambda: rig.dropped.value)
        await rig.publishes(pool(2))
        await rig.quiet()
        assert rig.writes == 1 + 2
