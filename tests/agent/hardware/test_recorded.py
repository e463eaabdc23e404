from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.errors import AgentError, ConfigError
from agent.hardware import recorded
from agent.hardware.recorded import Node
from agent.model.device import Gpu, MigDevice
from hack import node_file

GPU: dict[str, Any] = {
    "uuid": "GPU-1",
    "index": 0,
    "minor": 0,
    "pci_address": "0000:1b:00.0",
    "name": "NVIDIA H100",
    "memory_bytes": 1,
}


def document(**changes: Any) -> dict[str, Any]:
    return {"format": 1, "name": "node", "description": "", "tree": {}, "gpus": []} | changes


def lay_out(tree: dict[str, Any], folder: Path) -> None:
    recorded.unpack(recorded.parse(document(tree=tree), "test"), folder)


def problems(changed: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        recorded.parse(changed, "test")
    return caught.value.problems


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"there are: .*h100-8gpu"):
        recorded.find("h200")
    with pytest.raises(ConfigError):
        recorded.find("../../../etc/passwd")


def test_a_full_disk_is_named_with_the_remedy(own_network: None, tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "none", str(tmp_path)], check=True)
    with pytest.raises(AgentError, match=r"node node cannot .*No space left on device.*: make room.*TMPDIR"):
        lay_out({"sys": {str(number): "x" * 4096 for number in range(4)}}, tmp_path)


def test_dump_and_load_give_the_same_node(tmp_path: Path) -> None:
    for name in recorded.names():
        node = recorded.load(recorded.find(name))
        (tmp_path / "node.json").write_text(node_file.dump(node))
        assert recorded.load(tmp_path / "node.json") == node


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "a\0", "\ud800"])
def test_names_that_are_no_file_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(AgentError, match=r"node node cannot be laid out: .*: record it again"):
        lay_out({"sys": {name: "x"}}, tmp_path)


@pytest.mark.parametrize("target", ["", "/etc/passwd", "../..", "../../../etc", "a/../../../b", "a/../b"])
def test_links_that_leave_the_tree_are_refused(tmp_path: Path, target: str) -> None:
    with pytest.raises(AgentError, match=r"sys/link: the link to .* leaves the tree"):
        lay_out({"sys": {"link": [target]}}, tmp_path)


@pytest.mark.parametrize("entry", [5, None, "\ud800", ["a", "b"], ["\0"], [1]])
def test_what_is_no_folder_text_or_link_is_refused(tmp_path: Path, entry: object) -> None:
    with pytest.raises(AgentError, match="record it again"):
        lay_out({"sys": {"x": entry}}, tmp_path)


def test_links_up_to_the_trees_top_are_fine(tmp_path: Path) -> None:
    lay_out({"sys": {"a": {"link": ["../../dev/x"]}}}, tmp_path)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ([], "must be a JSON object"),
        (document(format=2), "format: must be 1, is 2"),
        (document(name="Bad Name"), "name: must be a lower-case DNS label, is 'Bad Name'"),
        (document(tree=[]), "tree: Input should be a valid dictionary"),
        (document(tree={"etc": {}}), "tree.etc.\"[key]\": Input should be 'sys', 'proc' or 'dev'"),
        (document(vpd={"3b:00.0": "x"}), 'vpd."3b:00.0"."[key]": \'3b:00.0\' is not a PCI address'),
        (document(gpus=[{}]), "gpus[0].uuid: Field required"),
        (document(gpus=[GPU | {"more": 1}]), "gpus[0].more: Unexpected keyword argument"),
    ],
)
def test_each_mistake_is_named_with_its_place(changed: Any, expected: str) -> None:
    assert problems(changed)[0].startswith(expected)


def test_all_mistakes_are_named_at_once() -> None:
    found = problems(document(name="", gpus=[1, GPU | {"mig_devices": [{"more": 1}]}]))
    assert (len(found), found[-1]) == (8, "gpus[1].mig_devices[0].more: Unexpected keyword argument")


def test_what_a_gpu_says_beyond_its_name_is_kept_and_is_not_needed() -> None:
    mig = MigDevice("MIG-1", "1g.10gb", gpu_instance=7, compute_instance=0, memory_bytes=10 << 30)
    rich = Gpu(
        **GPU, nvlinks=(("GPU-2", 18),), fabric_clique="c.1", mig_mode=True, mig_devices=(mig,), ailments=("Xid",)
    )
    poor = Gpu(**GPU | {"uuid": "GPU-2", "minor": None})
    node = Node("node", "", {}, (rich, poor))
    written = json.loads(node_file.dump(node))
    assert recorded.parse(written, "test") == node
    assert written["gpus"][1] == GPU | {"uuid": "GPU-2", "minor": None}


def test_anonymous_gpus_keep_who_is_linked_to_whom() -> None:
    mig = MigDevice("MIG-secret", "1g.10gb", gpu_instance=7, compute_instance=0, memory_bytes=10 << 30)
    first = Gpu(**GPU, nvlinks=(("GPU-2", 18),), fabric_clique="secret.7", mig_mode=True, mig_devices=(mig,))
    second = Gpu(**GPU | {"uuid": "GPU-2"}, nvlinks=(("GPU-1", 18),), fabric_clique="secret.7")
    one, two = node_file.anonymous_gpus((first, second))
    assert one.nvlinks == ((two.uuid, 18),)
    assert two.nvlinks == ((one.uuid, 18),)
    assert one.fabric_clique == two.fabric_clique == "00000000-0000-0000-0000-000000000001.7"
    assert one.mig_devices[0].uuid == "MIG-00000000-0000-0000-0000-000000000000"
    assert "secret" not in repr((one, two))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_not_json_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "node.json").write_bytes(content)
    with pytest.raises(ConfigError, match="is not JSON"):
        recorded.load(tmp_path / "node.json")


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"node\.json: cannot be read"):
        recorded.load(tmp_path / "node.json")


texts = st.text("ab./\n\0\ud800", max_size=8)
leaves = texts | st.lists(texts, max_size=2) | st.none() | st.integers()
names = st.sampled_from(["sys", "a", "b", "..", ".", "x/y", ""])


@settings(deadline=None)
@given(st.dictionaries(names, st.recursive(leaves, lambda inner: st.dictionaries(names, inner, max_size=3))))
def test_what_is_accepted_stays_inside_its_folder(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("outer") / "inner"
    folder.mkdir()
    with contextlib.suppress(AgentError):
        lay_out(tree, folder)
    assert [p.name for p in folder.parent.iterdir()] == ["inner"]
    for path in folder.rglob("*"):
        assert not path.is_symlink() or path.resolve().is_relative_to(folder)
