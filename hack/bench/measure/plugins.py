"""kubelet's calls over the real sockets: a preference, then the grant of what was preferred."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import grpc

from hack.sim.stage import Stage
from measure.figures import Figures, quantile, ratios, spread
from proto.deviceplugin.v1beta1 import api_pb2, api_pb2_grpc

RESOURCES = ("rdma/vf", "rdma/hca")
SIZES = (1, 1, 1, 1, 2, 4, 8)


def measure(stages: Mapping[str, Stage], calls: int, say: Callable[[str], None]) -> Figures:
    """Ask as kubelet does for one container after the other, on nodes half of whose units are in use.

    `stages` is by the prefix of the figures; each agent gets the same calls, in turn with the others.
    """
    say(f"device plugins: {calls} times GetPreferredAllocation and Allocate, in turn for {' and '.join(RESOURCES)}")
    chance = random.Random(7)
    preferred: dict[str, list[float]] = {name: [] for name in stages}
    allocate: dict[str, list[float]] = {name: [] for name in stages}
    with ExitStack() as stack:
        clients = {
            (name, resource): stack.enter_context(closing(_Client(stage.folder / "kubelet/device-plugins", resource)))
            for name, stage in stages.items()
            for resource in RESOURCES
        }
        for client in clients.values():
            client.grant(client.units[:1])  # connected, and the code paths warm
        for call in range(calls):
            resource = RESOURCES[call % len(RESOURCES)]
            units = clients["", resource].units
            free, size = chance.sample(units, len(units) // 2), chance.choice(SIZES)
            for name in sorted(stages, reverse=bool(call % 4 // 2)):
                client = clients[name, resource]
                began = time.perf_counter()
                chosen = client.prefer(free, size)
                asked = time.perf_counter()
                client.grant(chosen)
                granted = time.perf_counter()
                preferred[name].append((asked - began) * 1000)
                allocate[name].append((granted - asked) * 1000)
                if len(chosen) != size:
                    raise RuntimeError(f"{size} units were asked for, {len(chosen)} preferred")
    figures: Figures = {}
    for name in stages:
        figures |= {**spread(f"{name}allocate", allocate[name]), **spread(f"{name}preferred", preferred[name])}
        figures |= {
            f"{name}allocate_max_ms": quantile(allocate[name], 1),
            f"{name}preferred_max_ms": quantile(preferred[name], 1),
        }
    return {**figures, **ratios(figures, "allocate", "preferred")}


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
