"""kubelet's calls for claims, over the socket, and what it hears of the devices' health."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from agent.errors import AgentError, DeviceBusy
from agent.model.allocation import ClaimRef, Hold
from agent.model.health import HEALTHY
from agent.state import Latest
from deviceplugin.dra.preparer import Preparer
from deviceplugin.dra.services import MOST_THREADS, ClaimService, HealthService, health_list
from proto.dra.v1 import api_pb2, api_pb2_grpc
from proto.dra.v1beta1 import api_pb2 as v1beta1
from proto.dra.v1beta1 import api_pb2_grpc as v1beta1_grpc
from proto.drahealth.v1 import api_pb2 as health_pb2
from proto.drahealth.v1 import api_pb2_grpc as health_grpc
from proto.drahealth.v1alpha1 import api_pb2 as v1alpha1
from proto.drahealth.v1alpha1 import api_pb2_grpc as v1alpha1_grpc
from tests.awaiting import until
from tests.deviceplugin.dra.rig import (
    DRIVER,
    POOL,
    FakeClaims,
    catalog,
    channel,
    device,
    ill,
    opened,
    prepared,
    service,
    sockets,
)
from tests.deviceplugin.rig import timed
from tests.node import claimed, new_report


def claim(uid: str, name: str = "two-rails") -> api_pb2.Claim:
    return api_pb2.Claim(namespace="default", uid=uid, name=name)


def asked(*uids: str) -> api_pb2.NodePrepareResourcesRequest:
    return api_pb2.NodePrepareResourcesRequest(claims=[claim(uid) for uid in uids])


def unprepare(*uids: str) -> api_pb2.NodeUnprepareResourcesRequest:
    return api_pb2.NodeUnprepareResourcesRequest(claims=[claim(uid) for uid in uids])


class Gate:
    """Work that waits until a test lets it go on."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.open = threading.Event()

    def prepare(self, ref: ClaimRef) -> Sequence[Hold]:
        self.begun.release()
        assert self.open.wait(60)
        return prepared(ref)


CONTEXT: Any = None
"""No call of the service asks anything of its context."""


async def test_a_prepared_claim_is_answered_with_its_devices_in_both_versions(kubelet_folder: Path) -> None:
    share = claimed("hca", "node-1", "hca-1", "rdma/hca", "hca", "0000:18:00.0", "u-0", "s-1")
    claims = FakeClaims(lambda ref: (share, *prepared(ref)))

    async with opened(kubelet_folder, claims), channel(sockets(kubelet_folder, "plugins", DRIVER)[0]) as to_driver:
        newer: api_pb2_grpc.DRAPluginAsyncStub = api_pb2_grpc.DRAPluginStub(to_driver)
        answer = await newer.NodePrepareResources(asked("u"))
        first, second = answer.claims["u"].devices
        assert (list(first.request_names), first.pool_name, first.device_name) == (["hca"], "node-1", "hca-1")
        assert first.cdi_device_ids == ["nodefabric.io/claim=u-0"]
        assert first.share_id == "s-1"
        assert not second.HasField("share_id")
        older: v1beta1_grpc.DRAPluginAsyncStub = v1beta1_grpc.DRAPluginStub(to_driver)
        again = await older.NodePrepareResources(
            v1beta1.NodePrepareResourcesRequest.FromString(asked("u").SerializeToString())
        )
        assert [d.device_name for d in again.claims["u"].devices] == ["hca-1", "vf-0000-18-00-1"]
        gone = await newer.NodeUnprepareResources(unprepare("u", "v"))
        assert {uid: a.error for uid, a in gone.claims.items()} == {"u": "", "v": ""}
    assert claims.calls[:2] == [("prepare", "u"), ("prepare", "u")]
    assert sorted(claims.calls[2:]) == [("unprepare", "u"), ("unprepare", "v")]


async def test_each_claim_of_a_call_has_its_own_error() -> None:
    def prepare(ref: ClaimRef) -> Sequence[Hold]:
        if ref.uid == "busy":
            raise DeviceBusy("0000:18:00.1 is in pod a/b")
        if ref.uid == "odd":
            raise KeyError("nobody foresaw it")
        if ref.uid == "silent":
            raise AgentError
        return prepared(ref)

    uid = "7f6cf7b0-4a4f-4b9b-9d1f-1a2b3c4d5e6f"
    answer = await service(FakeClaims(prepare)).prepare(asked(uid, "busy", "odd", "silent", ""), CONTEXT)
    assert set(answer.claims) == {uid, "busy", "odd", "silent", ""}
    assert answer.claims["silent"].error == "AgentError"
    assert [d.device_name for d in answer.claims[uid].devices] == ["vf-0000-18-00-1"]
    assert answer.claims["busy"].error == "0000:18:00.1 is in pod a/b"
    assert "KeyError" in answer.claims["odd"].error
    assert "names are not usable" in answer.claims[""].error


@pytest.mark.parametrize(
    ("uid", "namespace", "name"),
    [
        ("../../etc/cron.d/x", "default", "c"),
        ("a/b", "default", "c"),
        ("a\n", "default", "c"),
        ("", "default", "c"),
        ("u" * 65, "default", "c"),
        ("u", "", "c"),
        ("u", "../x", "c"),
        ("u", "default", ""),
        ("u", "default", "A b"),
        ("u", "default", "c" * 254),
    ],
)
async def test_a_name_that_is_none_reaches_nobody(uid: str, namespace: str, name: str) -> None:
    claims = FakeClaims()

    request = api_pb2.NodePrepareResourcesRequest(claims=[api_pb2.Claim(namespace=namespace, uid=uid, name=name)])
    answer = await service(claims).prepare(request, CONTEXT)
    assert "names are not usable" in answer.claims[uid].error
    assert claims.calls == []


async def test_no_more_claims_are_worked_on_at_once_than_there_may_be_threads() -> None:
    gate = Gate()
    claims = FakeClaims(gate.prepare)

    calls = service(claims)
    many = [str(n) for n in range(MOST_THREADS + 8)]
    call = asyncio.ensure_future(calls.prepare(asked(*many), CONTEXT))
    await until(lambda: claims.working == MOST_THREADS)
    # An end is not held up by beginnings: they may wait for just that end.
    assert (await calls.unprepare(unprepare("other"), CONTEXT)).claims["other"].error == ""
    gate.open.set()
    answer = await call
    assert set(answer.claims) == set(many)
    assert all(not a.error for a in answer.claims.values())
    assert claims.most_working == MOST_THREADS + 1


async def test_two_calls_for_one_claim_come_one_after_the_other() -> None:
    gate = Gate()
    claims = FakeClaims(gate.prepare)

    calls = service(claims)
    first = asyncio.ensure_future(calls.prepare(asked("u"), CONTEXT))
    await asyncio.to_thread(gate.begun.acquire)
    end = asyncio.ensure_future(calls.unprepare(unprepare("u"), CONTEXT))
    second = asyncio.ensure_future(calls.prepare(asked("u"), CONTEXT))
    await asyncio.sleep(0.05)
    assert claims.working == 1
    gate.open.set()
    await asyncio.gather(first, end, second)
    assert claims.most_working == 1
    assert claims.calls[0] == ("prepare", "u")
    assert sorted(claims.calls) == [("prepare", "u"), ("prepare", "u"), ("unprepare", "u")]


async def test_a_call_answers_within_its_budget_and_the_work_goes_on() -> None:
    gate = Gate()
    claims = FakeClaims(lambda ref: gate.prepare(ref) if ref.uid == "slow" else prepared(ref))

    calls = service(claims, budget=1.0)
    answer = await calls.prepare(asked("slow", "fast"), CONTEXT)
    assert not answer.claims["fast"].error
    assert "not done within 1 s" in answer.claims["slow"].error
    waiting = await calls.prepare(asked("slow"), CONTEXT)
    assert "not done within 1 s" in waiting.claims["slow"].error
    assert claims.working == 1, "the second call began beside the first"
    gate.open.set()
    await until(lambda: ("prepare", "slow") in claims.calls)
    answer = await calls.prepare(asked("slow"), CONTEXT)
    assert not answer.claims["slow"].error
    assert claims.most_working <= 2


async def test_a_call_that_kubelet_gives_up_loses_nothing(kubelet_folder: Path) -> None:
    gate = Gate()
    claims = FakeClaims(gate.prepare)
    unseen: list[object] = []

    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unseen.append(context))
    async with opened(kubelet_folder, claims), channel(sockets(kubelet_folder, "plugins", DRIVER)[0]) as to_driver:
        stub: api_pb2_grpc.DRAPluginAsyncStub = api_pb2_grpc.DRAPluginStub(to_driver)
        call = stub.NodePrepareResources(asked("u"))
        waiting = asyncio.ensure_future(_outcome(call))
        await asyncio.to_thread(gate.begun.acquire)
        call.cancel()
        await waiting
        again = stub.NodePrepareResources(asked("u"))
        await asyncio.sleep(0.1)
        assert claims.working == 1, "the claim is worked on twice"
        gate.open.set()
        assert not (await again).claims["u"].error
    assert claims.calls == [("prepare", "u"), ("prepare", "u")]
    assert unseen == []


async def _outcome(call: Any) -> None:
    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        await call


async def test_a_call_that_waited_for_room_and_was_given_up_does_nothing() -> None:
    gate = Gate()
    claims = FakeClaims(gate.prepare)

    calls = service(claims)
    full = asyncio.ensure_future(calls.prepare(asked(*map(str, range(MOST_THREADS))), CONTEXT))
    await until(lambda: claims.working == MOST_THREADS)
    late = asyncio.ensure_future(calls.prepare(asked("late"), CONTEXT))
    await asyncio.sleep(0.02)
    late.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await late
    gate.open.set()
    await full
    assert not (await calls.prepare(asked("next"), CONTEXT)).claims["next"].error
    assert ("prepare", "late") not in claims.calls


async def test_each_claim_is_timed_with_its_outcome_and_its_failure_is_reported() -> None:
    metrics = new_report().metrics
    failed: list[tuple[str, str, str]] = []

    def prepare(ref: ClaimRef) -> Sequence[Hold]:
        if ref.uid == "busy":
            raise DeviceBusy("it is in a pod")
        return prepared(ref)

    def report(ref: ClaimRef, what: str, error: AgentError) -> None:
        failed.append((ref.uid, what, str(error)))

    calls = ClaimService(DRIVER, cast(Preparer, FakeClaims(prepare)), metrics.observe, report)
    await calls.prepare(asked("fine", "busy"), CONTEXT)
    await calls.unprepare(unprepare("fine"), CONTEXT)
    assert timed(metrics) == {
        ("NodePrepareResources", DRIVER, "DeviceBusy"): 1,
        ("NodePrepareResources", DRIVER, "ok"): 1,
        ("NodeUnprepareResources", DRIVER, "ok"): 1,
    }
    assert failed == [("busy", "not prepared", "it is in a pod")]


async def test_a_request_that_is_too_large_is_refused(kubelet_folder: Path) -> None:
    async with opened(kubelet_folder), channel(sockets(kubelet_folder, "plugins", DRIVER)[0]) as to_driver:
        stub: api_pb2_grpc.DRAPluginAsyncStub = api_pb2_grpc.DRAPluginStub(to_driver)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.NodePrepareResources(api_pb2.NodePrepareResourcesRequest(claims=[claim("u", "c" * (2 << 20))]))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_claim_for_which_there_is_no_thread_fails_and_is_done_when_there_is_one() -> None:
    claims = FakeClaims()

    calls = service(claims)
    former = threading.stack_size(1 << 46)  # more than there is, so no thread can be started
    try:
        answer = await calls.prepare(asked("u"), CONTEXT)
    finally:
        threading.stack_size(former)
    assert answer.claims["u"].error == "the node has no thread left for it: can't start new thread"
    assert claims.calls == []
    assert not (await calls.prepare(asked("u"), CONTEXT)).claims["u"].error
    assert claims.calls == [("prepare", "u")]


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
        "fine": health_pb2.HEALTHY,
        "down": health_pb2.UNHEALTHY,
        "slots-half": health_pb2.HEALTHY,
        "slots-none": health_pb2.UNHEALTHY,
        "books": health_pb2.UNKNOWN,
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
    stream = HealthService(POOL, devices, timeout=300).watch(health_pb2.NodeWatchResourcesRequest(), CONTEXT)
    assert set(told(await anext(stream))) == {"a", "b"}
    devices.set((device("a", ill("LinkDown")), device("b", HEALTHY)))
    async with asyncio.timeout(30):
        newer = told(await anext(stream))
    assert newer["a"][0] == health_pb2.UNHEALTHY
    assert newer["b"] == (health_pb2.HEALTHY, "")


async def test_an_unchanged_list_comes_again_before_it_is_too_old() -> None:
    devices = catalog(device("a", HEALTHY))
    stream = HealthService(POOL, devices, timeout=3).watch(health_pb2.NodeWatchResourcesRequest(), CONTEXT)
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
        newer: health_grpc.DRAResourceHealthAsyncStub = health_grpc.DRAResourceHealthStub(to_driver)
        older: v1alpha1_grpc.DRAResourceHealthAsyncStub = v1alpha1_grpc.DRAResourceHealthStub(to_driver)
        streams = asyncio.gather(
            listen("v1", newer.NodeWatchResources(health_pb2.NodeWatchResourcesRequest())),
            listen("v1alpha1", older.NodeWatchResources(v1alpha1.NodeWatchResourcesRequest())),
        )
        await until(lambda: all(heard.values()))
    await streams
    await to_driver.close(None)
    for version, lists in heard.items():
        assert lists[0]["a"] == (health_pb2.HEALTHY, ""), version
        assert {name: health for name, (health, _) in lists[-1].items()} == {
            "a": health_pb2.UNKNOWN,
            "b": health_pb2.UNKNOWN,
        }


async def test_an_end_without_listeners_waits_for_nobody() -> None:
    none: Latest[tuple[Any, ...]] = Latest(())
    async with asyncio.timeout(5):
        await HealthService(POOL, none).end(60.0)
