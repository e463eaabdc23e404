"""The stand-in's pods and sandboxes, with real network namespaces and Debian's CNI plugins."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hack.sim.kubelet import Kubelet
from hack.sim.pod_life import Timing
from hack.sim.pods import Container, PodSpec
from hack.sim.runtime import CniRunner, remove_netns
from tests.awaiting import until

pytestmark = pytest.mark.usefixtures("own_network")

POD = PodSpec("default", "p", (("note", "hello"),), (), (Container("main"),))

RECORDER = """#!/bin/sh
# A CNI plugin that notes its calls.
here={folder}
config=$(cat)
{{
    printf '{{"command":"%s","container":"%s","netns":"%s","args":"%s","ifname":"%s","config":%s}}\\n' \\
        "$CNI_COMMAND" "$CNI_CONTAINERID" "$CNI_NETNS" "$CNI_ARGS" "$CNI_IFNAME" "$config"
}} >> "$here/calls"
if [ "$CNI_COMMAND" = ADD ]; then
    echo '{{"cniVersion":"1.0.0","interfaces":[{{"name":"eth0"}}],"by":"'"$(basename "$0")"'"}}'
fi
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="nf-"))
    yield path
    for pinned in (path / "netns").glob("*"):
        remove_netns(pinned)
    shutil.rmtree(path)


def recorders(folder: Path, *names: str, **more: Any) -> CniRunner:
    for name in names:
        plugin = folder / "bin" / name
        plugin.parent.mkdir(exist_ok=True)
        plugin.write_text(RECORDER.format(folder=folder))
        plugin.chmod(0o755)
    conflist, plugins = folder / "10-test.conflist", [{"type": name, **more} for name in names]
    conflist.write_text(json.dumps({"name": "test", "cniVersion": "1.0.0", "plugins": plugins}))
    return CniRunner(conflist, [folder / "bin"])


def calls(folder: Path) -> list[dict[str, Any]]:
    path = folder / "calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kubelet(folder: Path, runner: CniRunner) -> Kubelet:
    timing = Timing(poll=0.02, sandbox_retry=0.05, later_delete=0.05)
    return Kubelet(folder, netns_dir=folder / "netns", runner=runner, status_dir=folder / "status", timing=timing)


async def test_a_sandbox_sees_the_calls_that_a_runtime_makes(folder: Path) -> None:
    capability = {"capabilities": {"io.kubernetes.cri.pod-annotations": True}}
    node = kubelet(folder, recorders(folder, "first", "second", **capability))
    await node.start()
    pod = node.create(POD)
    await until(lambda: pod.phase == "Running")
    assert pod.sandbox is not None
    assert pod.sandbox.netns.exists()
    await node.delete(POD.key)
    assert not pod.sandbox.netns.exists()
    await node.close()
    seen = calls(folder)
    assert [(c["command"], c["config"]["type"], bool(c["netns"])) for c in seen] == [
        ("ADD", "first", True),
        ("ADD", "second", True),
        ("DEL", "second", True),
        ("DEL", "first", True),
        ("DEL", "second", False),
        ("DEL", "first", False),
        ("DEL", "second", False),
        ("DEL", "first", False),
    ]
    first, second, delete = seen[0], seen[1], seen[2]
    assert "prevResult" not in first["config"]
    assert second["config"]["prevResult"]["by"] == "first"
    assert second["config"]["runtimeConfig"] == {"io.kubernetes.cri.pod-annotations": {"note": "hello"}}
    assert (second["config"]["name"], second["config"]["cniVersion"]) == ("test", "1.0.0")
    assert delete["config"]["prevResult"]["by"] == "second"
    assert all("prevResult" not in c["config"] for c in seen[4:])
    assert len({c["container"] for c in seen}) == 1
    arguments = dict(part.split("=") for part in first["args"].split(";"))
    assert arguments["K8S_POD_NAME"] == "p"
    assert arguments["K8S_POD_INFRA_CONTAINER_ID"] == first["container"]
    assert arguments["IgnoreUnknown"] == "1"
    assert set(arguments) >= {"K8S_POD_NAMESPACE", "K8S_POD_UID"}
