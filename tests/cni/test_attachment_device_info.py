"""The device-info file that a call asks for: written with the attachment, gone with it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent.errors import AgentError
from tests.cni.tiny_node import PF, Rig, vf

ATTACHED = "k8s.cni.cncf.io/devinfo/cni"
CHAINED = {"prevResult": {"cniVersion": "1.1.0", "interfaces": [{"name": "eth0"}]}}


def asked(path: Path) -> dict[str, Any]:
    """Ask for a file, as Multus does, whose folder is there."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    return {"runtimeConfig": {"CNIDeviceInfoFile": str(path)}}


def test_it_is_there_after_add_and_gone_after_del(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / ATTACHED / "rails-c1_net1"
    pod = rig.pod()
    rig.add("c1", pod, **asked(file))
    document = {"type": "pci", "version": "1.1.0", "pci": {"pci-address": vf(0), "pf-pci-address": PF}}
    assert json.loads(file.read_text()) == document
    rig.delete("c1", pod)
    rig.await_back()
    assert not file.exists()


def test_what_multus_has_written_stays_as_it_is(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / ATTACHED / "rails-c1_net1"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"type": "pci", "pci": {"pci-address": vf(0)}}))
    before = file.read_text()
    rig.add("c1", rig.pod(), **asked(file))
    assert file.read_text() == before


def test_a_failed_add_leaves_none(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / ATTACHED / "rails-c1_net1"
    with pytest.raises(AgentError):
        rig.add("c1", rig.pod(), **asked(file), ipam=rig.stub_ipam("exit 1"))
    assert not file.exists()


def test_a_place_that_cannot_be_written_keeps_no_pod_from_starting(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "k8s.cni.cncf.io").write_text("a file")
    pod = rig.pod()
    rig.add("c1", pod, **asked(tmp_path / ATTACHED / "x"))
    rig.delete("c1", pod)
    rig.await_back()


@pytest.mark.parametrize("path", ["relative", "/var/../etc/x", 5, "/x\0y"])
def test_a_place_that_is_no_plain_path_is_refused(rig: Rig, path: object) -> None:
    with pytest.raises(AgentError, match=r"runtimeConfig\.CNIDeviceInfoFile must be an absolute path without '\.\.'"):
        rig.add("c1", rig.pod(), runtimeConfig={"CNIDeviceInfoFile": path})
