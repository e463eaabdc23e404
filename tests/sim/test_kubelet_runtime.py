"""The stand-in's sandboxes, with real network namespaces and Debian's CNI plugins."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hack.sim.kubelet import Kubelet
from hack.sim.pod_life import Timing
from hack.sim.pods import Container, PodSpec
from hack.sim.runtime import CniRunner, remove_netns
from tests import waiting
from tests.awaiting import until

pytestmark = pytest.mark.usefixtures("own_network")

DEBIAN_PLUGINS = Path("/usr/lib/cni")
POD = PodSpec("default", "p", (("note", "hello"),), (), (Container("main"),))

RECORDER = """#!/bin/sh
# A CNI plugin that notes its calls; it fails ADD as often as the file `fail` has lines.
here={folder}
config=$(cat)
{{
    printf '{{"command":"%s","container":"%s","netns":"%s","args":"%s","ifname":"%s","config":%s}}\\n' \\
        "$CNI_COMMAND" "$CNI_CONTAINERID" "$CNI_NETNS" "$CNI_ARGS" "$CNI_IFNAME" "$config"
}} >> "$here/calls"
if [ "$CNI_COMMAND" = ADD ] && [ -s "$here/fail" ]; then
    sed -i 1d "$here/fail"
    echo '{{"cniVersion":"1.0.0","code":11,"msg":"try again later","details":"told to"}}'
    exit 1
fi
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
    return runner(folder, [{"type": name, **more} for name in names], folder / "bin")


def runner(folder: Path, plugins: list[dict[str, Any]], path: Path) -> CniRunner:
    conflist = folder / "10-test.conflist"
    conflist.write_text(json.dumps({"name": "test", "cniVersion": "1.0.0", "plugins": plugins}))
    return CniRunner(conflist, [path])


def calls(folder: Path) -> list[dict[str, Any]]:
    path = folder / "calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kubelet(folder: Path, runner: CniRunner) -> Kubelet:
    timing = Timing(poll=0.02, sandbox_retry=0.05, later_delete=0.05)
    return Kubelet(folder, netns_dir=folder / "netns", runner=runner, status_dir=folder / "status", timing=timing)


def test_a_sandbox_sees_the_calls_that_a_runtime_makes(folder: Path) -> None:
    capability = {"capabilities": {"io.kubernetes.cri.pod-annotations": True}}
    node = kubelet(folder, recorders(folder, "first", "second", **capability))

    async def work() -> None:
        await node.start()
        pod = node.create(POD)
        await until(lambda: pod.phase == "Running")
        assert pod.sandbox is not None
        assert pod.sandbox.netns.exists()
        await node.delete(POD.key)
        assert not pod.sandbox.netns.exists()
        await node.close()

    asyncio.run(work())
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


def test_a_failed_add_is_deleted_at_once_and_retried_under_new_names(folder: Path) -> None:
    node = kubelet(folder, recorders(folder, "only"))
    (folder / "fail").write_text("1\n2\n")

    async def work() -> None:
        await node.start()
        pod = node.create(POD)
        await until(lambda: pod.phase == "Running")
        assert pod.attempts == 3
        await node.close()

    asyncio.run(work())
    seen = [(c["command"], c["container"], c["netns"]) for c in calls(folder)[:5]]
    assert [s[0] for s in seen] == ["ADD", "DEL", "ADD", "DEL", "ADD"]
    assert seen[0][1:] == seen[1][1:]
    assert len({s[1] for s in seen}) == len({s[2] for s in seen}) == 3


def test_a_pods_message_tells_why_its_sandbox_fails(folder: Path) -> None:
    node = kubelet(folder, runner(folder, [{"type": "absent"}], folder / "bin"))

    async def work() -> None:
        await node.start()
        pod = node.create(POD)
        await until(lambda: pod.message)
        status = json.loads((folder / "status" / "default_p.json").read_text())
        assert status["phase"] == "Pending"
        await until(lambda: "failed to find plugin 'absent'" in pod.message)
        await node.close()

    asyncio.run(work())


def test_a_later_pod_of_the_same_name_is_not_disturbed_by_late_dels(folder: Path) -> None:
    node = kubelet(folder, recorders(folder, "only"))

    async def work() -> None:
        await node.start()
        first = node.create(POD)
        await until(lambda: first.phase == "Running")
        ending = node.delete(POD.key)
        await until(lambda: POD.key not in node.pods)
        second = node.create(POD)
        assert second.uid != first.uid
        await ending
        await until(lambda: second.phase == "Running")
        assert (folder / "status" / "default_p.json").exists()
        await node.close()

    asyncio.run(work())


@pytest.mark.skipif(not (DEBIAN_PLUGINS / "ptp").exists(), reason="containernetworking-plugins is not installed")
def test_a_pod_gets_a_real_interface_from_debians_plugins(folder: Path) -> None:
    ptp = {"type": "ptp", "ipam": {"type": "host-local", "subnet": "10.244.7.0/24", "dataDir": str(folder / "ipam")}}
    runner(folder, [ptp], DEBIAN_PLUGINS)
    (folder / "manifests").mkdir()
    (folder / "manifests" / "p.yaml").write_text(
        "{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {containers: [{name: main}]}}"
    )
    arguments = {
        "dir": folder / "kubelet",
        "manifests": folder / "manifests",
        "status": folder / "status",
        "netns-dir": folder / "netns",
        "conflist": folder / "10-test.conflist",
        "cni-path": DEBIAN_PLUGINS,
        "later-delete": "0.05",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "hack.sim.kubelet"]
        + [part for name, value in arguments.items() for part in (f"--{name}", str(value))],
        cwd=Path(__file__).parents[3],
        stderr=subprocess.PIPE,
        text=True,
    )
    status = folder / "status" / "default_p.json"
    try:
        waiting.until(lambda: status.exists() and json.loads(status.read_text())["phase"] == "Running")
        pod = json.loads(status.read_text())
        address = pod["cni_result"]["ips"][0]["address"]
        shown = subprocess.run(
            ["nsenter", f"--net={pod['netns']}", "ip", "-br", "address"], capture_output=True, text=True, check=True
        ).stdout
        assert address in shown
        assert json.loads((folder / "status" / "node.json").read_text()) == {"capacity": {}, "allocatable": {}}
        os.kill(process.pid, signal.SIGUSR1)
        (folder / "manifests" / "p.yaml").unlink()
        waiting.until(lambda: not status.exists())
        assert not Path(pod["netns"]).exists()
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
