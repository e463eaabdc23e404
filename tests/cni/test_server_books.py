"""The server over real books: what a call leaves in them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from cni import protocol
from cni.protocol import Answer, Request
from cni.server import CniServer
from tests.cni.tiny_node import Rig, vf


@pytest.fixture
def ask(rig: Rig) -> Callable[..., Answer]:
    """Ask a CNI server over a node with VFs; nobody listens."""
    server = CniServer(rig.folder / "s", rig.attachments, condition=lambda: None, observe=lambda _: nullcontext())

    def answer(command: str, pod: Path, container_id: str = "c1", **env: str) -> Answer:
        named = {
            "CNI_CONTAINERID": container_id,
            "CNI_IFNAME": "net1",
            "CNI_NETNS": str(pod),
            "CNI_PATH": "/opt/cni/bin",
        }
        conf: dict[str, Any] = {"cniVersion": "1.1.0", "name": "rails", "type": "nodefabric", "deviceID": vf(0)}
        netns = os.open(pod, os.O_RDONLY | os.O_CLOEXEC)
        try:
            request = Request({"CNI_COMMAND": command, **named, **env}, json.dumps(conf).encode(), netns)
            return server.answer(request)
        finally:
            os.close(netns)

    return answer


@pytest.mark.parametrize("name", ["CNI_NETNS", "CNI_ARGS", "CNI_PATH"])
def test_bytes_that_are_no_text_reach_no_books(rig: Rig, ask: Callable[..., Answer], name: str) -> None:
    """The database takes none, and what it refuses it would be told once more with each later row."""
    pod = rig.pod()
    answer = ask("ADD", pod, **{name: "K8S_POD_NAME=\udcff"})
    assert (answer.exit, json.loads(answer.stdout)["code"]) == (1, protocol.INVALID_ENVIRONMENT)
    assert f"{name} must be UTF-8, is 'K8S_POD_NAME=\\udcff'" in json.loads(answer.stdout)["msg"]
    assert ask("ADD", pod, **{name: "K8S_POD_NAME=\u00e4"}).exit == 0
    assert ask("DEL", pod, **{name: "K8S_POD_NAME=\udcff"}) == Answer(0, b"")
    rig.await_back()
    assert ask("ADD", pod, "c2").exit == 0


def test_nothing_is_brought_into_the_namespace_of_the_host(rig: Rig, ask: Callable[..., Answer]) -> None:
    """A path such as /proc/4711/ns/net names another process's once the pod's has ended."""
    before = rig.found()
    answer = ask("ADD", Path("/proc/thread-self/ns/net"))
    assert (answer.exit, json.loads(answer.stdout)["code"]) == (1, protocol.INVALID_ENVIRONMENT)
    assert "is the namespace of the host" in json.loads(answer.stdout)["msg"]
    assert (rig.found(), rig.ledger.attachments()) == (before, ())
