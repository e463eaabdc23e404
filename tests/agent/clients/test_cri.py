from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from agent.clients.cri import ContainerRuntime, Sandbox
from agent.errors import Unavailable
from agent.model.allocation import PodRef
from proto.cri.v1 import api_pb2

Context = grpc.aio.ServicerContext[object, object]


async def two(request: api_pb2.ListPodSandboxRequest, context: Context) -> api_pb2.ListPodSandboxResponse:
    pod = api_pb2.PodSandboxMetadata(name="train-0", namespace="ai", uid="uid-7")
    return api_pb2.ListPodSandboxResponse(
        items=[
            api_pb2.PodSandbox(id="a1", metadata=pod, state=api_pb2.SANDBOX_READY),
            api_pb2.PodSandbox(id="b2", metadata=pod, state=api_pb2.SANDBOX_NOTREADY),
        ]
    )


async def hang(request: api_pb2.ListPodSandboxRequest, context: Context) -> api_pb2.ListPodSandboxResponse:
    await asyncio.sleep(20)
    return await two(request, context)


@pytest.fixture
def socket() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="nf-") as folder:
        yield Path(folder) / "containerd.sock"


async def asked(socket: Path, seconds: float = 10.0, **calls: Any) -> tuple[Sandbox, ...]:
    """Ask a runtime that knows only these calls."""
    server = grpc.aio.server()
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            call,
            request_deserializer=api_pb2.ListPodSandboxRequest.FromString,
            response_serializer=api_pb2.ListPodSandboxResponse.SerializeToString,
        )
        for name, call in calls.items()
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("runtime.v1.RuntimeService", handlers)])
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    try:
        return await ContainerRuntime(socket, timeout=seconds).sandboxes()
    finally:
        await server.stop(None)


def test_sandboxes_are_told_whether_they_run_or_not(socket: Path) -> None:
    pod = PodRef("ai", "train-0", "uid-7")
    assert asyncio.run(asked(socket, ListPodSandbox=two)) == (Sandbox("a1", pod, True), Sandbox("b2", pod, False))


def test_a_runtime_that_is_away_is_unavailable(socket: Path) -> None:
    runtime = ContainerRuntime(socket, timeout=1.0)
    with pytest.raises(Unavailable, match="runtimeSocket") as failed:
        asyncio.run(runtime.sandboxes())
    assert runtime.problem == str(failed.value)


def test_a_socket_of_something_else_is_unavailable(socket: Path) -> None:
    with pytest.raises(Unavailable, match="UNIMPLEMENTED"):
        asyncio.run(asked(socket, Version=two))


def test_a_runtime_that_hangs_is_unavailable(socket: Path) -> None:
    with pytest.raises(Unavailable, match="did not answer in 1 s"):
        asyncio.run(asked(socket, 1.0, ListPodSandbox=hang))
