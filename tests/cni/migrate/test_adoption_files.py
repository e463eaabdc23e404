"""The files of the replaced plugins: how they are read, and what is garbage among them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cni import netconf
from cni.migrate import sriov_state
from cni.migrate.adoption import Adopted
from tests.cni.old_plugins import CONTAINER, PLUGIN, OldSriov, adopt
from tests.cni.tiny_node import Rig, vf

GARBAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "no JSON": lambda file: file.write_bytes(b"{"),
    "binary": lambda file: file.write_bytes(bytes(range(256))),
    "no device": lambda file: file.write_text('{"name": "x"}'),
    "a bad device": lambda file: file.write_text('{"deviceID": "../../etc"}'),
    "a bad setting": lambda file: file.write_text(
        json.dumps({**PLUGIN, "deviceID": vf(1), "OrigVfState": {"Vlan": "x"}})
    ),
    "a list": lambda file: file.write_text("[]"),
    "huge": lambda file: file.write_bytes(b" " * (2 << 20)),
    "deep": lambda file: file.write_bytes(b"[" * 100_000),
    "a link": lambda file: file.symlink_to("/etc/passwd"),
    "a pipe": lambda file: os.mkfifo(file),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_told_of_once_and_left(rig: Rig, old: OldSriov, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    file = old.file("c1")
    file.parent.mkdir(parents=True)
    GARBAGE[kind](file)
    old.add(rig.pod())
    assert adopt(rig) == Adopted(devices=(vf(0),), garbage=(str(file),))
    assert adopt(rig) == Adopted(garbage=(str(file),))
    assert file.is_symlink() or file.exists()
    assert len([r for r in caplog.records if "adopted by nobody" in r.getMessage()]) == 1


def test_a_name_that_is_no_container_and_interface_is_garbage(rig: Rig, old: OldSriov) -> None:
    file = old.state / "sriov" / "nodash"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(PLUGIN))
    assert adopt(rig) == Adopted(garbage=(str(file),))


@pytest.mark.parametrize(
    ("container_id", "ifname"), [(CONTAINER, "net-1"), (CONTAINER, "net1"), ("cnitool-77", "eth0"), ("a-b-c", "net1")]
)
def test_dashes_in_a_files_name_do_not_confuse(rig: Rig, old: OldSriov, container_id: str, ifname: str) -> None:
    file = old.write(container_id, ifname, PLUGIN)
    record = sriov_state.read(old.state, "sriov", file)
    assert (record.container_id, record.ifname) == (container_id, ifname)


def test_keys_in_any_case_and_a_strange_version_are_read(rig: Rig, old: OldSriov) -> None:
    document = {k.upper(): v for k, v in PLUGIN.items()} | {"CNIVERSION": "0.2.0", "ORIGVFSTATE": {"HOSTIFNAME": "x"}}
    record = sriov_state.read(old.state, "sriov", old.write(CONTAINER, "net1", document))
    assert (record.device, record.netdev, record.conf.settings.vlan) == (vf(0), "x", 100)


def test_the_kept_configuration_reads_as_the_plugin_read_it(rig: Rig, old: OldSriov) -> None:
    old.add(rig.pod())
    record = sriov_state.read(old.state, "sriov", old.file())
    assert record.conf.settings == netconf.from_document(PLUGIN).settings
    assert record.conf.ipam is None
