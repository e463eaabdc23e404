"""Claims and sandboxes in their order: Prepare, ADD, containers; DEL, Unprepare, and the late DELs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from agent.errors import AgentError
from agent.model.allocation import ClaimRef
from deviceplugin.dra.server import PreparedDevice
from hack.sim.pods import UsedClaim
from tests.awaiting import until
from tests.sim.dra.dummy import DummyClaims
from tests.sim.dra.rig import NIC_DRIVER, QUICK, Node, node, pod
from tests.sim.test_kubelet_runtime import calls, recorders

pytestmark = pytest.mark.usefixtures("own_network")
NIC = ("nic", NIC_DRIVER, "vf-1")


class Recorded(DummyClaims):
    """A driver that notes its calls in the file in which the CNI plugin notes its own."""

    def __init__(self, node: Node) -> None:
        super().__init__(NIC_DRIVER, node.cluster.claim)
        self.refusals = 0
        """So many of the next Unprepares fail."""
        self._file = node.folder / "calls"

    def prepare(self, ref: ClaimRef) -> Sequence[PreparedDevice]:
        self._note("prepare")
        return super().prepare(ref)

    def unprepare(self, ref: ClaimRef) -> None:
        self._note("unprepare")
        if self.refusals:
            self.refusals -= 1
            raise AgentError("the sandbox still lives")
        super().unprepare(ref)

    def _note(self, command: str) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"command": command, "netns": ""}) + "\n")


def played(n: Node) -> list[str]:
    """The commands in their order; a DEL without a namespace is `late`."""
    return ["late" if c["command"] == "DEL" and not c["netns"] else c["command"] for c in calls(n.folder)]


def plugged(n: Node) -> None:
    n.kubelet._life._runner = recorders(n.folder, "only")


async def recorded(n: Node) -> Recorded:
    plugged(n)
    driver = n.drivers[NIC_DRIVER] = Recorded(n)
    await n.serve(NIC_DRIVER)
    n.cluster.allocate("claim", NIC, users=["uid-of-p"])
    return driver


def test_a_claim_is_prepared_before_add_and_ended_after_del() -> None:
    async def work() -> list[str]:
        async with node() as n:
            await recorded(n)
            running = await n.running(pod("p", "claim", UsedClaim("rails")))
            assert played(n) == ["prepare", "ADD"]
            assert running.timings.keys() >= {"prepare", "add"}
            await n.kubelet.delete("default/p")
            return played(n)

    assert asyncio.run(work()) == ["prepare", "ADD", "DEL", "unprepare", "late", "late"]


def test_a_failed_add_is_deleted_and_tried_again_without_another_prepare() -> None:
    async def work() -> list[str]:
        async with node() as n:
            await recorded(n)
            (n.folder / "fail").write_text("1\n")
            await n.running(pod("p", "claim"))
            return played(n)

    assert asyncio.run(work()) == ["prepare", "ADD", "DEL", "ADD"]


def test_a_failed_unprepare_is_tried_again_with_another_del_each_time() -> None:
    async def work() -> list[str]:
        async with node() as n:
            driver = await recorded(n)
            driver.refusals = 2
            running = await n.running(pod("p", "claim"))
            ending = n.kubelet.delete("default/p")
            await until(lambda: "the sandbox still lives" in running.message)
            await ending
            return played(n)

    assert asyncio.run(work()) == [
        *("prepare", "ADD", "DEL"),
        *("unprepare", "late", "unprepare", "late", "unprepare"),
        *("late", "late"),
    ]


def test_a_lost_pods_claim_is_ended_while_its_sandbox_lives() -> None:
    async def work() -> list[str]:
        async with node(replace(QUICK, reconcile=0.1)) as n:
            driver = await recorded(n)
            await n.running(pod("p", "claim"))
            await n.kubelet.lose("default/p")
            assert driver.prepared == {}
            return played(n)

    assert asyncio.run(work()) == ["prepare", "ADD", "unprepare", "DEL"]


def test_a_pod_in_the_hosts_network_has_its_claim_prepared_and_no_add() -> None:
    async def work() -> list[str]:
        async with node() as n:
            await recorded(n)
            await n.running(replace(pod("p", "claim"), host_network=True))
            await n.kubelet.delete("default/p")
            return played(n)

    assert asyncio.run(work()) == ["prepare", "unprepare"]
