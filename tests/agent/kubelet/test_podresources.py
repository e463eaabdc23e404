from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from agent.errors import Unavailable
from agent.kubelet.podresources import (
    ClaimedDevice,
    ContainerDevices,
    DeviceAssignment,
    Listing,
    PodDevices,
    PodResources,
)
from agent.model.allocation import PodRef
from hack.sim.devices import Held, Known
from hack.sim.kubelet import Kubelet
from hack.sim.pods import Container, PodSpec
from proto.deviceplugin.v1beta1 import api_pb2 as plugin_pb2
from proto.podresources.v1 import api_pb2, api_pb2_grpc
from tests.awaiting import until


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="nf-"))
    yield path
    shutil.rmtree(path)


@contextlib.asynccontextmanager
async def node(folder: Path, *, has_get: bool = True) -> AsyncIterator[tuple[Kubelet, PodResources]]:
    """A kubelet with one pod that holds two VFs and a GPU, and a client for it."""
    kubelet = Kubelet(folder, netns_dir=folder / "netns", has_get=has_get)
    await kubelet.start()
    pod = kubelet.create(PodSpec("ai", "train-0", containers=(Container("main"), Container("side"))))
    numa = plugin_pb2.TopologyInfo(nodes=[plugin_pb2.NUMANode(ID=1)])
    kubelet.devices.resources = {
        "rdma/vf": Known(None, {i: plugin_pb2.Device(ID=i, health="Healthy", topology=numa) for i in ("v1", "v2")}),
        "nvidia.com/gpu": Known(None, {"GPU-1": plugin_pb2.Device(ID="GPU-1", health="Unhealthy")}),
    }
    kubelet.devices.held = [
        Held(pod.uid, "main", "rdma/vf", ("v1", "v2"), b""),
        Held(pod.uid, "side", "nvidia.com/gpu", ("GPU-1",), b""),
    ]
    client = PodResources.of_kubelet(folder, timeout=5.0)
    try:
        yield kubelet, client
    finally:
        await client.close()
        await kubelet.close()


@pytest.mark.parametrize("has_get", [True, False])
async def test_a_pods_devices_are_told_with_and_without_the_get_call(folder: Path, has_get: bool) -> None:
    async with node(folder, has_get=has_get) as (_, client):
        for _ in range(2):
            found = await client.get(PodRef("ai", "train-0", "uid-7"))
            assert found is not None
            assert found.pod == PodRef("ai", "train-0", "uid-7")
            assert found.device_ids("rdma/vf") == ("v1", "v2")
            assert found.all_device_ids == ("v1", "v2", "GPU-1")
            assert [c.name for c in found.containers] == ["main", "side"]
            assert found.containers[0].devices[0] == DeviceAssignment("rdma/vf", ("v1",), (1,))


@pytest.mark.parametrize("has_get", [True, False])
async def test_a_pod_that_kubelet_does_not_know_is_none(folder: Path, has_get: bool) -> None:
    async with node(folder, has_get=has_get) as (_, client):
        assert await client.get(PodRef("ai", "train-1")) is None
        assert await client.get(PodRef("default", "train-0")) is None


async def test_list_and_allocatable_tell_all(folder: Path) -> None:
    async with node(folder) as (_, client):
        (pod,) = await client.list()
        assert pod.pod == PodRef("ai", "train-0")
        devices = (await client.allocatable()).devices
        assert devices == (DeviceAssignment("rdma/vf", ("v1",), (1,)), DeviceAssignment("rdma/vf", ("v2",), (1,)))


async def test_a_kubelet_that_is_away_is_unavailable_by_name_and_found_again(folder: Path) -> None:
    client = PodResources.of_kubelet(folder, timeout=0.5)

    async def answers() -> bool:
        with contextlib.suppress(Unavailable):
            return await client.get(PodRef("ai", "train-0")) is not None
        return False

    with pytest.raises(Unavailable, match=f"PodResources.List on {folder}/pod-resources/kubelet.sock failed"):
        await client.list()
    with pytest.raises(Unavailable, match=r"PodResources\.Get on") as failed:
        await client.get(PodRef("a", "b"))
    assert [client.problem] == [str(failed.value)]
    async with node(folder) as (kubelet, _), asyncio.timeout(30):
        for _ in range(2):
            while not await answers():
                pass
            assert client.problem is None
            await kubelet.restart()
    await client.close()


def _with_claims(name: str) -> api_pb2.ContainerResources:
    device = api_pb2.ClaimResource(
        driver_name="nodefabric.io",
        pool_name="node-1",
        device_name="vf-1",
        cdi_devices=[api_pb2.CDIDevice(name="nodefabric.io/claim=x"), api_pb2.CDIDevice(name="nodefabric.io/claim=y")],
    )
    share = api_pb2.ClaimResource(driver_name="nodefabric.io", pool_name="node-1", device_name="hca", share_id="s1")
    claims = [
        api_pb2.DynamicResource(claim_name="nics", claim_namespace="n", claim_resources=[device]),
        api_pb2.DynamicResource(claim_name=f"of-{name}", claim_namespace="n", claim_resources=[share]),
    ]
    return api_pb2.ContainerResources(name=name, dynamic_resources=claims)


class Moody(api_pb2_grpc.PodResourcesListerServicer):
    """Answers List as told, one mood after the other."""

    def __init__(self, *moods: tuple[grpc.StatusCode, str] | float | None) -> None:
        self.moods = list(moods)

    async def List(self, request: object, context: object) -> api_pb2.ListPodResourcesResponse:
        mood = self.moods.pop(0)
        if isinstance(mood, float):
            await asyncio.sleep(mood)
        elif mood is not None:
            await context.abort(*mood)  # type: ignore[attr-defined]
        pod = api_pb2.PodResources(name="p", namespace="n", containers=[_with_claims("a"), _with_claims("b")])
        return api_pb2.ListPodResourcesResponse(pod_resources=[pod])

    Get = List  # type: ignore[assignment]

    async def GetAllocatableResources(self, request: object, context: object) -> api_pb2.AllocatableResourcesResponse:
        return api_pb2.AllocatableResourcesResponse(cpu_ids=[0, 1])


@contextlib.asynccontextmanager
async def moody(
    folder: Path, *moods: tuple[grpc.StatusCode, str] | float | None, seconds: float = 0.5
) -> AsyncIterator[PodResources]:
    socket = folder / "pod-resources" / "kubelet.sock"
    socket.parent.mkdir()
    server = grpc.aio.server()
    api_pb2_grpc.add_PodResourcesListerServicer_to_server(Moody(*moods), server)
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    client = PodResources(socket, timeout=seconds)
    yield client
    await client.close()
    await server.stop(None)


async def test_what_containers_have_by_claims_is_told_once_for_the_pod(folder: Path) -> None:
    async with moody(folder, None, seconds=30) as client:
        (found,) = await client.list()
        names = ("nodefabric.io/claim=x", "nodefabric.io/claim=y")
        assert found.containers[1].claimed == (
            ClaimedDevice("n", "nics", "nodefabric.io", "node-1", "vf-1", names),
            ClaimedDevice("n", "of-b", "nodefabric.io", "node-1", "hca", share_id="s1"),
        )
        assert [device.claim for device in found.claimed] == ["nics", "of-a", "of-b"]


async def test_kubelets_rate_limit_is_waited_out(folder: Path) -> None:
    limit = (grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
    async with moody(folder, limit, limit, None, seconds=30) as client:
        assert len(await client.list()) == 1


@pytest.mark.parametrize(
    "mood",
    [1.5, (grpc.StatusCode.INTERNAL, "broken"), (grpc.StatusCode.RESOURCE_EXHAUSTED, "message larger than max")],
)
async def test_a_kubelet_that_hangs_or_fails_is_unavailable(
    folder: Path, mood: tuple[grpc.StatusCode, str] | float
) -> None:
    async with moody(folder, mood) as client:
        with pytest.raises(Unavailable, match=r"PodResources\.List on"):
            await client.list()


async def test_a_get_behind_a_switched_off_feature_gate_falls_back_to_the_list(folder: Path) -> None:
    disabled = (grpc.StatusCode.UNKNOWN, "PodResources API Get method disabled")
    async with moody(folder, disabled, None, seconds=30) as client:
        assert await client.get(PodRef("n", "p")) is not None


TRAINER = PodDevices(
    PodRef("default", "trainer"), (ContainerDevices("main", (DeviceAssignment("rdma/vf", ("vf-1", "vf-2")),)),)
)


class Answering(PodResources):
    """Is asked at times that a test says, and answers when it says: one pod, called by the number of the question."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"), clock=self.time)
        self.now = 100.0
        self.asked = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.is_away = False

    def time(self) -> float:
        return self.now

    async def list(self) -> tuple[PodDevices, ...]:
        self.asked += 1
        await self.answers.wait()
        if self.is_away:
            raise Unavailable("kubelet is away")
        return (replace(TRAINER, pod=PodRef("default", f"pod-{self.asked}")),)


async def test_an_answer_serves_whoever_wants_none_that_is_older() -> None:
    kubelet = Answering()
    first = await kubelet.listing()
    kubelet.now = 160.0
    assert await kubelet.listing(100.0) is first
    assert await kubelet.listing(99.0) is first
    assert kubelet.asked == 1
    second = await kubelet.listing(100.5)
    assert second.asked_at == 160.0
    kubelet.now = 160.1
    assert (await kubelet.listing()).asked_at == 160.1
    assert kubelet.asked == 3


async def crowd(kubelet: Answering) -> list[Coroutine[Any, Any, Listing]]:
    """Have one question in flight, and three that are asked a moment later."""
    kubelet.answers.clear()
    early = asyncio.create_task(kubelet.listing())
    await until(lambda: kubelet.asked == 1)
    kubelet.now = 101.0
    late = [asyncio.create_task(kubelet.listing()) for _ in range(3)]
    await asyncio.sleep(0)
    kubelet.now = 102.0
    kubelet.answers.set()
    return [_of(early), *map(_of, late)]


async def _of(task: asyncio.Task[Listing]) -> Listing:
    return await task


async def test_who_asks_while_kubelet_is_asked_already_shares_the_next_answer() -> None:
    kubelet = Answering()
    found = await asyncio.gather(*await crowd(kubelet))
    assert [listing.asked_at for listing in found] == [100.0, 102.0, 102.0, 102.0]
    assert kubelet.asked == 2


async def test_who_waits_with_others_for_a_kubelet_that_is_away_does_not_ask_it_once_more() -> None:
    kubelet = Answering()
    kubelet.is_away = True
    found = await asyncio.gather(*await crowd(kubelet), return_exceptions=True)
    assert all(isinstance(one, Unavailable) for one in found)
    assert kubelet.asked == 2
    kubelet.is_away, kubelet.now = False, 103.0
    assert (await kubelet.listing(60.0)).names == {("default", "pod-3")}


async def test_one_who_gives_up_takes_the_answer_from_nobody() -> None:
    kubelet = Answering()
    kubelet.answers.clear()
    impatient = asyncio.create_task(kubelet.listing())
    await until(lambda: kubelet.asked == 1)
    patient = asyncio.create_task(kubelet.listing(100.0))
    impatient.cancel()
    await until(lambda: kubelet.asked == 2)
    kubelet.answers.set()
    assert (await patient).names == {("default", "pod-2")}


async def test_who_follows_the_newest_answer_hears_what_others_asked() -> None:
    kubelet = Answering()
    before = kubelet.newest.value
    assert before.pods == ()
    following = asyncio.create_task(kubelet.newest.other_than(before))
    found = await kubelet.listing()
    assert await following is found
    assert found.names == {("default", "pod-1")}
    assert found.containers == {"vf-1": "main", "vf-2": "main"}
