"""Claims at the stand-in's kubelet: prepared before ADD, shown, ended after DEL, as the real one was seen to do."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

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
from hack.sim.cluster.apiserver import ApiServerStandIn
from hack.sim.dra.cluster import HttpCluster
from hack.sim.pods import UsedClaim
from tests.awaiting import until
from tests.sim.claims_rig import (
    GPU,
    GPU_DRIVER,
    NIC,
    NIC_DRIVER,
    NODE,
    QUICK,
    TIMES,
    DummyClaims,
    Node,
    node,
    pod,
)
from tests.sim.cluster.dra_documents import SLICES, resource_slice
from tests.sim.cluster.test_apiserver import call
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


async def test_a_failed_prepare_is_tried_again_later_and_then_the_devices_are_there_twice() -> None:
    async with node(replace(QUICK, retry=(0.02, 0.03))) as n:
        await n.serve(NIC_DRIVER)
        gpus = await n.serve(GPU_DRIVER)
        gpus.failing = 12
        uid = n.cluster.allocate("claim", NIC, GPU, users=["uid-of-p"])
        running = await n.running(pod("p", "claim", ALL))
        asked = [call.driver for call in n.calls("NodePrepareResources")].count(NIC_DRIVER)
        assert n.drivers[NIC_DRIVER].prepared == {uid: asked}
        (container,) = n.kubelet.describe(running)["containers"]
        assert asked > 1, "the other driver failed before ours was asked, each time"
        assert container["cdi_devices"].count(cdi(uid, NIC_DRIVER, "vf-1")) == asked


async def test_the_checkpoint_is_written_before_a_driver_is_asked_and_says_nothing_of_prepared() -> None:
    async with node() as n:
        gpus = await n.serve(GPU_DRIVER)
        gpus.seconds = 0.3
        uid = n.cluster.allocate("claim", GPU, users=["uid-of-p"])
        waiting = n.kubelet.create(pod("p", "claim"))
        await until(lambda: n.calls("NodePrepareResources"))
        path = n.folder / "dra_manager_state"
        early = json.loads(path.read_text())
        assert early["Checksum"] == zlib.crc32(early["Data"].encode())
        data = json.loads(early["Data"])
        assert data["kind"] == "DRACheckpoint"
        (entry,) = data["ClaimInfoStateList"]
        assert (entry["ClaimUID"], entry["ClaimName"], entry["Namespace"]) == (uid, "claim", "default")
        assert entry["PodUIDs"] == {"uid-of-p": {}}
        assert entry["DriverState"] == {GPU_DRIVER: {"Devices": None}}
        await until(lambda: waiting.phase == "Running")
        (entry,) = json.loads(json.loads(path.read_text())["Data"])["ClaimInfoStateList"]
        (device,) = entry["DriverState"][GPU_DRIVER]["Devices"]
        assert (device["PoolName"], device["DeviceName"], device["RequestNames"]) == (NODE, "gpu-0", ["gpu"])
        assert device["CDIDeviceIDs"] == [cdi(uid, GPU_DRIVER, "gpu-0")]
        assert not any("repared" in key for key in entry)


async def test_another_claim_under_a_name_that_is_still_prepared_is_refused() -> None:
    async with node() as n:
        await n.serve(NIC_DRIVER)
        old = n.cluster.allocate("claim", NIC, users=["uid-of-p"])
        await n.running(pod("p", "claim"))
        n.cluster.allocate("claim", NIC, users=["uid-of-q"])
        second = n.kubelet.create(pod("q", "claim"))
        await until(lambda: f"different UID {old} still exists" in second.message)
        await n.kubelet.delete("default/p")
        await until(lambda: second.phase == "Running")


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


async def test_after_kubelets_restart_the_next_sandbox_prepares_again() -> None:
    async with node() as n:
        nics = await n.serve(NIC_DRIVER)
        uid = n.cluster.allocate("claim", NIC, users=["uid-of-p", "uid-of-q"])
        first = await n.running(pod("p", "claim", UsedClaim("rails")))
        await n.kubelet.restart()
        assert nics.prepared == {uid: 1}
        door = n.doors[NIC_DRIVER]
        dra = n.kubelet.dra
        assert dra is not None
        await until(lambda: dra.drivers.get(NIC_DRIVER) is not None)
        assert door.registered
        assert len(n.kubelet.describe(first)["containers"][0]["cdi_devices"]) == 1
        await n.running(pod("q", "claim"))
        assert nics.prepared == {uid: 2}
        await n.kubelet.delete("default/p")
        await n.kubelet.delete("default/q")
        assert nics.prepared == {}


async def test_claims_of_pods_that_kubelet_has_lost_are_found_and_ended() -> None:
    async with node(replace(QUICK, reconcile=0.2)) as n:
        nics = await n.serve(NIC_DRIVER)
        gpus = await n.serve(GPU_DRIVER)
        n.cluster.allocate("claim", NIC, GPU, users=["uid-of-p"])
        n.cluster.allocate("kept", NIC, users=["uid-of-q"], uid="kept")
        await n.running(pod("p", "claim"))
        await n.running(pod("q", "kept"))
        n.kubelet.lose("default/p")
        await until(lambda: not gpus.prepared)
        await until(lambda: nics.prepared == {"kept": 1})
        await asyncio.sleep(0.5)
        assert nics.prepared == {"kept": 1}


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


async def test_a_failed_add_is_deleted_and_tried_again_without_another_prepare() -> None:
    async with node() as n:
        await recorded(n)
        (n.folder / "fail").write_text("1\n")
        await n.running(pod("p", "claim"))
        assert played(n) == ["prepare", "ADD", "DEL", "ADD"]


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


async def test_a_pod_in_the_hosts_network_has_its_claim_prepared_and_no_add() -> None:
    async with node() as n:
        await recorded(n)
        await n.running(replace(pod("p", "claim"), host_network=True))
        await n.kubelet.delete("default/p")
        assert played(n) == ["prepare", "unprepare"]


async def test_all_slices_are_wiped_with_nobody_registered_too_and_again_after_a_restart() -> None:
    async with node() as n:
        n.cluster.away = True
        await asyncio.sleep(0.2)
        n.cluster.away = False
        await until(lambda: n.cluster.wiped == [""])
        await n.kubelet.restart()
        await until(lambda: n.cluster.wiped == ["", ""])


async def test_the_slices_of_a_driver_that_stays_away_are_wiped_and_not_of_one_that_is_back() -> None:
    async with node(replace(QUICK, wipe=1.0)) as n:
        await n.serve(NIC_DRIVER)
        await until(lambda: n.cluster.wiped == [""])
        await n.end(NIC_DRIVER)
        await n.serve(NIC_DRIVER)
        await asyncio.sleep(1.2)
        assert n.cluster.wiped == [""]
        await n.end(NIC_DRIVER)
        await until(lambda: n.cluster.wiped == ["", NIC_DRIVER])
        await asyncio.sleep(0.3)
        assert n.cluster.wiped == ["", NIC_DRIVER]


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


@pytest.fixture
def server() -> Iterator[ApiServerStandIn]:
    with ApiServerStandIn() as running:
        yield running


def url(server: ApiServerStandIn) -> str:
    return f"http://127.0.0.1:{server.port}"


def put_slice(server: ApiServerStandIn, name: str, driver: str, node: str) -> None:
    document = resource_slice(name, driver=driver, node=node)
    assert call(server.port, "PATCH", f"{SLICES}/{name}?fieldManager=d&force=true", document)[0] == 201


def slices(server: ApiServerStandIn) -> set[str]:
    return {item["metadata"]["name"] for item in call(server.port, "GET", SLICES)[1]["items"]}


def test_a_wipe_takes_the_nodes_slices_of_one_driver_or_of_all(server: ApiServerStandIn) -> None:
    for name, driver, of in (("a", "d.io", "n"), ("b", "e.io", "n"), ("c", "d.io", "m")):
        put_slice(server, name, driver, of)
    cluster = HttpCluster(url(server), "n")
    cluster.wipe("d.io")
    assert slices(server) == {"b", "c"}
    cluster.wipe("")
    assert slices(server) == {"c"}
