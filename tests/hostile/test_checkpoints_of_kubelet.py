"""kubelet's checkpoints: of claims (`dra_manager_state`) in each form that was released and in others, and of devices.

`recorded/README.md` names the source of each recorded file. They hold the reader and the stand-in to one form.
"""

from __future__ import annotations

import base64
import json
import random
import zlib
from pathlib import Path

import pytest

from agent.errors import Unavailable
from agent.kubelet import checkpoint
from hack.sim import devices
from hack.sim.dra.claims import CHECKPOINT, ClaimCache
from proto.deviceplugin.v1beta1 import api_pb2
from tests.agent.operator.uninstalling import Host
from tests.agent.operator.uninstalling import clean as clean  # the fixture
from tests.agent.operator.uninstalling import host as host  # the fixture

RECORDED = Path(__file__).parent / "recorded"
DRIVER = "nodefabric.io"
OURS = {"1.27": ("team/two-rails",), "1.32": ("team/two-rails", "team/not-prepared")}
OURS["1.36"] = OURS["1.32"]
HEAD = '\\"kind\\":\\"DRACheckpoint\\",\\"apiVersion\\":\\"checkpoint.dra.kubelet.k8s.io/v'
UNKNOWN = (
    "",
    "{",
    "[]",
    "{}",
    "[" * 5000,
    '{"Data": "{}"}',
    '{"Data": 1}',
    f'{{"Data":"{{{HEAD}1\\",\\"Entries\\":[]}}","Checksum":0}}',
    f'{{"Data":"{{{HEAD}1\\",\\"ClaimInfoStateList\\":[1]}}","Checksum":0}}',
    f'{{"Data":"{{{HEAD}1\\",\\"ClaimInfoStateList\\":[{{\\"ClaimName\\":\\"c\\"}}]}}","Checksum":0}}',
    f'{{"Data":"{{{HEAD}2\\",\\"ClaimInfoStateList\\":[]}}","Checksum":0}}',
    '{"version":"v2","entries":[],"checksum":0}',
)


def recorded(version: str) -> str:
    return (RECORDED / f"dra_manager_state-{version}.json").read_text()


@pytest.mark.parametrize("version", OURS)
def test_the_claims_of_a_driver_are_read_from_every_form_that_was_released(tmp_path: Path, version: str) -> None:
    (tmp_path / CHECKPOINT).write_text(recorded(version))
    assert checkpoint.claims_of(tmp_path, DRIVER) == OURS[version]
    assert checkpoint.claims_of(tmp_path, "unheard.of.io") == ()


def test_the_stand_in_for_kubelet_writes_the_recorded_form_byte_for_byte(tmp_path: Path) -> None:
    """So what is read from its file is read from kubelet's."""
    text = recorded("1.36")
    document = json.loads(text)
    assert document["Checksum"] == zlib.crc32(document["Data"].encode())
    file = tmp_path / CHECKPOINT
    file.write_text(text)
    restored = ClaimCache(file)
    file.unlink()
    restored.save()
    assert file.read_text() == text


def test_the_checkpoint_of_devices_is_read_and_played_in_the_recorded_form(tmp_path: Path) -> None:
    document = json.loads((RECORDED / "kubelet_internal_checkpoint-1.36.json").read_text())
    file = tmp_path / checkpoint.FILE
    file.parent.mkdir()
    file.write_text(json.dumps(document))
    first, second = checkpoint.entries(tmp_path) or ()
    assert (first.pod_uid, first.container, first.resource_name) == (
        "0c0ffee0-1111-4222-8333-444455556666",
        "main",
        "rdma/vf",
    )
    assert first.unit_ids == ("0000:18:00.1", "0000:18:00.2")
    assert (first.answer, second.answer) == ("CgMKAUESAUI=", "")
    played = devices.DeviceManager(tmp_path / devices.CHECKPOINT, random.Random(0), set)
    played.held = [
        devices.Held(e.pod_uid, e.container, e.resource_name, e.unit_ids, base64.b64decode(e.answer))
        for e in (first, second)
    ]
    played.resources = {"rdma/vf": devices.Known(None)}
    played.update("rdma/vf", [api_pb2.Device(ID=i) for i in document["Data"]["RegisteredDevices"]["rdma/vf"]])
    assert json.loads((tmp_path / devices.CHECKPOINT).read_text()) == document


@pytest.mark.parametrize("text", UNKNOWN)
def test_of_a_form_that_is_not_known_it_is_said_that_claims_cannot_be_told(tmp_path: Path, text: str) -> None:
    (tmp_path / CHECKPOINT).write_text(text)
    with pytest.raises(Unavailable, match=r"which claims kubelet has is not known: .*dra_manager_state"):
        checkpoint.claims_of(tmp_path, DRIVER)


def test_a_kubelet_that_has_noted_nothing_has_no_claims(tmp_path: Path) -> None:
    assert checkpoint.claims_of(tmp_path, DRIVER) == ()
    ClaimCache(tmp_path / CHECKPOINT).save()
    assert checkpoint.claims_of(tmp_path, DRIVER) == ()


@pytest.mark.parametrize("version", OURS)
def test_uninstall_leaves_a_node_alone_whose_kubelet_has_a_claim(
    host: Host, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    host.install()
    (host.root / "var/lib/kubelet" / CHECKPOINT).write_text(recorded(version))
    assert host.uninstall() == 4
    assert "claim team/two-rails" in capsys.readouterr().err
    assert (host.root / "opt/cni/bin/nodefabric").exists()


@pytest.mark.parametrize("text", ["{", '{"version":"v2","entries":[],"checksum":0}'])
def test_uninstall_needs_force_where_it_cannot_tell_which_claims_kubelet_has(
    host: Host, clean: dict[str, str], capsys: pytest.CaptureFixture[str], text: str
) -> None:
    host.install()
    file = host.root / "var/lib/kubelet" / CHECKPOINT
    file.write_text(text)
    installed = host.files()
    assert host.uninstall() == 4
    said = capsys.readouterr().err
    assert "which claims kubelet has is not known" in said
    assert "--force" in said
    assert {n: t for n, t in host.files().items() if "ledger" not in n} == {
        n: t for n, t in installed.items() if "ledger" not in n
    }
    assert host.uninstall("--force") == 0
    file.unlink()
    assert host.files() == clean
