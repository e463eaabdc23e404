from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.cdi import SlotSpecs, installed_kinds
from agent.errors import Unavailable


def test_kinds_of_all_readable_specs_are_listed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "nvidia.yaml").write_text("---\ncdiVersion: 0.6.0\ncontainerEdits: {}\nkind: nvidia.com/gpu\n")
    (tmp_path / "a" / "quoted.yml").write_text('kind: "vendor.com/net-rdma"\ndevices:\n- kind: no.such/kind\n')
    (tmp_path / "a" / "ours.json").write_text('{"cdiVersion": "0.6.0", "kind": "nodefabric.io/vf", "devices": []}')
    (tmp_path / "a" / "broken.json").write_text("{")
    (tmp_path / "a" / "list.json").write_text("[1]")
    (tmp_path / "a" / "empty.yaml").write_text("")
    (tmp_path / "a" / "kind.txt").write_text("kind: vendor.com/text")
    (tmp_path / "a" / "folder.json").mkdir()
    assert installed_kinds([tmp_path / "a", tmp_path / "absent"]) == {
        "nvidia.com/gpu",
        "vendor.com/net-rdma",
        "nodefabric.io/vf",
    }


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
    assert installed_kinds([tmp_path / "cdi"]) == {"nodefabric.io/vf"}
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
    half = tmp_path / f".nodefabric-{SLOT}.json.1"
    half.write_text("{")
    assert SlotSpecs(tmp_path).slots() == frozenset()
    assert not half.exists()


def test_a_folder_that_cannot_be_written_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match=r"nodefabric-slot-rdma:vf-0-3\.json cannot be written.*cdiDir"):
        SlotSpecs(tmp_path / "file").write("vf", SLOT, EDITS)
    assert SlotSpecs(tmp_path / "absent").slots() == frozenset()
