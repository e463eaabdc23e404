from __future__ import annotations

from pathlib import Path

import pytest

from agent.topology.kubelet_config import KubeletConfigFile, KubeletSettings, parse_cpus, read

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


def test_a_folder_in_its_place_is_named(tmp_path: Path) -> None:
    assert "cannot be read" in str(read(tmp_path).problem)


def test_cpu_lists() -> None:
    assert parse_cpus("0-3,8, 10") == {0, 1, 2, 3, 8, 10}
    assert parse_cpus("") == frozenset()


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
