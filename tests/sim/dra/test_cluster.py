"""What the stand-in's kubelet asks of an API server over HTTP."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.sim.cluster.apiserver import ApiServerStandIn
from hack.sim.dra.cluster import ClusterFailed, HttpCluster
from tests import waiting
from tests.awaiting import until
from tests.sim.cluster.dra_documents import CLAIMS, SLICES, allocated, claim, resource_slice
from tests.sim.cluster.test_apiserver import call
from tests.sim.dra.dummy import DummyClaims, dummy_door
from tests.sim.dra.rig import NIC_DRIVER, TIMES

JSON = "application/json"


@pytest.fixture
def server() -> Iterator[ApiServerStandIn]:
    with ApiServerStandIn() as running:
        yield running


def url(server: ApiServerStandIn) -> str:
    return f"http://127.0.0.1:{server.port}"


def put_claim(server: ApiServerStandIn, pod_uid: str) -> str:
    """Create a claim and allocate it. Returns its UID."""
    result = {"driver": NIC_DRIVER, "pool": "n", "device": "vf-1"}
    assert call(server.port, "POST", CLAIMS, claim(), JSON)[0] == 201
    assert call(server.port, "PUT", f"{CLAIMS}/c/status", allocated(result, pod=pod_uid), JSON)[0] == 200
    uid: str = call(server.port, "GET", f"{CLAIMS}/c")[1]["metadata"]["uid"]
    return uid


def put_slice(server: ApiServerStandIn, name: str, driver: str, node: str) -> None:
    document = resource_slice(name, driver=driver, node=node)
    assert call(server.port, "PATCH", f"{SLICES}/{name}?fieldManager=d&force=true", document)[0] == 201


def slices(server: ApiServerStandIn) -> set[str]:
    return {item["metadata"]["name"] for item in call(server.port, "GET", SLICES)[1]["items"]}


def test_a_claim_is_read_or_is_not_there(server: ApiServerStandIn) -> None:
    uid = put_claim(server, "uid-of-p")
    cluster = HttpCluster(url(server), "n")
    found = cluster.claim("ns", "c")
    assert found is not None
    assert (found["metadata"]["uid"], found["status"]["reservedFor"][0]["uid"]) == (uid, "uid-of-p")
    assert cluster.claim("ns", "another") is None


def test_a_wipe_takes_the_nodes_slices_of_one_driver_or_of_all(server: ApiServerStandIn) -> None:
    for name, driver, node in (("a", "d.io", "n"), ("b", "e.io", "n"), ("c", "d.io", "m")):
        put_slice(server, name, driver, node)
    cluster = HttpCluster(url(server), "n")
    cluster.wipe("d.io")
    assert slices(server) == {"b", "c"}
    cluster.wipe("")
    assert slices(server) == {"c"}


def test_an_api_server_that_is_away_is_no_empty_one() -> None:
    with ApiServerStandIn() as server:
        cluster = HttpCluster(url(server), "n")
    with pytest.raises(ClusterFailed):
        cluster.claim("ns", "c")
    with pytest.raises(ClusterFailed):
        cluster.wipe("")


def test_as_a_process_it_runs_a_pod_with_a_claim_and_reads_its_checkpoint_back(
    server: ApiServerStandIn, short_folder: Path
) -> None:
    uid = put_claim(server, "uid-of-p")
    manifests = short_folder / "manifests"
    manifests.mkdir()
    status = short_folder / "status" / "ns_p.json"
    words = {"dir": short_folder, "manifests": manifests, "status": status.parent, "netns-dir": short_folder / "netns"}
    words |= {"api-server": url(server), "node": "n"}  # type: ignore[dict-item]
    process = subprocess.Popen(
        [sys.executable, "-m", "hack.sim.kubelet"]
        + [part for name, value in words.items() for part in (f"--{name}", str(value))],
        cwd=Path(__file__).parents[3],
        stderr=subprocess.PIPE,
        text=True,
    )
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "ns", "uid": "uid-of-p"},
        "spec": {
            "resourceClaims": [{"name": "rails", "resourceClaimName": "c"}],
            "containers": [{"name": "main", "resources": {"claims": [{"name": "rails", "request": "nic"}]}}],
        },
    }

    async def work() -> None:
        await until(lambda: (short_folder / "plugins_registry").is_dir())
        claims = DummyClaims(NIC_DRIVER, HttpCluster(url(server), "n").claim)
        door = dummy_door(claims, NIC_DRIVER, "n", short_folder, TIMES)
        running = asyncio.ensure_future(door.run())
        await until(lambda: door.registered)
        (manifests / "p.json").write_text(json.dumps(pod))
        await until(lambda: status.exists() and json.loads(status.read_text())["phase"] == "Running")
        (container,) = json.loads(status.read_text())["containers"]
        assert container["cdi_devices"] == [f"k8s.{NIC_DRIVER}/claim={uid}-vf-1"]
        process.send_signal(signal.SIGUSR1)
        (manifests / "p.json").unlink()
        await until(lambda: not status.exists())
        assert claims.prepared == {}
        door.close()
        await running

    try:
        waiting.until(lambda: status.parent.is_dir())
        asyncio.run(work())
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
