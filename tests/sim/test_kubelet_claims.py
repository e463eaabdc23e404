"""Claims at the stand-in's kubelet: prepared before ADD, shown, ended after DEL, as the real one was seen to do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from agent.errors import AgentError
from agent.model.allocation import ClaimRef, Hold
from agent.model.health import HEALTHY, unhealthy
from agent.offer.offer import Unit
from agent.state import Latest
from deviceplugin.dra.devices import DraDevice
from deviceplugin.dra.registration import Door, Driver
from deviceplugin.dra.services import ClaimService
from deviceplugin.server import unobserved
from hack.sim.pods import UsedClaim
from tests.awaiting import until
from tests.sim.claims_rig import (
    GPU,
    GPU_DRIVER,
    NIC,
    NIC_DRIVER,
    NODE,
    TIMES,
    DummyClaims,
    Node,
    node,
    pod,
)
from tests.sim.test_kubelet import calls, recorders

pytestmark = pytest.mark.usefixtures("own_network")
ALL = UsedClaim("rails")


def cdi(uid: str, driver: str, device: str) -> str:
    return f"nodefabric.io/{driver}={uid}-{device}"


async def test_a_container_gets_the_devices_of_the_requests_that_it_names() -> None:
    async with node() as n:
        await n.serve(NIC_DRIVER)
        await n.serve(GPU_DRIVER)
        near = ("nic/near", NIC_DRIVER, "vf-1")  # a request counts without its sub-request
        uid = n.cluster.allocate("claim", near, GPU, users=["uid-of-p"])
        running = await n.running(
            pod("p", "claim", ALL, UsedClaim("rails", "nic"), UsedClaim("rails", "gpu"), UsedClaim("other"))
        )
        shown = [set(c["cdi_devices"]) for c in n.kubelet.describe(running)["containers"]]
        nic, gpu = cdi(uid, NIC_DRIVER, "vf-1"), cdi(uid, GPU_DRIVER, "gpu-0")
        assert shown == [{nic, gpu}, {nic}, {gpu}, set()]


@pytest.mark.parametrize("how", ["absent", "not allocated", "not reserved", "of another pod", "api server away"])
async def test_a_claim_that_the_pod_may_not_use_reaches_no_driver_and_no_file(how: str) -> None:
    async with node() as n:
        await n.serve(NIC_DRIVER)
        users = ["uid-of-p"] if how != "not reserved" else ["another"]
        n.cluster.allocate("claim", NIC, users=users, owner="another" if how == "of another pod" else "uid-of-p")
        if how == "absent":
            n.cluster.claims.clear()
        if how == "not allocated":
            del n.cluster.claims["default", "claim"]["status"]["allocation"]
        n.cluster.away = how == "api server away"
        waiting = n.kubelet.create(pod("p", "claim", from_template=True))
        await until(lambda: waiting.message)
        assert "failed to prepare dynamic resources" in waiting.message
        assert n.calls("NodePrepareResources") == []
        assert not (n.folder / "dra_manager_state").exists()
        await n.kubelet.delete("default/p")
        assert n.calls("NodeUnprepareResources") == []
        n.cluster.away = False


async def test_a_pod_stays_until_its_driver_is_back() -> None:
    async with node() as n:
        nics = await n.serve(NIC_DRIVER)
        n.cluster.allocate("claim", NIC, users=["uid-of-p"])
        running = await n.running(pod("p", "claim"))
        await n.end(NIC_DRIVER)
        ending = n.kubelet.delete("default/p")
        await until(lambda: "failed to unprepare dynamic resources" in running.message)
        assert not ending.done()
        await n.serve(NIC_DRIVER)
        await ending
        assert nics.prepared == {}


class Recorded(DummyClaims):
    """A driver that notes its calls in the file in which the CNI plugin notes its own."""

    def __init__(self, node: Node) -> None:
        super().__init__(NIC_DRIVER, node.cluster.claim)
        self.refusals = 0
        """So many of the next Unprepares fail."""
        self._file = node.folder / "calls"

    def prepare(self, ref: ClaimRef) -> Sequence[Hold]:
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


async def test_a_failed_unprepare_is_tried_again_with_another_del_each_time() -> None:
    async with node() as n:
        driver = await recorded(n)
        driver.refusals = 2
        running = await n.running(pod("p", "claim"))
        ending = n.kubelet.delete("default/p")
        await until(lambda: "the sandbox still lives" in running.message)
        await ending
        again = ["unprepare", "late"]
        assert played(n) == ["prepare", "ADD", "DEL", *again, *again, "unprepare", "late", "late"]


def vf(healthy: bool) -> DraDevice:
    health = HEALTHY if healthy else unhealthy("LinkDown")
    return DraDevice("vf-1", "rdma/vf", {}, units=(Unit("vf-1", "rdma/vf", "vf", "0000:18:00.1", health, 0),))


async def test_a_pods_status_follows_the_health_of_its_devices_until_the_stream_ends_unseen() -> None:
    def shown(n: Node) -> list[tuple[str, str, str]]:
        document = (n.folder / "status" / "default_p.json").read_text()
        return [(h["name"], h["health"], h["message"]) for h in _read(document)]

    async with node() as n:
        catalog = Latest((vf(True),))
        claims = DummyClaims(NIC_DRIVER, n.cluster.claim)
        calls = ClaimService(NIC_DRIVER, claims, unobserved)
        door = Door(Driver(NIC_DRIVER, NODE, n.folder), calls, catalog, TIMES)  # type: ignore[arg-type]
        running = asyncio.ensure_future(door.run())
        await until(lambda: door.registered)
        uid = n.cluster.allocate("claim", NIC, users=["uid-of-p"])
        started = await n.running(pod("p", "claim", UsedClaim("rails", "nic")))
        first = n.kubelet.describe(started)["containers"][0]["claim_health"]
        assert first[0]["resourceID"] == f"nodefabric.io/nodefabric.io={uid}-vf-1"
        catalog.set((vf(False),))
        await until(lambda: [s[:2] for s in shown(n)] == [("claim:rails/nic", "Unhealthy")])
        assert shown(n)[0][2].startswith("LinkDown")
        catalog.set((vf(True),))
        await until(lambda: [s[1] for s in shown(n)] == ["Healthy"])
        door.close()
        await until(lambda: [s[1] for s in shown(n)] == ["Unknown"])
        await running


def _read(document: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(document)["containers"][0]["claim_health"]
    return found
