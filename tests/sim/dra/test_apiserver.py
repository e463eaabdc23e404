"""The demo's API server, asked by those who ask it there: the agent's client and the kubelet stand-in's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent.cluster.apiserver import CLAIM, NODE, SLICE, ApiServer
from agent.cluster.object_watch import ObjectWatch, Watched
from hack.sim.dra.apiserver import CLAIMS, NODES, Objects, SmallApiServer
from hack.sim.dra.cluster import HttpCluster
from tests import waiting

OURS = {"spec.driver": "nodefabric.io", "spec.nodeName": "n"}


@pytest.fixture
def objects() -> Objects:
    found = Objects()
    found.put(f"{NODES}/n", {"metadata": {"name": "n"}})
    return found


@pytest.fixture
def server(objects: Objects) -> Iterator[SmallApiServer]:
    with closing(SmallApiServer(objects)) as running:
        yield running


@pytest.fixture
def api(server: SmallApiServer, tmp_path: Path) -> Iterator[ApiServer]:
    (tmp_path / "kubeconfig").write_text(server.kubeconfig())
    with closing(ApiServer.from_kubeconfig(tmp_path / "kubeconfig")) as opened:
        yield opened


def slice_of(name: str, node: str = "n", **spec: Any) -> dict[str, Any]:
    head = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name}}
    return {**head, "spec": {"driver": "nodefabric.io", "nodeName": node, **spec}}


def test_what_is_applied_again_keeps_its_uid_and_gets_another_version(api: ApiServer) -> None:
    first = api.apply(SLICE, slice_of("a", devices=[]), force=True)
    second = api.apply(SLICE, slice_of("a", devices=[{"name": "d"}]), force=True)
    assert first["metadata"]["uid"] == second["metadata"]["uid"] != api.metadata(NODE, "n")["uid"]
    assert first["metadata"]["resourceVersion"] != second["metadata"]["resourceVersion"]
    assert second["spec"]["devices"] == [{"name": "d"}]


def test_a_claims_status_is_written_beside_what_it_says_already(api: ApiServer, objects: Objects) -> None:
    claim, name = CLAIM.within("default"), {"name": "c", "namespace": "default"}
    assert api.current(claim, "c") is None
    objects.put(f"{CLAIMS}/c", {"metadata": name, "spec": {"devices": {}}})
    objects.put(f"{CLAIMS}/c/status", {"status": {"allocation": {"devices": {}}}})
    api.apply_status(claim, {"metadata": name, "status": {"devices": [{"device": "d"}]}})
    found = api.current(claim, "c")
    assert found is not None
    assert found["status"] == {"allocation": {"devices": {}}, "devices": [{"device": "d"}]}
    assert found["spec"] == {"devices": {}}


def test_kubelet_reads_claims_and_wipes_the_slices_of_its_node(
    server: SmallApiServer, api: ApiServer, objects: Objects
) -> None:
    api.apply(SLICE, slice_of("a"), force=True)
    api.apply(SLICE, slice_of("b", node="other"), force=True)
    objects.put(f"{CLAIMS}/c", {"metadata": {"name": "c"}})
    kubelet = HttpCluster(server.url, "n")
    assert kubelet.claim("default", "missing") is None
    assert (kubelet.claim("default", "c") or {})["metadata"]["name"] == "c"
    kubelet.wipe("")
    assert [one["metadata"]["name"] for one in objects.slices({})[1]] == ["b"]


def test_a_watch_follows_the_slices_of_one_driver_and_node(api: ApiServer) -> None:
    api.apply(SLICE, slice_of("a"), force=True)
    changed = threading.Event()
    watched = Watched(SLICE, OURS, _version_of, "slices")
    watch = ObjectWatch(api, watched, changed.set)
    watch.start()

    def follows(*names: str) -> bool:
        return [name for name, _ in watch.objects or ()] == list(names)

    waiting.until(lambda: follows("a"))
    api.apply(SLICE, slice_of("b", node="other"), force=True)
    api.apply(SLICE, slice_of("c"), force=True)
    waiting.until(lambda: follows("a", "c"))
    found = dict(watch.objects or ())
    assert api.delete(SLICE, "a", found["a"])
    waiting.until(lambda: follows("c"))
    assert watch.problem is None
    watch.stop()


def _version_of(item: dict[str, Any]) -> tuple[str, str]:
    return item["metadata"]["name"], item["metadata"]["uid"]
