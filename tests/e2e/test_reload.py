"""The configuration changes while the agent runs and pods hold devices."""

from __future__ import annotations

import os
from typing import Any

import pytest

from cni.protocol import TRY_AGAIN_LATER
from hack.sim.stage import Stage, wait
from tests.e2e.test_pods import allocatable

VFS = {"name": "rdma/vf", "kind": "vf", "select": {"vendors": ["15b3"]}, "network": "rails"}
HCA = {"name": "rdma/hca", "kind": "hca", "select": {"vendors": ["15b3"]}}


@pytest.fixture
def configured(stage: Stage) -> Stage:
    """A stage whose configuration is mounted as kubelet mounts a ConfigMap."""
    stage.build_node("h100-8gpu")
    stage.start_kubelet("--seed", "3")
    (stage.folder / "config.yaml").unlink()
    (stage.folder / "config.yaml").symlink_to("volume/..data/config.yaml")
    mount(stage, {"resources": [VFS]})
    stage.start_agent()
    stage.await_ready()
    return stage


def mount(stage: Stage, document: dict[str, Any]) -> None:
    """Swap the folder that the file is in, as kubelet does (pkg/volume/util/atomic_writer.go)."""
    volume = stage.folder / "volume"
    volume.mkdir(exist_ok=True)
    version = volume / f"..{len(list(volume.iterdir())) + 2000}"
    version.mkdir()
    (version / "config.yaml").write_text(stage.configuration(document))
    fresh = volume / "..data_tmp"
    fresh.symlink_to(version.name)
    os.rename(fresh, volume / "..data")


def capacity(stage: Stage) -> dict[str, int]:
    """Tell what the agent offers."""
    return {r["name"]: r["units"] for r in stage.status()["resources"]}


def unhealthy(stage: Stage, name: str) -> list[tuple[str, str]]:
    (resource,) = [r for r in stage.status()["resources"] if r["name"] == name]
    return [(unit["unit"], unit["reason"]) for unit in resource["unhealthy"]]


def metric(stage: Stage, line: str) -> bool:
    return line in stage.fetch("/metrics").splitlines()


def new_sandbox(stage: Stage, pod: str, netns: str) -> dict[str, Any]:
    """Ask the relay as a runtime does for another sandbox of a pod, chained after the cluster's network."""
    previous = {"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": netns}], "ips": []}
    conf = {"cniVersion": "1.0.0", "name": "cluster", "prevResult": previous}
    return stage.call("ADD", conf, "another-sandbox", netns, "eth0", pod)[1]


def test_resources_come_and_go_while_a_pod_keeps_what_it_has(configured: Stage) -> None:
    stage = configured
    netns = stage.run_pod("a", {"rdma/vf": 1})["netns"]
    (held,) = [row["device"] for row in stage.status()["attachments"]]
    mount(stage, {"resources": [HCA, {**VFS, "name": "rdma/other"}]})
    wait("the new resources", lambda: capacity(stage) == {"rdma/hca": 504, "rdma/other": 64} or None)
    wait("the count", lambda: metric(stage, 'nodefabric_config_reload_total{outcome="applied"} 1.0') or None)
    wait("kubelet to know it", lambda: allocatable(stage, "rdma/other") == 63 or None)
    assert unhealthy(stage, "rdma/other") == [(held, "Held")]
    assert [(row["device"], row["state"]) for row in stage.status()["attachments"]] == [(held, "attached")]
    refused = new_sandbox(stage, "a", netns)
    assert refused["code"] == TRY_AGAIN_LATER
    assert f"has {held} of rdma/vf, and the configuration has no resource of this name any more" in refused["msg"]
    stage.run_pod("b", {"rdma/other": 1})
    assert [row["device"] for row in stage.status()["attachments"] if row["pod"] == "default/b"] != [held]
    stage.end_pods("a", "b")
    assert wait("both VFs back", lambda: stage.status()["attachments"] == [] or None)


def test_a_wrong_file_changes_nothing_and_is_said_until_it_is_mended(configured: Stage) -> None:
    stage = configured
    mount(stage, {"resources": [VFS, {**HCA, "kind": "hcas"}]})
    said = wait("the problem", lambda: stage.status()["obstacles"].get("config"))
    assert "the former one stays in effect" in said
    assert "resources[1].kind" in said
    assert capacity(stage) == {"rdma/vf": 64}
    wait("the count", lambda: metric(stage, 'nodefabric_config_reload_total{outcome="refused"} 1.0') or None)
    assert metric(stage, "nodefabric_config_last_reload_success 0.0")
    assert stage.fetch("/readyz")  # it would raise
    mount(stage, {"resources": [VFS, HCA]})
    wait("the repair", lambda: capacity(stage) == {"rdma/hca": 504, "rdma/vf": 64} or None)
    wait("a word of it", lambda: "config" not in stage.status()["obstacles"] or None)
    wait("the success", lambda: metric(stage, "nodefabric_config_last_reload_success 1.0") or None)
