"""A resource's lists of units, as kubelet reads them from the agent."""

from __future__ import annotations

import queue
import re
import threading
import time
from pathlib import Path

import grpc

from proto.deviceplugin.v1beta1 import api_pb2, api_pb2_grpc

DEADLINE_SECONDS = 20.0


class Lists:
    """The lists of one resource, as kubelet would read them."""

    def __init__(self, folder: Path, resource_name: str, *, all_healthy: bool = True) -> None:
        """Open the stream. `all_healthy`: wait until all units are; else those that are not now do not count."""
        socket = next(folder.glob(f"nodefabric-{re.sub('[^a-z0-9]', '?', resource_name)}-*.sock"))
        self._channel = grpc.insecure_channel(f"unix:{socket}")
        self._stream = api_pb2_grpc.DevicePluginStub(self._channel).ListAndWatch(api_pb2.Empty())
        self._seen: queue.SimpleQueue[tuple[float, frozenset[str]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, name="lists", daemon=True)
        self._thread.start()
        self.sick: frozenset[str] = frozenset()
        """Units that were unhealthy from the beginning."""
        if all_healthy:
            self.await_unhealthy(0)
        else:
            self.sick = self._next(time.monotonic() + DEADLINE_SECONDS, "list at all")[1]

    def await_unhealthy(self, units: int) -> float:
        """Wait for a list with so many unhealthy units; return when it was read. Raises RuntimeError."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            at, unhealthy = self._next(deadline, f"list with {units} unhealthy units")
            if len(unhealthy - self.sick) == units:
                return at

    def _next(self, deadline: float, what: str) -> tuple[float, frozenset[str]]:
        try:
            return self._seen.get(timeout=max(deadline - time.monotonic(), 0))
        except queue.Empty:
            raise RuntimeError(f"no {what} came in {DEADLINE_SECONDS:g} s") from None

    def close(self) -> None:
        self._stream.cancel()  # type: ignore[no-untyped-call]
        self._thread.join(DEADLINE_SECONDS)
        self._channel.close()

    def _read(self) -> None:
        try:
            for answer in self._stream:
                at = time.perf_counter()
                self._seen.put((at, frozenset(d.ID for d in answer.devices if d.health == "Unhealthy")))
        except grpc.RpcError:
            return  # cancelled
