from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from agent.errors import Unavailable
from agent.kubelet.cri import ContainerRuntime, Sandbox, resolves_cdi
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


async def asked(
    socket: Path, seconds: float = 10.0, runtime: ContainerRuntime | None = None, **calls: Any
) -> tuple[Sandbox, ...]:
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
        return await (runtime or ContainerRuntime(socket, timeout=seconds)).sandboxes()
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


def test_a_runtime_that_hangs_is_unavailable(socket: Path) -> None:
    with pytest.raises(Unavailable, match="did not answer in 1 s"):
        asyncio.run(asked(socket, 1.0, ListPodSandbox=hang))


@pytest.mark.parametrize(
    ("config", "resolves"),
    [
        ('{"containerd": {}, "enableCDI": true}', True),
        ('{"containerd": {}, "enableCDI": false, "cdiSpecDirs": []}', False),
        ('{"containerd": {}}', False),
        ('{"containerd": {}, "cdiSpecDirs": ["/var/run/cdi"]}', True),
        ("[crio]\n", None),
        ("", None),
        ("[]", None),
    ],
)
def test_whether_a_runtime_resolves_cdi_names_is_read_from_its_own_word(config: str, resolves: bool | None) -> None:
    assert resolves_cdi(config) is resolves


def test_what_a_runtime_said_of_cdi_names_stays_while_it_is_away_and_is_asked_again_afterwards(socket: Path) -> None:
    runtime = ContainerRuntime(socket, timeout=1.0)
    said: list[bool | None] = [runtime.resolves_cdi]
    for config in ('{"containerd": {}, "enableCDI": false}', None, '{"containerd": {}, "enableCDI": true}', None, ""):
        if config is None:
            with pytest.raises(Unavailable):
                asyncio.run(runtime.sandboxes())
        else:

            async def status(request: object, context: Context, config: str = config) -> api_pb2.StatusResponse:
                return api_pb2.StatusResponse(info={"config": config})

            asyncio.run(asked(socket, runtime=runtime, ListPodSandbox=two, Status=status))
        said.append(runtime.resolves_cdi)
    assert said == [False, False, False, True, True, None]
