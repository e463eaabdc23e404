"""What the API server stores in another way than it was sent: amounts written otherwise, and fields it drops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agent.cluster.apiserver import ApiServer
from agent.cluster.slices import FEATURES, PUBLISHING
from hack.sim.cluster.apiserver import ApiServerStandIn
from hack.sim.cluster.dra import gates
from tests.agent.cluster.slice_documents import DOWN, pool, pool_slice, tainted
from tests.agent.cluster.slice_publishing import QUICK, Rig
from tests.awaiting import until


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


async def test_where_nobody_heeds_what_is_dropped_slices_are_published_as_they_come_and_not_written_again(
    server: ApiServerStandIn, api: ApiServer
) -> None:
    server.state.gates -= {gates.TAINTS}

    async with Rig(server, api).running() as rig:
        rig.slices.set((tainted(pool(1)[0], "vf-0", DOWN),))
        await until(lambda: rig.stored())
        await rig.quiet()
        assert rig.writes == 1
