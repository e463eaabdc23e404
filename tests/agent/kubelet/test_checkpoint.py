"""kubelet's checkpoint of devices: read by pod, and never a reason to fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent.kubelet.checkpoint import FILE, Held, containers_of


def write(folder: Path, content: str) -> Path:
    (folder / FILE).parent.mkdir()
    (folder / FILE).write_text(content)
    return folder


def entry(container: str, ids: Any, uid: str = "uid-1", name: str = "rdma/vf") -> dict[str, Any]:
    return {"PodUID": uid, "ContainerName": container, "ResourceName": name, "DeviceIDs": ids, "AllocResp": ""}


def test_the_containers_of_a_pod_are_found_by_its_uid(tmp_path: Path) -> None:
    entries = [
        entry("setup", {"0": ["slot-rdma:vf-0-1"], "1": ["slot-rdma:vf-1-0"]}),
        entry("setup", {"-1": ["GPU-1"]}, name="nvidia.com/gpu"),
        entry("other", {"0": ["slot-rdma:vf-0-2"]}, uid="uid-2"),
        entry("main", {"0": ["slot-rdma:vf-0-3"]}),
    ]
    write(tmp_path, json.dumps({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 1}))
    assert containers_of(tmp_path, "uid-1") == (
        Held("setup", {"rdma/vf": ("slot-rdma:vf-0-1", "slot-rdma:vf-1-0"), "nvidia.com/gpu": ("GPU-1",)}),
        Held("main", {"rdma/vf": ("slot-rdma:vf-0-3",)}),
    )
    assert containers_of(tmp_path, "uid-9") == ()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"Data": null}',
        '{"Data": {"PodDeviceEntries": null}, "Checksum": 0}',
        '{"Data": {"PodDeviceEntries": [1]}}',
        '{"Data": {"PodDeviceEntries": [{"PodUID": "uid-1"}]}}',
        json.dumps({"Data": {"PodDeviceEntries": [entry("setup", 3)]}}),
        json.dumps({"Data": {"PodDeviceEntries": [entry("setup", ["a list, as before 1.20"])]}}),
        '{"Data":' * 100_000,
        "\x00\xff",
    ],
)
def test_no_file_and_one_that_looks_otherwise_tell_nothing(tmp_path: Path, content: str) -> None:
    assert containers_of(tmp_path, "uid-1") == ()
    assert containers_of(write(tmp_path, content), "uid-1") == ()
