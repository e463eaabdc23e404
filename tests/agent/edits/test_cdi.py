from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from agent.edits.cdi import SlotSpecs, read_spec
from agent.errors import Unavailable

SLOT = "slot-rdma:vf-0-3"
EDITS = {"env": ["PCIDEVICE_RDMA_VF=0000:3b:00.2"], "deviceNodes": [{"path": "/dev/infiniband/uverbs3"}]}


def test_the_spec_of_a_slot_names_it_and_what_its_container_gets(tmp_path: Path) -> None:
    specs = SlotSpecs(tmp_path / "cdi")
    specs.write("vf", SLOT, EDITS)
    (file,) = (tmp_path / "cdi").iterdir()
    assert json.loads(file.read_text()) == {
        "cdiVersion": "0.5.0",
        "kind": "nodefabric.io/vf",
        "devices": [{"name": SLOT, "containerEdits": EDITS}],
    }
    assert file.stat().st_mode & 0o777 == 0o644
    assert read_spec(file) == ("nodefabric.io/vf", frozenset({SLOT}))
    assert specs.slots() == {SLOT}


def test_a_spec_is_written_anew_only_where_it_says_something_else(tmp_path: Path) -> None:
    specs = SlotSpecs(tmp_path)
    assert not specs.is_written("vf", SLOT, EDITS)
    specs.write("vf", SLOT, EDITS)
    assert specs.is_written("vf", SLOT, EDITS)
    assert not specs.is_written("vf", SLOT, {**EDITS, "env": ["PCIDEVICE_RDMA_VF=0000:3b:00.3"]})
    specs.write("vf", SLOT, {"env": ["A=B"]})
    assert specs.is_written("vf", SLOT, {"env": ["A=B"]})


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    specs = SlotSpecs(tmp_path)
    others = ("nvidia.json", "nodefabric-notes.json", "slot-rdma:vf-0-3.json", f"nodefabric-{SLOT}.yaml", ".nodefabric")
    for name in others:
        (tmp_path / name).write_text("{}")
    specs.write("vf", SLOT, EDITS)
    specs.remove(SLOT)
    specs.remove(SLOT)
    assert specs.slots() == frozenset()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_what_a_killed_process_left_half_written_is_no_spec_and_goes(tmp_path: Path) -> None:
    halves = [tmp_path / f".nodefabric-{SLOT}.json.{pid}" for pid in (1, os.getpid())]  # in a container all are 1
    for half in halves:
        half.write_text("{")
    assert SlotSpecs(tmp_path).slots() == frozenset()
    assert not any(half.exists() for half in halves)


def test_a_folder_that_cannot_be_written_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match=r"nodefabric-slot-rdma:vf-0-3\.json cannot be written.*cdiDir"):
        SlotSpecs(tmp_path / "file").write("vf", SLOT, EDITS)
    assert SlotSpecs(tmp_path / "absent").slots() == frozenset()
