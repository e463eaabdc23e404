"""What kubelet hears of the devices' health."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from agent.model.health import HEALTHY
from agent.state import Latest
from deviceplugin.dra.services import HealthService, health_list
from proto.drahealth.v1 import api_pb2, api_pb2_grpc
from proto.drahealth.v1alpha1 import api_pb2 as v1alpha1
from proto.drahealth.v1alpha1 import api_pb2_grpc as v1alpha1_grpc
from tests.awaiting import until
from tests.deviceplugin.dra.rig import DRIVER, POOL, catalog, channel, device, ill, opened, sockets

CONTEXT: Any = None
"""The service asks nothing of a call's context."""


def told(answer: Any) -> dict[str, tuple[int, str]]:
    return {d.device.device_name: (d.health, d.message) for d in answer.devices}


def test_a_device_is_healthy_as_long_as_one_unit_behind_it_is() -> None:
    devices = (
        device("fine", HEALTHY),
        device("down", ill("LinkDown")),
        device("slots-half", ill("LinkDown"), HEALTHY),
        device("slots-none", ill("LinkDown"), ill("NoDriver")),
        device("books", ill("BooksUnwritable")),
    )
    answer = health_list(devices, POOL, now=1000)
    assert {d.device.device_name: d.health for d in answer.devices} == {
        "fine": api_pb2.HEALTHY,
        "down": api_pb2.UNHEALTHY,
        "slots-half": api_pb2.HEALTHY,
        "slots-none": api_pb2.UNHEALTHY,
        "books": api_pb2.UNKNOWN,
    }
    assert answer.devices[0].message == ""
    assert answer.devices[1].message.startswith("LinkDown: its link")
    assert {d.device.pool_name for d in answer.devices} == {POOL}
    assert {(d.last_updated_time, d.health_check_timeout_seconds) for d in answer.devices} == {(1000, 30)}


def test_no_message_and_no_list_is_longer_than_kubelet_takes() -> None:
    many = tuple(device(f"vf-{n}", ill("ExclusiveRdma")) for n in range(30_000))
    answer = health_list(many, POOL, now=1000)
    assert answer.ByteSize() < 4 << 20
    assert 0 < len(answer.devices[0].message) < 100
    assert all(len(d.message.encode()) <= 1024 for d in answer.devices)


async def test_the_whole_list_comes_at_once_on_change() -> None:
    devices = catalog(device("a", HEALTHY), device("b", HEALTHY))
    stream = HealthService(POOL, devices, timeout=300).watch(api_pb2.NodeWatchResourcesRequest(), CONTEXT)
    assert set(told(await anext(stream))) == {"a", "b"}
    devices.set((device("a", ill("LinkDown")), device("b", HEALTHY)))
    async with asyncio.timeout(30):
        newer = told(await anext(stream))
    assert newer["a"][0] == api_pb2.UNHEALTHY
    assert newer["b"] == (api_pb2.HEALTHY, "")


async def test_an_unchanged_list_comes_again_before_it_is_too_old() -> None:
    devices = catalog(device("a", HEALTHY))
    stream = HealthService(POOL, devices, timeout=3).watch(api_pb2.NodeWatchResourcesRequest(), CONTEXT)
    first = await anext(stream)
    async with asyncio.timeout(3):
        again = await anext(stream)
    assert told(again) == told(first)


async def test_both_versions_tell_all_devices_as_unknown_before_a_planned_end(kubelet_folder: Path) -> None:
    devices = catalog(device("a", HEALTHY), device("b", ill("LinkDown")))
    heard: dict[str, list[dict[str, tuple[int, str]]]] = {"v1": [], "v1alpha1": []}

    async def listen(version: str, stream: Any) -> None:
        async for answer in stream:
            heard[version].append(told(answer))

    async with opened(kubelet_folder, devices=devices):
        to_driver = channel(sockets(kubelet_folder, "plugins", DRIVER)[0])
        newer: api_pb2_grpc.DRAResourceHealthAsyncStub = api_pb2_grpc.DRAResourceHealthStub(to_driver)
        older: v1alpha1_grpc.DRAResourceHealthAsyncStub = v1alpha1_grpc.DRAResourceHealthStub(to_driver)
        streams = asyncio.gather(
            listen("v1", newer.NodeWatchResources(api_pb2.NodeWatchResourcesRequest())),
            listen("v1alpha1", older.NodeWatchResources(v1alpha1.NodeWatchResourcesRequest())),
        )
        await until(lambda: all(heard.values()))
    await streams
    await to_driver.close(None)
    for version, lists in heard.items():
        assert lists[0]["a"] == (api_pb2.HEALTHY, ""), version
        assert {name: health for name, (health, _) in lists[-1].items()} == {
            "a": api_pb2.UNKNOWN,
            "b": api_pb2.UNKNOWN,
        }


async def test_an_end_without_listeners_waits_for_nobody() -> None:
    none: Latest[tuple[Any, ...]] = Latest(())
    async with asyncio.timeout(5):
        await HealthService(POOL, none).end(60.0)
