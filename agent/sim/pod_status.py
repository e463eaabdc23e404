"""What the kubelet stand-in knows of one pod, and how it is shown."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.sim.devices import DeviceManager
from agent.sim.pods import PodSpec
from agent.sim.runtime import Sandbox
from proto.deviceplugin.v1beta1 import api_pb2


@dataclass(slots=True)
class Pod:
    """One pod from admission to its last DEL."""

    uid: str
    spec: PodSpec
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    active: bool = True
    """Counts for devices and PodResources."""
    sandbox: Sandbox | None = None
    result: Mapping[str, Any] | None = None
    attempts: int = 0
    deletes: int = 0
    timings: dict[str, float] = field(default_factory=dict)
    """Milliseconds."""
    ending: asyncio.Event = field(default_factory=asyncio.Event)


def describe(pod: Pod, devices: DeviceManager) -> dict[str, Any]:
    """Tell all about a pod, ready for JSON."""
    return {
        "namespace": pod.spec.namespace,
        "name": pod.spec.name,
        "uid": pod.uid,
        "phase": pod.phase,
        "reason": pod.reason,
        "message": pod.message,
        "containers": [
            *({**_container(pod.uid, c.name, devices), "init": True} for c in pod.spec.init_containers),
            *({**_container(pod.uid, c.name, devices), "init": False} for c in pod.spec.containers),
        ],
        "container_id": pod.sandbox.container_id if pod.sandbox else None,
        "netns": str(pod.sandbox.netns) if pod.sandbox else None,
        "cni_result": pod.result,
        "attempts": pod.attempts,
        "deletes": pod.deletes,
        "timings_ms": {name: round(value, 2) for name, value in pod.timings.items()},
    }


def _container(pod_uid: str, name: str, devices: DeviceManager) -> dict[str, Any]:
    """What the runtime would be told. The first of two equal keys wins, as in kubelet."""
    held = devices.of_container(pod_uid, name)
    answers = [api_pb2.ContainerAllocateResponse.FromString(h.answer) for h in held]
    envs: dict[str, str] = {}
    annotations: dict[str, str] = {}
    for answer in answers:
        envs = {**answer.envs, **envs}
        annotations = {**answer.annotations, **annotations}
    nodes = {
        d.container_path: {"container": d.container_path, "host": d.host_path, "permissions": d.permissions}
        for answer in reversed(answers)
        for d in answer.devices
    }
    mounts = {
        m.container_path: {"container": m.container_path, "host": m.host_path, "read_only": m.read_only}
        for answer in reversed(answers)
        for m in answer.mounts
    }
    return {
        "name": name,
        "devices": {h.resource_name: list(h.ids) for h in sorted(held, key=lambda h: h.resource_name)},
        "envs": dict(sorted(envs.items())),
        "annotations": dict(sorted(annotations.items())),
        "device_nodes": [nodes[path] for path in sorted(nodes)],
        "mounts": [mounts[path] for path in sorted(mounts)],
        "cdi_devices": [c.name for answer in answers for c in answer.cdi_devices],
    }


@contextmanager
def timed(pod: Pod, name: str) -> Iterator[None]:
    """Note the milliseconds spent inside."""
    began = time.monotonic()
    try:
        yield
    finally:
        pod.timings[name] = (time.monotonic() - began) * 1000


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Replace a file so that a reader sees the old or the new text, never half of one."""
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(json.dumps(document, indent=2))
    scratch.replace(path)
