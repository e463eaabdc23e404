"""How the stand-in's kubelet finds drivers, watches their health, and wipes slices."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import grpc.aio

from agent.model.health import HEALTHY, unhealthy
from agent.offer.offer import Unit
from agent.state import Latest
from deviceplugin.dra.devices import DraDevice
from deviceplugin.dra.door import Door, Driver
from deviceplugin.server import unobserved
from hack.sim.dra.drivers import CHANNEL_OPTIONS
from hack.sim.dra.health import HealthCache
from hack.sim.kubelet import Kubelet
from hack.sim.pods import UsedClaim
from proto.drahealth.v1alpha1 import api_pb2 as health_pb2
from proto.pluginregistration.v1 import api_pb2, api_pb2_grpc
from proto.podresources.v1 import api_pb2 as podresources_pb2
from proto.podresources.v1 import api_pb2_grpc as podresources_grpc
from tests.awaiting import until
from tests.sim.dra.dummy import DummyClaims
from tests.sim.dra.rig import NIC_DRIVER, NODE, QUICK, TIMES, Node, node, pod

NIC = ("nic", NIC_DRIVER, "vf-1")


def test_an_older_kubelet_calls_the_older_version() -> None:
    async def work() -> None:
        async with node(replace(QUICK, services=("v1beta1.DRAPlugin",))) as n:
            nics = await n.serve(NIC_DRIVER)
            uid = n.cluster.allocate("claim", NIC, users=["uid-of-p"])
            await n.running(pod("p", "claim"))
            assert nics.prepared == {uid: 1}
            assert n.kubelet.dra is not None
            client = n.kubelet.dra.drivers.get(NIC_DRIVER)
            assert client is not None
            assert client.service == "v1beta1.DRAPlugin"

    asyncio.run(work())


class Introduced(api_pb2_grpc.RegistrationServicer):
    """A plugin that introduces itself as a test says."""

    def __init__(self, info: api_pb2.PluginInfo) -> None:
        self.info = info
        self.told: list[tuple[bool, str]] = []

    async def GetInfo(self, request: api_pb2.InfoRequest, context: object) -> api_pb2.PluginInfo:
        return self.info

    async def NotifyRegistrationStatus(
        self, request: api_pb2.RegistrationStatus, context: object
    ) -> api_pb2.RegistrationStatusResponse:
        self.told.append((request.plugin_registered, request.error))
        return api_pb2.RegistrationStatusResponse()


async def introduce(n: Node, info: api_pb2.PluginInfo) -> tuple[bool, str]:
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    plugin = Introduced(info)
    api_pb2_grpc.add_RegistrationServicer_to_server(plugin, server)
    server.add_insecure_port(f"unix:{n.folder / 'plugins_registry' / 'x-reg.sock'}")
    await server.start()
    await until(lambda: plugin.told)
    await server.stop(None)
    return plugin.told[0]


def test_what_cannot_be_registered_is_told_so() -> None:
    async def work() -> None:
        async with node() as n:
            await n.serve(NIC_DRIVER)
            assert n.kubelet.dra is not None
            known = n.kubelet.dra.drivers.get(NIC_DRIVER)
            assert known is not None
            versions = ["v1.DRAPlugin"]
            for info, why in (
                (api_pb2.PluginInfo(type="CSIPlugin", name="x"), "no handler registered"),
                (
                    api_pb2.PluginInfo(type="DRAPlugin", name="x", supported_versions=["v9.DRAPlugin"]),
                    "none of services",
                ),
                (
                    api_pb2.PluginInfo(
                        type="DRAPlugin", name=NIC_DRIVER, endpoint=known.endpoint, supported_versions=versions
                    ),
                    "already registered",
                ),
            ):
                registered, error = await introduce(n, info)
                assert not registered
                assert why in error

    asyncio.run(work())


def test_the_newest_instance_that_is_connected_is_asked() -> None:
    async def work() -> None:
        async with node() as n:
            await n.serve(NIC_DRIVER)
            assert n.kubelet.dra is not None
            first = n.kubelet.dra.drivers.get(NIC_DRIVER)
            assert first is not None
            newer = DummyClaims(NIC_DRIVER, n.cluster.claim)
            # A second process of the driver would not remove the first one's sockets while that serves.
            other = Door(Driver(NIC_DRIVER, NODE, n.folder), newer, Latest(()), unobserved, TIMES)
            other._prepare_folders = lambda: None  # type: ignore[method-assign]
            running = asyncio.ensure_future(other.run())
            await until(lambda: other.registered)
            drivers = n.kubelet.dra.drivers
            await until(lambda: (c := drivers.get(NIC_DRIVER)) is not None and c.endpoint != first.endpoint)
            uid = n.cluster.allocate("claim", NIC, users=["uid-of-p"])
            await n.running(pod("p", "claim"))
            assert newer.prepared == {uid: 1}
            other.close()
            await running
            await n.kubelet.delete("default/p")
            assert n.drivers[NIC_DRIVER].prepared == {}

    asyncio.run(work())


def test_all_slices_are_wiped_a_moment_after_the_first_registration() -> None:
    async def work() -> None:
        async with node(replace(QUICK, look=1.5)) as n:
            await n.serve(NIC_DRIVER)
            await until(lambda: n.cluster.wiped == [""])
            assert n.cluster.registered_at_wipe == [True]

    asyncio.run(work())


def test_all_slices_are_wiped_with_nobody_registered_too_and_again_after_a_restart() -> None:
    async def work() -> None:
        async with node() as n:
            n.cluster.away = True
            await asyncio.sleep(0.2)
            n.cluster.away = False
            await until(lambda: n.cluster.wiped == [""])
            await n.kubelet.restart()
            await until(lambda: n.cluster.wiped == ["", ""])

    asyncio.run(work())


def test_the_slices_of_a_driver_that_stays_away_are_wiped_and_not_of_one_that_is_back() -> None:
    async def work() -> None:
        async with node(replace(QUICK, wipe=2.0)) as n:
            await n.serve(NIC_DRIVER)
            await until(lambda: n.cluster.wiped == [""])
            await n.end(NIC_DRIVER)
            await n.serve(NIC_DRIVER)
            await asyncio.sleep(2.2)
            assert n.cluster.wiped == [""]
            await n.end(NIC_DRIVER)
            await until(lambda: n.cluster.wiped == ["", NIC_DRIVER])
            await asyncio.sleep(0.3)
            assert n.cluster.wiped == ["", NIC_DRIVER]

    asyncio.run(work())


def list_of(**health: health_pb2.HealthStatus.ValueType) -> list[health_pb2.DeviceHealth]:
    return [
        health_pb2.DeviceHealth(
            device=health_pb2.DeviceIdentifier(pool_name=NODE, device_name=name),
            health=value,
            health_check_timeout_seconds=10,
            message="why",
        )
        for name, value in health.items()
    ]


def test_health_goes_stale_and_a_device_left_out_too() -> None:
    now = [0.0]
    cache = HealthCache(lambda: now[0])
    assert cache.update("d", list_of(a=health_pb2.HEALTHY, b=health_pb2.UNHEALTHY)) == {(NODE, "a"), (NODE, "b")}
    assert cache.update("d", list_of(a=health_pb2.HEALTHY)) == set()
    now[0] = 10.0
    assert cache.read("d", NODE, "b").health == "Unhealthy"
    now[0] = 11.0
    assert cache.read("d", NODE, "a").health == cache.read("d", NODE, "b").health == "Unknown"
    assert cache.update("d", list_of(a=health_pb2.HEALTHY)) == {(NODE, "b")}
    assert cache.read("d", NODE, "a").health == "Healthy"
    assert cache.read("d", NODE, "never-told").health == "Unknown"
    cache.clear("d")
    assert cache.read("d", NODE, "a").health == "Unknown"


def vf(healthy: bool) -> DraDevice:
    health = HEALTHY if healthy else unhealthy("LinkDown")
    return DraDevice("vf-1", "rdma/vf", {}, units=(Unit("vf-1", "rdma/vf", "vf", "0000:18:00.1", health, 0),))


def test_a_pods_status_follows_the_health_of_its_devices_until_the_stream_ends_unseen() -> None:
    def shown(n: Node) -> list[tuple[str, str, str]]:
        document = (n.folder / "status" / "default_p.json").read_text()
        return [(h["name"], h["health"], h["message"]) for h in _read(document)]

    async def work() -> None:
        async with node() as n:
            catalog = Latest((vf(True),))
            claims = DummyClaims(NIC_DRIVER, n.cluster.claim)
            door = Door(Driver(NIC_DRIVER, NODE, n.folder), claims, catalog, unobserved, TIMES)  # type: ignore[arg-type]
            running = asyncio.ensure_future(door.run())
            await until(lambda: door.registered)
            uid = n.cluster.allocate("claim", NIC, users=["uid-of-p"])
            started = await n.running(pod("p", "claim", UsedClaim("rails", "nic")))
            first = n.kubelet.describe(started)["containers"][0]["claim_health"]
            assert first[0]["resourceID"] == f"k8s.nodefabric.io/claim={uid}-vf-1"
            catalog.set((vf(False),))
            await until(lambda: [s[:2] for s in shown(n)] == [("claim:rails/nic", "Unhealthy")])
            assert shown(n)[0][2].startswith("LinkDown")
            catalog.set((vf(True),))
            await until(lambda: [s[1] for s in shown(n)] == ["Healthy"])
            door.close()
            await until(lambda: [s[1] for s in shown(n)] == ["Unknown"])
            await running

    asyncio.run(work())


def _read(document: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(document)["containers"][0]["claim_health"]
    return found


def test_podresources_tell_claims_of_the_containers_that_list_them() -> None:
    async def work() -> None:
        async with node() as n:
            await n.serve(NIC_DRIVER)
            uid = n.cluster.allocate("claim", NIC, users=["uid-of-p"])
            await n.running(pod("p", "claim", UsedClaim("rails", "nic"), UsedClaim("another")))
            first, second = await resources(n.kubelet)
            assert second.dynamic_resources == []
            (claim,) = first.dynamic_resources
            assert (claim.claim_namespace, claim.claim_name) == ("default", "claim")
            (device,) = claim.claim_resources
            assert (device.driver_name, device.pool_name, device.device_name) == (NIC_DRIVER, NODE, "vf-1")
            assert [c.name for c in device.cdi_devices] == [f"k8s.nodefabric.io/claim={uid}-vf-1"]

    asyncio.run(work())


async def resources(kubelet: Kubelet) -> list[podresources_pb2.ContainerResources]:
    socket = kubelet.podresources_folder / "kubelet.sock"
    async with grpc.aio.insecure_channel(f"unix:{socket}", options=CHANNEL_OPTIONS) as channel:
        stub: podresources_grpc.PodResourcesListerAsyncStub = podresources_grpc.PodResourcesListerStub(channel)
        answer = await stub.List(podresources_pb2.ListPodResourcesRequest())
        return list(answer.pod_resources[0].containers)
