"""A client of the Container Runtime Interface: what kubelet asks of a runtime for a pod, one method a call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from proto.cri.v1 import api_pb2, api_pb2_grpc

CALL_SECONDS = 60.0
CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
)


class RuntimeRefused(Exception):
    """The runtime answered with an error; its text is what kubelet would put into the pod's events."""


class Done(NamedTuple):
    """The end of a program that ran in a container."""

    status: int
    stdout: str
    stderr: str


class Cri:
    """One connection to a runtime. Each call raises RuntimeRefused, and waits for a runtime that is starting."""

    def __init__(self, socket: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix:{socket}", options=CHANNEL_OPTIONS)
        self._runtime: api_pb2_grpc.RuntimeServiceStub = api_pb2_grpc.RuntimeServiceStub(self._channel)
        self._images: api_pb2_grpc.ImageServiceStub = api_pb2_grpc.ImageServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def version(self) -> str:
        return str(self._call(self._runtime.Version, api_pb2.VersionRequest()).runtime_version)

    def conditions(self) -> dict[str, tuple[bool, str]]:
        """What the runtime says of itself: RuntimeReady and NetworkReady, each with its message."""
        answer = self._call(self._runtime.Status, api_pb2.StatusRequest())
        return {c.type: (c.status, c.message) for c in answer.status.conditions}

    def has_image(self, name: str) -> bool:
        request = api_pb2.ImageStatusRequest(image=api_pb2.ImageSpec(image=name))
        return bool(self._call(self._images.ImageStatus, request).HasField("image"))

    # ---------------------------------------------------------------- sandboxes

    def run_sandbox(self, config: api_pb2.PodSandboxConfig) -> str:
        request = api_pb2.RunPodSandboxRequest(config=config)
        return str(self._call(self._runtime.RunPodSandbox, request).pod_sandbox_id)

    def stop_sandbox(self, sandbox: str) -> None:
        self._call(self._runtime.StopPodSandbox, api_pb2.StopPodSandboxRequest(pod_sandbox_id=sandbox))

    def remove_sandbox(self, sandbox: str) -> None:
        self._call(self._runtime.RemovePodSandbox, api_pb2.RemovePodSandboxRequest(pod_sandbox_id=sandbox))

    def sandboxes(self) -> dict[str, bool]:
        """All sandboxes the runtime knows: whether each is ready."""
        items = self._call(self._runtime.ListPodSandbox, api_pb2.ListPodSandboxRequest()).items
        return {item.id: item.state == api_pb2.SANDBOX_READY for item in items}

    def sandbox_info(self, sandbox: str) -> dict[str, Any]:
        """What the runtime tells for the curious: pid, runtimeSpec, cniResult."""
        request = api_pb2.PodSandboxStatusRequest(pod_sandbox_id=sandbox, verbose=True)
        document: dict[str, Any] = json.loads(self._call(self._runtime.PodSandboxStatus, request).info["info"])
        return document

    # --------------------------------------------------------------- containers

    def create_container(
        self, sandbox: str, container: api_pb2.ContainerConfig, config: api_pb2.PodSandboxConfig
    ) -> str:
        request = api_pb2.CreateContainerRequest(pod_sandbox_id=sandbox, config=container, sandbox_config=config)
        return str(self._call(self._runtime.CreateContainer, request).container_id)

    def start_container(self, container: str) -> None:
        self._call(self._runtime.StartContainer, api_pb2.StartContainerRequest(container_id=container))

    def container_status(self, container: str) -> api_pb2.ContainerStatus:
        request = api_pb2.ContainerStatusRequest(container_id=container)
        status: api_pb2.ContainerStatus = self._call(self._runtime.ContainerStatus, request).status
        return status

    def execute(self, container: str, *command: str) -> Done:
        request = api_pb2.ExecSyncRequest(container_id=container, cmd=command, timeout=20)
        answer = self._call(self._runtime.ExecSync, request)
        return Done(answer.exit_code, answer.stdout.decode(), answer.stderr.decode())

    def _call(self, call: Any, request: Any) -> Any:
        try:
            return call(request, timeout=CALL_SECONDS, wait_for_ready=True)
        except grpc.RpcError as error:
            raise RuntimeRefused(str(error.details())) from error


def sandbox_config(
    name: str, uid: str, *, attempt: int = 0, logs: Path | None = None, cgroup: str = ""
) -> api_pb2.PodSandboxConfig:
    """What kubelet says of a pod when it asks for its sandbox."""
    return api_pb2.PodSandboxConfig(
        metadata=api_pb2.PodSandboxMetadata(name=name, uid=uid, namespace="default", attempt=attempt),
        hostname=name,
        log_directory=str(logs) if logs is not None else "",
        linux=api_pb2.LinuxPodSandboxConfig(cgroup_parent=cgroup),
    )


def container_config(
    granted: Mapping[str, Any], image: str, command: Sequence[str], attempt: int = 0
) -> api_pb2.ContainerConfig:
    """What kubelet says of a container, with all that device plugins answered for it."""
    return api_pb2.ContainerConfig(
        metadata=api_pb2.ContainerMetadata(name=granted["name"], attempt=attempt),
        image=api_pb2.ImageSpec(image=image),
        command=command,
        envs=[api_pb2.KeyValue(key=key, value=value.encode()) for key, value in granted["envs"].items()],
        devices=[
            api_pb2.Device(container_path=n["container"], host_path=n["host"], permissions=n["permissions"])
            for n in granted["device_nodes"]
        ],
        mounts=[
            api_pb2.Mount(container_path=m["container"], host_path=m["host"], readonly=m["read_only"])
            for m in granted["mounts"]
        ],
        CDI_devices=[api_pb2.CDIDevice(name=name) for name in granted["cdi_devices"]],
        log_path=f"{granted['name']}.log",
    )
