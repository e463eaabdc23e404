from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.hardware import recorded
from agent.hardware.sysfs.scan import scan
from agent.model.device import Snapshot
from hack import node_file
from hack.recording import anonymous, record

HACK = Path(__file__).parents[2] / "hack"


def scanned(node: recorded.Node, folder: Path) -> Snapshot:
    recorded.unpack(recorded.parse(json.loads(node_file.dump(node)), node.name), folder)
    return scan(folder)


@pytest.mark.parametrize("name", sorted({*recorded.names()} - {"dense-16x64"}))  # which only has more of the same
def test_a_recording_scans_like_the_machine(name: str, tmp_path: Path) -> None:
    machine = tmp_path / "machine"
    recorded.unpack(recorded.load(recorded.find(name)), machine)
    again = record(machine, "again", "", keep_identifiers=True)
    assert scanned(again, tmp_path / "again") == scan(machine)


@pytest.mark.parametrize("keep", [True, False])
def test_what_joins_an_adapters_functions_is_recorded_and_replaced_by_numbers(keep: bool, tmp_path: Path) -> None:
    node = recorded.load(recorded.find("gb200-cx8-4gpu"))
    recorded.unpack(node, tmp_path)
    vpd = record(tmp_path, "again", "", keep_identifiers=keep).vpd
    assert vpd.keys() == node.vpd.keys()
    assert (vpd == node.vpd) is keep
    together = [{a for a, v in of.items() if v == value} for of in (vpd, node.vpd) for value in of.values()]
    assert together[: len(vpd)] == [{a for a, v in node.vpd.items() if v == node.vpd[b]} for b in vpd]
    assert record_of("h100-8gpu", tmp_path / "other").vpd == {}


def record_of(name: str, folder: Path) -> recorded.Node:
    recorded.unpack(recorded.load(recorded.find(name)), folder)
    return record(folder, "again", "")


def test_what_names_one_machine_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    node = recorded.load(recorded.find("ib-dual-port"))
    before, after = scanned(node, tmp_path / "before"), scanned(anonymous(node), tmp_path / "after")
    hca, hidden = before.by_address["0000:03:00.0"], after.by_address["0000:03:00.0"]
    assert after.boot_id == "00000000-0000-4000-8000-000000000000"
    assert [n.mac for n in hidden.netdevs] != [n.mac for n in hca.netdevs]
    for mine, theirs in zip(hidden.netdevs, hca.netdevs, strict=True):
        assert len(mine.mac) == len(theirs.mac)
        assert mine.mac[: 12 * 3 + 8] == theirs.mac[: 12 * 3 + 8]
    (rdma,) = hidden.rdma_devices
    assert re.fullmatch(r"f452:14[0-9a-f]{2}(:[0-9a-f]{4}){2}", rdma.node_guid)
    image = (tmp_path / "after/sys/class/infiniband" / rdma.name / "sys_image_guid").read_text().strip()
    assert rdma.node_guid != image
    assert hca.rdma_devices[0].node_guid not in (rdma.node_guid, image)
    assert replace(hidden, netdevs=(), rdma_devices=()) == replace(hca, netdevs=(), rdma_devices=())


def test_a_name_or_a_file_that_will_not_do_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for options, said in (
        (["--name", "Bad Name"], "Bad Name: name: must be a lower-case DNS label, is 'Bad Name'"),
        (["-o", tmp_path / "file" / "node.json"], "cannot be written: "),
    ):
        command: list[str | Path] = [sys.executable, HACK / "record-node", *options]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 2
        assert said in run.stderr
        assert "Traceback" not in run.stderr


def test_the_command_writes_a_file_that_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "nodes/node.json"
    command: list[str | Path] = [sys.executable, HACK / "record-node", "--name", "here", "-o", path]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    node = recorded.load(path)
    assert node.name == "here"
    text = path.read_text()
    own: list[Any] = [n.mac for d in scan(Path("/")).devices for n in d.netdevs]
    assert not [mac for mac in own if mac in text and not mac.startswith("02:")]
