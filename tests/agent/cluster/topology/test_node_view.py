from __future__ import annotations

import asyncio
import threading
from typing import Any

from agent.cluster.apiserver import ApiServer, ObjectKind
from agent.cluster.topology.node_view import RETRY_SECONDS, NodeMetadata, OwnNode
from agent.errors import Unavailable

MINE = {
    "manager": "nodefabric",
    "operation": "Apply",
    "fieldsV1": {"f:metadata": {"f:labels": {"f:example.com/rails": {}}}},
}


class FakeApi(ApiServer):
    def __init__(self) -> None:
        self.calls = 0
        self.failing = False
        self.gate = threading.Event()

    def metadata(self, kind: ObjectKind, name: str) -> dict[str, Any]:
        self.calls += 1
        assert self.gate.wait(20)
        if self.failing:
            raise Unavailable("no answer")
        labels = {"example.com/rails": "8", "zone": "a"}
        return {"uid": f"uid-{self.calls}", "labels": labels, "managedFields": [MINE]}


async def test_it_is_read_once_for_all_that_ask_again_when_it_is_old_and_known_while_nobody_answers() -> None:
    now, api = 100.0, FakeApi()
    node = OwnNode(api, "worker-1", 600.0, lambda: now)
    asking = [asyncio.create_task(node.read()) for _ in range(3)]
    await asyncio.sleep(0)
    api.gate.set()
    known = NodeMetadata("uid-1", {"example.com/rails": "8"}, {})
    assert await asyncio.gather(*asking) == [known] * 3
    now += 599
    assert await node.read() == known
    assert api.calls == 1
    now, api.failing = now + 1, True
    for _ in range(2):
        assert await node.read() == known
    assert (node.problem, api.calls) == ("no answer", 2)
    now, api.failing = now + RETRY_SECONDS, False
    assert (await node.read() or known).uid == "uid-3"
    assert node.problem == ""
