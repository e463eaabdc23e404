"""The publisher of slices against the stand-in for the API server, over real HTTP. Writes are counted."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest

from agent.cluster.slices import PUBLISHING, remove_all
from hack.sim.cluster.apiserver import ApiServerStandIn, Fault
from hack.sim.cluster.kinds import SLICE, Target
from tests.agent.cluster.slice_documents import DOWN, pool, pool_slice, tainted
from tests.agent.cluster.slice_publishing import OURS, QUICK, Rig, play, step
from tests.agent.cluster.slice_publishing import server as server  # the fixture
from tests.awaiting import until


def test_slices_are_published_once_go_with_the_node_and_stay_at_the_end(
    server: ApiServerStandIn, tmp_path: Path
) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.publishes(pool(3))
        await rig.quiet()
        assert rig.writes == 3
        assert rig.generations() == [1, 1, 1]

    rig = Rig(server, tmp_path)
    play(rig, scenario)
    assert len(rig.stored()) == 3
    node, stored = server.state.get("Node", "n"), server.state.get("ResourceSlice", "0")
    assert node is not None
    assert stored is not None
    (owner,) = stored["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Node", node["metadata"]["uid"])


def test_an_agent_that_starts_anew_writes_nothing_that_is_there(server: ApiServerStandIn, tmp_path: Path) -> None:
    play(Rig(server, tmp_path), lambda rig: rig.publishes(pool(3)))

    async def scenario(rig: Rig) -> None:
        rig.slices.set(pool(3))
        await until(lambda: server.state.counts.watches == 2)
        await rig.quiet()

    play(Rig(server, tmp_path), scenario)
    assert server.state.counts.applies == 3


def test_as_long_as_it_is_not_known_what_there_should_be_nothing_is_deleted(
    server: ApiServerStandIn, tmp_path: Path
) -> None:
    play(Rig(server, tmp_path), lambda rig: rig.publishes(pool(2)))

    async def scenario(rig: Rig) -> None:
        await until(lambda: server.state.counts.watches == 2)
        await rig.quiet()
        assert len(rig.stored()) == 2
        rig.slices.set(())
        await until(lambda: not rig.stored())

    play(Rig(server, tmp_path), scenario)


def test_one_slice_that_changes_is_one_write_of_the_same_generation(server: ApiServerStandIn, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.publishes(pool(3))
        await rig.publishes((pool_slice(0, 3, ["vf-9"]), *pool(3)[1:]))
        await rig.quiet()
        assert rig.writes == 4
        assert rig.generations() == [1, 1, 1]

    play(Rig(server, tmp_path), scenario)


def test_several_that_change_and_another_number_are_new_generations_of_all(
    server: ApiServerStandIn, tmp_path: Path
) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.publishes(pool(3))
        await rig.publishes((pool_slice(0, 3, ["vf-8"]), pool_slice(1, 3, ["vf-9"]), pool(3)[2]))
        await until(lambda: rig.generations() == [2, 2, 2])
        await rig.publishes(pool(2))
        await until(lambda: rig.generations() == [3, 3])
        await rig.quiet()
        assert (rig.writes, server.state.counts.deletes) == (3 + 3 + 2, 1)

    play(Rig(server, tmp_path), scenario)


def test_changes_that_come_together_are_written_together(server: ApiServerStandIn, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
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

    step(Rig(server, tmp_path, replace(QUICK, structure=0.5)), scenario)


def test_a_fault_waits_less_than_another_structure(server: ApiServerStandIn, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.publishes(pool(1))
        rig.slices.set((tainted(pool(1)[0], "vf-0", DOWN),))
        await until(lambda: rig.stored()["0"]["devices"][0].get("taints"))
        assert rig.writes == 2

    play(Rig(server, tmp_path, replace(QUICK, structure=600.0)), scenario)


def test_faults_of_links_are_spread(server: ApiServerStandIn, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.publishes(pool(1))
        rig.publisher._chance = lambda: 1.0
        rig.slices.set((tainted(pool(1)[0], "vf-0", DOWN),))
        await rig.quiet()
        rig.slices.set((tainted(pool(1)[0], "vf-0", {**DOWN, "key": "nodefabric.io/Quarantined"}),))
        await until(lambda: rig.writes == 2)

    play(Rig(server, tmp_path, replace(QUICK, link_jitter=600.0)), scenario)


def test_taints_keep_their_time_through_writes_and_through_a_wipe(server: ApiServerStandIn, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
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

    play(Rig(server, tmp_path), scenario)


def test_kubelets_wipe_is_healed_by_one_write_a_slice_a_second_after_it_began(
    server: ApiServerStandIn, tmp_path: Path
) -> None:
    async def scenario(rig: Rig) -> None:
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

    step(Rig(server, tmp_path, replace(QUICK, heal=1.0)), scenario)


def test_a_publisher_that_is_begun_again_follows_the_slices_anew(server: ApiServerStandIn, tmp_path: Path) -> None:
    async def twice(rig: Rig) -> None:
        for _ in range(2):
            running = asyncio.create_task(rig.publisher.run())
            await rig.publishes(pool(2))
            server.state.delete("ResourceSlice", "1")
            await until(lambda: len(rig.stored()) == 2)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        rig.api.close()

    asyncio.run(twice(Rig(server, tmp_path)))
    assert server.state.counts.applies == 2 + 1 + 1


def test_one_slice_that_is_taken_away_is_one_write(server: ApiServerStandIn, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.publishes(pool(3))
        server.state.delete("ResourceSlice", "1")
        await until(lambda: len(rig.stored()) == 3)
        await rig.quiet()
        assert rig.writes == 4

    play(Rig(server, tmp_path), scenario)


def test_what_somebody_else_changed_is_put_right(server: ApiServerStandIn, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.publishes(pool(1))
        found = server.state.get("ResourceSlice", "0")
        assert found is not None
        found["spec"]["devices"] = []
        server.state.write("ResourceSlice", "0", found, "somebody")
        await until(lambda: rig.stored()["0"]["devices"])
        await rig.quiet()
        assert rig.writes == 2

    play(Rig(server, tmp_path), scenario)


def test_slices_of_other_drivers_and_nodes_are_let_be(server: ApiServerStandIn, tmp_path: Path) -> None:
    for name, driver, node in (("gpu", "gpu.nvidia.com", "n"), ("far", "nodefabric.io", "m")):
        document = pool_slice(0, 1, ["x"])
        document["spec"] |= {"driver": driver, "nodeName": node, "pool": {"name": node, "resourceSliceCount": 1}}
        server.state.write("ResourceSlice", name, document, "other")

    async def scenario(rig: Rig) -> None:
        await rig.publishes(pool(1))
        rig.slices.set(())
        await until(lambda: not rig.stored())

    play(Rig(server, tmp_path), scenario)
    assert [server.state.get("ResourceSlice", name) is None for name in ("gpu", "far")] == [False, False]


def test_a_resource_is_published_once_no_plugin_offers_it_any_more(server: ApiServerStandIn, tmp_path: Path) -> None:
    def allocatable(amount: str) -> None:
        node = server.state.get("Node", "n")
        assert node is not None
        node["status"]["allocatable"] = {"rdma/vf": amount}
        server.state.write("Node", "n", node, "kubelet")

    async def scenario(rig: Rig) -> None:
        await rig.publishes(pool(1, "rdma/other"))  # which no plugin offers
        rig.slices.set(pool(1))
        await rig.quiet()
        assert rig.writes == 1
        allocatable("0")
        await until(lambda: rig.writes == 2)
        allocatable("3")  # a resource that is published is not taken back
        await rig.publishes(pool(2))

    allocatable("4")
    play(Rig(server, tmp_path, replace(QUICK, released=600.0)), scenario)


def test_a_resource_that_a_plugin_goes_on_to_offer_is_published_after_a_while(
    server: ApiServerStandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = server.state.get("Node", "n")
    assert node is not None
    node["status"]["allocatable"] = {"rdma/vf": "4"}
    server.state.write("Node", "n", node, "kubelet")
    play(Rig(server, tmp_path), lambda rig: rig.publishes(pool(1)))
    assert "rdma/vf by a device plugin" in caplog.text


def test_a_server_that_is_away_is_said_and_waited_for(server: ApiServerStandIn, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.publishes(pool(2))
        server.state.set_fault(Fault(status=503))
        rig.slices.set((pool_slice(0, 2, ["vf-9"]), pool(2)[1]))
        await until(lambda: "503" in rig.conditions.found.get(PUBLISHING, ""))
        await until(lambda: server.state.counts.failures > 3)
        server.state.set_fault(None)
        await until(lambda: rig.stored()["0"]["devices"][0]["name"] == "vf-9")
        await until(lambda: PUBLISHING not in rig.conditions.found)
        assert rig.writes == 3

    play(Rig(server, tmp_path), scenario)


def test_a_batch_that_the_server_broke_off_is_gone_on_with(server: ApiServerStandIn, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        server.state.set_fault(Fault(drop=True, path="/apis/resource.k8s.io/v1/resourceslices/2"))
        rig.slices.set(pool(4))
        await until(lambda: server.state.counts.failures > 2)
        server.state.set_fault(None)
        await until(lambda: len(rig.stored()) == 4)
        await rig.quiet()
        assert rig.generations() == [1] * 4
        assert rig.writes == 4

    play(Rig(server, tmp_path), scenario)


def test_a_node_that_was_removed_and_has_come_back_owns_its_slices_anew(
    server: ApiServerStandIn, tmp_path: Path
) -> None:
    async def scenario(rig: Rig) -> None:
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

    play(Rig(server, tmp_path), scenario)


def test_uninstalling_takes_our_slices_of_the_node_and_no_others(server: ApiServerStandIn, tmp_path: Path) -> None:
    rig = Rig(server, tmp_path)
    for name, driver in (("a", "nodefabric.io"), ("b", "nodefabric.io"), ("gpu", "gpu.nvidia.com")):
        document = pool_slice(0, 1, ["x"])
        document["spec"]["driver"] = driver
        server.state.write("ResourceSlice", name, document, "other")
    assert remove_all(rig.api, OURS) == 2
    assert remove_all(rig.api, OURS) == 0
    assert server.state.get("ResourceSlice", "gpu") is not None
    rig.api.close()
