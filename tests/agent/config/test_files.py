"""A configuration made of several files."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.config import Flags
from agent.config.files import Sources
from agent.errors import ConfigError

OWN = "resources: [{name: rdma/vf, kind: vf}]\nrescanSeconds: 7\n"
SRIOV = '{"resourceList": [{"resourceName": "a"}]}'
SHARED = '{"configList": [{"resourceName": "hca", "rdmaHcaMax": 2, "devices": ["ib0"]}], "x": 1}'


@pytest.fixture
def files(tmp_path: Path) -> Sources:
    for name, text in (("own", OWN), ("sriov", SRIOV), ("shared", SHARED)):
        (tmp_path / name).write_text(text)
    return Sources(tmp_path / "own", tmp_path / "sriov", tmp_path / "shared", Flags("x.example"))


def test_the_resources_of_all_files_follow_one_another(files: Sources) -> None:
    read = files.load()
    assert [r.name for r in read.resources] == ["rdma/vf", "x.example/a", "rdma/hca"]
    assert read.rescan_seconds == 7
    assert read.source == str(files)
    assert read.warnings == (
        f"{files.shared}: x: is not a known key",
        f"{files.shared}: configList[0].devices: is deprecated; write selectors.ifNames",
    )


def test_the_problems_of_all_files_are_told_at_once(files: Sources) -> None:
    assert files.own is not None
    assert files.sriov is not None
    files.own.write_text("resources: 7")
    files.sriov.unlink()
    with pytest.raises(ConfigError) as refused:
        files.load()
    assert refused.value.problems == (
        f"{files.own}: resources: must be a list, is 7",
        f"{files.sriov}: cannot be read: No such file or directory",
    )


def test_a_resource_of_two_files_is_refused(files: Sources) -> None:
    assert files.own is not None
    files.own.write_text("resources: [{name: rdma/hca, kind: hca}]")
    with pytest.raises(ConfigError, match="rdma/hca is configured twice"):
        files.load()
