"""The container runtime's list of sandboxes, and its version, over the Container Runtime Interface.

A sandbox is in the list from the end of its making, some time after its ADD, until the runtime forgets it: so a
container ID that was in the list, or had the time to come into it, and is not there will have no DEL any more.
Asked for nothing else: kubelet leads the runtime.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from agent.errors import Unavailable
from agent.model.allocation import PodRef
from proto.cri.v1 import api_pb2, api_pb2_grpc

CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 16 << 20),
)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A pod's sandbox. Its ID is the container ID of CNI calls."""

    sandbox_id: str
    pod: PodRef
    ready: bool
    """Whether it runs; one that does not is still to be stopped or removed by kubelet."""


class ContainerRuntime:
    """A client that connects for each question: it is asked once a minute, and runtimes restart."""

    def __init__(self, socket: Path, timeout: float = 2.0) -> None:
        self.socket = socket
        self.timeout = timeout
        self.problem: str | None = None
        """Why the last question failed; None if the runtime answered it."""
        self.resolves_cdi: bool | None = False
        """Whether it resolves CDI names: no until it has answered, then as it said last; None if it does not say."""
        self._has_said = False
        """Whether it has answered that since it was away last. Another answer takes a restart of it."""

    async def sandboxes(self) -> tuple[Sandbox, ...]:
        """List all sandboxes that the runtime knows, running or not. Raises Unavailable."""
        try:
            async with self._asked("for its sandboxes") as stub:
                answer = await stub.ListPodSandbox(api_pb2.ListPodSandboxRequest())
                if not self._has_said:
                    with contextlib.suppress(grpc.aio.AioRpcError):  # it is asked again; nobody waits for it
                        status = await stub.Status(api_pb2.StatusRequest(verbose=True))
                        self.resolves_cdi = resolves_cdi(status.info.get("config", ""))
                        self._has_said = True
        except Unavailable:
            self._has_said = False
            raise
        return tuple(_sandbox(item) for item in answer.items)

    async def described(self) -> tuple[str, bool | None]:
        """Return its version, and whether it resolves CDI names (None: it does not say). Raises Unavailable."""
        async with self._asked("for its version and configuration") as stub:
            version = await stub.Version(api_pb2.VersionRequest())
            status = await stub.Status(api_pb2.StatusRequest(verbose=True))
        return str(version.runtime_version), resolves_cdi(status.info.get("config", ""))

    @asynccontextmanager
    async def _asked(self, what: str) -> AsyncIterator[api_pb2_grpc.RuntimeServiceAsyncStub]:
        try:
            async with (
                asyncio.timeout(self.timeout),
                grpc.aio.insecure_channel(f"unix:{self.socket}", options=CHANNEL_OPTIONS) as channel,
            ):
                stub: api_pb2_grpc.RuntimeServiceAsyncStub = api_pb2_grpc.RuntimeServiceStub(channel)
                yield stub
            self.problem = None
        except TimeoutError as error:
            self.problem = f"the container runtime at {self.socket} did not answer in {self.timeout:g} s"
            raise Unavailable(self.problem) from error
        except grpc.aio.AioRpcError as error:
            self.problem = (
                f"the container runtime at {self.socket} cannot be asked {what}: {error.code().name}:"
                f" {error.details()}; runtimeSocket must name the runtime's own socket"
            )
            raise Unavailable(self.problem) from error


def resolves_cdi(config: str) -> bool | None:
    """Read what a runtime tells of its configuration. None for CRI-O, which resolves them, and does not speak of it.

    containerd before 1.7 has neither key; where it can only be on, there are folders.
    """
    try:
        said = json.loads(config)
    except ValueError:
        return None
    if not isinstance(said, dict) or "containerd" not in said:
        return None
    return bool(said.get("enableCDI", "cdiSpecDirs" in said))


def _sandbox(item: api_pb2.PodSandbox) -> Sandbox:
    pod = PodRef(item.metadata.namespace, item.metadata.name, item.metadata.uid)
    return Sandbox(item.id, pod, item.state == api_pb2.SANDBOX_READY)
