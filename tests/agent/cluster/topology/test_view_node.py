from __future__ import annotations

import asyncio
import threading
from typing import Any

from agent.cluster.apiserver import ApiServer, ObjectKind
from agent.cluster.topology.view import RETRY_SECONDS, NodeMetadata, OwnNode
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
        self.gate.set()

    def metadata(self, kind: ObjectKind, name: str) -> dict[str, Any]:
        self.calls += 1
        assert self.gate.wait(20)
        if self.failing:
            raise Unavailable("no answer")
        labels = {"example.com/rails": "8", "zone": "a"}
        return {"uid": f"uid-{self.calls}", "labels": labels, "managedFields": [MINE]}


class Rig:
    def __init__(self) -> None:
        self.now = 100.0
        self.api = FakeApi()
        self.node = OwnNode(self.api, "worker-1", 600.0, lambda: self.now)


async def test_it_is_read_once_and_again_when_it_is_old() -> None:
    rig = Rig()
    assert await rig.node.read() == NodeMetadata("uid-1", {"example.com/rails": "8"}, {})
    rig.now += 599
    await rig.node.read()
    assert rig.api.calls == 1
    rig.now += 1
    found = await rig.node.read()
    assert found is not None
    assert found.uid == "uid-2"


async def test_several_that_ask_at_once_share_one_answer() -> None:
    rig = Rig()
    rig.api.gate.clear()
    asking = [asyncio.create_task(rig.node.read()) for _ in range(3)]
    await asyncio.sleep(0)
    rig.api.gate.set()
    assert {found.uid for found in await asyncio.gather(*asking) if found is not None} == {"uid-1"}
    assert rig.api.calls == 1


async def test_while_nobody_answers_it_is_asked_seldom_and_what_was_known_stays() -> None:
    rig = Rig()
    rig.api.failing = True
    assert await rig.node.read() is None
    assert rig.node.problem == "no answer"
    await rig.node.read()
    assert rig.api.calls == 1
    rig.api.failing = False
    rig.now += RETRY_SECONDS
    known = await rig.node.read()
    assert rig.node.problem == ""
    rig.api.failing = True
    rig.now += 600
    assert await rig.node.read() == known
