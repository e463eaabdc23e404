from __future__ import annotations

from pathlib import Path

import pytest

from agent.kubelet.kubelet_config import KubeletConfigFile, KubeletSettings, read

FULL = """
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
topologyManagerPolicy: single-numa-node
topologyManagerScope: pod
topologyManagerPolicyOptions: {max-allowable-numa-nodes: "36"}
cpuManagerPolicy: static
memoryManagerPolicy: Static
reservedSystemCPUs: 0-1,64
reservedMemory:
- numaNode: 0
  limits: {memory: 1Gi, hugepages-2Mi: 64Mi}
- numaNode: 1
  limits: {memory: 1500M}
"""


RESERVED = """
kubeReserved: {cpu: 500m, memory: 1Gi, ephemeral-storage: 1Gi}
systemReserved: {cpu: "1", memory: 512Mi}
"""


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_policies_and_reservations_are_read(tmp_path: Path) -> None:
    assert read(written(tmp_path, FULL)) == KubeletSettings(
        policy="single-numa-node",
        scope="pod",
        max_numa_nodes="36",
        cpu_manager="static",
        memory_manager="Static",
        reserved_cpus=frozenset({0, 1, 64}),
        reserved_memory=((0, "hugepages-2Mi", 64 << 20), (0, "memory", 1 << 30), (1, "memory", 1_500_000_000)),
    )


@pytest.mark.parametrize("text", ["", "kind: KubeletConfiguration\n", "topologyManagerPolicy: ''\n"])
def test_absent_fields_have_kubelets_defaults(tmp_path: Path, text: str) -> None:
    settings = read(written(tmp_path, text))
    assert settings == KubeletSettings()
    assert (settings.policy, settings.scope) == ("none", "container")


def test_a_missing_file_gives_the_defaults_and_says_so(tmp_path: Path) -> None:
    settings = read(tmp_path / "config.yaml")
    assert (settings.policy, settings.scope) == ("none", "container")
    assert settings.problem is not None
    assert "config.yaml is not there" in settings.problem


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("topologyManagerPolicy: strict", "'strict' is not one of none"),
        ("[1, 2]", "must be a mapping, is list"),
        ("a: [", "config.yaml"),
        ("reservedSystemCPUs: 0-x", "not a CPU list"),
        ("reservedMemory: [{numaNode: 0}]", "reservedMemory must be a list"),
        ("reservedMemory: [{numaNode: 0, limits: {memory: lots}}]", "'lots' is not a quantity"),
        ("topologyManagerPolicyOptions: [x]", "must be a mapping"),
        (b"\xff\xfe\x00", "config.yaml"),
    ],
)
def test_a_bad_file_gives_the_defaults_and_names_the_fault(tmp_path: Path, text: str | bytes, said: str) -> None:
    settings = read(written(tmp_path, text))
    assert settings.problem is not None
    assert said in settings.problem
    assert settings.policy == "none"


@pytest.mark.parametrize(
    "text", ["reservedMemory: [{numaNode: .inf, limits: {memory: 1Gi}}]", "x: !!timestamp no", "[" * 20_000]
)
def test_no_text_makes_reading_fail(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    found = read(path)
    assert found == KubeletSettings(problem=found.problem)
    assert str(found.problem).startswith(f"{path}: ")


def test_a_problem_is_logged_once_until_it_is_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = KubeletConfigFile(tmp_path / "config.yaml")
    for _ in range(3):
        file.read()
    assert len(caplog.records) == 1
    written(tmp_path, FULL)
    assert file.read().policy == "single-numa-node"
    written(tmp_path, "a: [")
    file.read()
    assert len(caplog.records) == 2


def test_what_is_reserved_on_the_whole_node_is_added_up(tmp_path: Path) -> None:
    settings = read(written(tmp_path, RESERVED))
    assert (settings.reserved_milli_cpu, settings.reserved_memory_bytes) == (1500, 1536 << 20)


@pytest.mark.parametrize(
    ("text", "bytes_free", "share"),
    [
        ("", 100 << 20, 0),
        ("evictionHard: {memory.available: 500Mi}", 500 << 20, 0),
        ("evictionHard: {memory.available: 5%}", 0, 0.05),
        ("evictionHard: {nodefs.available: 10%}", 0, 0),
        ("evictionHard: {nodefs.available: 10%}\nmergeDefaultEvictionSettings: true", 100 << 20, 0),
    ],
)
def test_the_eviction_threshold_is_an_amount_or_a_share(
    tmp_path: Path, text: str, bytes_free: int, share: float
) -> None:
    settings = read(written(tmp_path, text))
    assert (settings.eviction_bytes, settings.eviction_share) == (bytes_free, share)


def test_drop_ins_are_laid_over_the_file_in_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "conf.d"
    folder.mkdir()
    (folder / "20-late.conf").write_text("topologyManagerPolicy: single-numa-node\nkubeReserved: {cpu: 2}\n")
    (folder / "10-early.conf").write_text("topologyManagerPolicy: restricted\nkubeReserved: {memory: 2Gi}\n")
    (folder / "30-ignored.yaml").write_text("topologyManagerPolicy: none\n")
    file = KubeletConfigFile(written(tmp_path, RESERVED), folder)
    settings = file.read()
    assert settings.policy == "single-numa-node"
    assert (settings.reserved_milli_cpu, settings.reserved_memory_bytes) == (3000, 2560 << 20)
    (folder / "20-late.conf").unlink()
    assert file.read().policy == "restricted"


def test_a_broken_drop_in_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "conf.d"
    folder.mkdir()
    (folder / "10.conf").write_text("[1]")
    problem = KubeletConfigFile(written(tmp_path, ""), folder).read().problem
    assert problem is not None
    assert "10.conf: a KubeletConfiguration must be a mapping" in problem


def test_files_are_read_anew_only_when_they_have_changed(tmp_path: Path) -> None:
    path = written(tmp_path, RESERVED)
    file = KubeletConfigFile(path)
    first = file.read()
    assert file.read() is first
    path.write_text("topologyManagerScope: pod")
    assert file.read().scope == "pod"
