from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from agent.edits.cdi import SpecNames, read_spec

OF_TOOLKIT = """\
cdiVersion: 0.5.0
containerEdits: &common
  hooks:
  - args: [nvidia-ctk, hook, create-symlinks]
    name: not-a-device
devices:
- containerEdits: {deviceNodes: [{path: /dev/nvidia0, name: not-a-device-either}]}
  name: "0"
- name: "0:1"
- annotations: {name: nor-this}
  containerEdits: *common
  name: GPU-8a2c1e7f
- name: 1
kind: nvidia.com/gpu
"""


def test_the_devices_of_a_yaml_spec_are_named(tmp_path: Path) -> None:
    (tmp_path / "nvidia.yaml").write_text(OF_TOOLKIT)
    assert read_spec(tmp_path / "nvidia.yaml") == ("nvidia.com/gpu", frozenset({"0", "0:1", "GPU-8a2c1e7f", "1"}))


def test_the_devices_of_a_json_spec_are_named(tmp_path: Path) -> None:
    document = {"kind": "nvidia.com/gpu", "devices": [{"name": "0"}, {"nameless": 1}, "odd"]}
    (tmp_path / "nvidia.json").write_text(json.dumps(document))
    assert read_spec(tmp_path / "nvidia.json") == ("nvidia.com/gpu", frozenset({"0"}))


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"kind": 5}', "kind: [", "\0", "devices: {name: a}", "- kind: x"])
@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_what_is_no_spec_names_nothing(tmp_path: Path, text: str, suffix: str) -> None:
    (tmp_path / f"odd.{suffix}").write_text(text)
    assert read_spec(tmp_path / f"odd.{suffix}")[1] == frozenset()


def test_specs_of_a_kind_are_joined_and_our_own_left_out(tmp_path: Path) -> None:
    first, second = tmp_path / "etc", tmp_path / "run"
    for folder in (first, second):
        folder.mkdir()
    (first / "a.json").write_text('{"kind": "nvidia.com/gpu", "devices": [{"name": "0"}]}')
    (second / "b.yml").write_text("kind: nvidia.com/gpu\ndevices: [{name: GPU-x}]\n")
    (second / "c.json").write_text('{"kind": "other.com/gpu", "devices": [{"name": "1"}]}')
    (second / "nodefabric-x.json").write_text('{"kind": "nvidia.com/gpu", "devices": [{"name": "2"}]}')
    names = SpecNames([first, second, tmp_path / "absent"])
    assert names.of_kind("nvidia.com/gpu") == {"0", "GPU-x"}


def test_a_spec_is_read_again_when_it_is_another_one(tmp_path: Path) -> None:
    spec = tmp_path / "a.json"
    names = SpecNames([tmp_path])
    spec.write_text('{"kind": "nvidia.com/gpu", "devices": [{"name": "0"}]}')
    assert names.of_kind("nvidia.com/gpu") == {"0"}
    fresh = tmp_path / "a.new"
    fresh.write_text('{"kind": "nvidia.com/gpu", "devices": [{"name": "1"}]}')
    os.replace(fresh, spec)
    assert names.of_kind("nvidia.com/gpu") == {"1"}
    spec.unlink()
    assert names.of_kind("nvidia.com/gpu") == frozenset()
