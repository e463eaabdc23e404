"""kubelet's calls over the real sockets: a preference, then the grant of what was preferred."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from agent.sim.stage import Stage
from measure.figures import Figures, quantile, spread
from proto.deviceplugin.v1beta1 import api_pb2, api_pb2_grpc

RESOURCES = ("rdma/vf", "rdma/hca")
SIZES = (1, 1, 1, 1, 2, 4, 8)


def measure(stage: Stage, calls: int, say: Callable[[str], None]) -> Figures:
    """Ask as kubelet does for one container after the other, on a node half of whose units are in use."""
    say(f"device plugins: {calls} times GetPreferredAllocation and Allocate, in turn for {' and '.join(RESOURCES)}")
    chance = random.Random(7)
    preferred, allocate = [], []
    folder = stage.folder / "kubelet/device-plugins"
    clients = {name: _Client(folder, name) for name in RESOURCES}
    try:
        for client in clients.values():
            client.grant(client.units[:1])  # connected, and the code paths warm
        for call in range(calls):
            client = clients[RESOURCES[call % len(RESOURCES)]]
            free = chance.sample(client.units, len(client.units) // 2)
            size = chance.choice(SIZES)
            began = time.perf_counter()
            chosen = client.prefer(free, size)
            asked = time.perf_counter()
            client.grant(chosen)
            granted = time.perf_counter()
            preferred.append((asked - began) * 1000)
            allocate.append((granted - asked) * 1000)
            if len(chosen) != size:
                raise RuntimeError(f"{size} units were asked for, {len(chosen)} preferred")
    finally:
        for client in clients.values():
            client.close()
    return {
        **spread("allocate", allocate),
        **spread("preferred", preferred),
        "allocate_max_ms": quantile(allocate, 1),
        "preferred_max_ms": quantile(preferred, 1),
    }


class _Client:
    """kubelet's end of one resource's socket."""

    def __init__(self, folder: Path, resource_name: str) -> None:
        socket = next(folder.glob(f"nodefabric-{resource_name.replace('/', '-')}-*.sock"))
        self._channel = grpc.insecure_channel(f"unix:{socket}")
        self._stub = api_pb2_grpc.DevicePluginStub(self._channel)
        stream = self._stub.ListAndWatch(api_pb2.Empty(), timeout=30)
        self.units = [device.ID for device in next(iter(stream)).devices]
        stream.cancel()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._channel.close()

    def prefer(self, available: list[str], size: int) -> list[str]:
        request = api_pb2.ContainerPreferredAllocationRequest(available_deviceIDs=available, allocation_size=size)
        answer = self._stub.GetPreferredAllocation(
            api_pb2.PreferredAllocationRequest(container_requests=[request]), timeout=30
        )
        return list(answer.container_responses[0].deviceIDs)

    def grant(self, units: list[str]) -> None:
        request = api_pb2.ContainerAllocateRequest(devices_ids=units)
        self._stub.Allocate(api_pb2.AllocateRequest(container_requests=[request]), timeout=30)
