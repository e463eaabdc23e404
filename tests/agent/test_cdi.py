from __future__ import annotations

from pathlib import Path

from agent.cdi import installed_kinds


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
