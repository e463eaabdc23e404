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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("topologyManagerPolicy: strict", "'strict' is not one of none"),
        ("[1, 2]", "'list' object"),
        ("a: [", "config.yaml"),
        ("reservedSystemCPUs: 0-x", "'x'"),
        ("reservedMemory: [{numaNode: 0}]", "'limits'"),
        ("reservedMemory: [{numaNode: 0, limits: {memory: lots}}]", "'lots' is not a quantity"),
        ("reservedMemory: [{numaNode: .inf, limits: {memory: 1Gi}}]", "infinity"),
        ("x: !!timestamp no", "config.yaml"),
        ("[" * 5_000, "recursion"),
        (b"\xff\xfe\x00", "config.yaml"),
    ],
)
def test_a_bad_file_gives_the_defaults_and_names_the_fault(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = written(tmp_path, text)
    found = read(path)
    assert found == KubeletSettings(problem=found.problem)
    assert str(found.problem).startswith(f"{path}: ")
    assert said in str(found.problem)


def test_a_problem_is_logged_once_and_a_file_is_read_again_when_it_has_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = KubeletConfigFile(tmp_path / "config.yaml")
    for _ in range(3):
        assert file.read().policy == "none"
    (said,) = caplog.messages
    assert "config.yaml cannot be read (No such file or directory)" in said
    written(tmp_path, FULL)
    settings = file.read()
    assert settings.policy == "single-numa-node"
    assert file.read() is settings
    written(tmp_path, "a: [")
    file.read()
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (
            FULL,
            KubeletSettings(
                policy="single-numa-node",
                scope="pod",
                max_numa_nodes="36",
                cpu_manager="static",
                reserved_cpus=frozenset({0, 1, 64}),
                reserved_memory=((0, "hugepages-2Mi", 64 << 20), (0, "memory", 1 << 30), (1, "memory", 1_500_000_000)),
            ),
        ),
        ("", KubeletSettings("none", "container", eviction_bytes=100 << 20)),
        ("topologyManagerPolicy: ''", KubeletSettings()),
        (RESERVED, KubeletSettings(reserved_milli_cpu=1500, reserved_memory_bytes=1536 << 20)),
        ("evictionHard: {memory.available: 500Mi}", KubeletSettings(eviction_bytes=500 << 20)),
        ("evictionHard: {memory.available: 5%}", KubeletSettings(eviction_bytes=0, eviction_share=0.05)),
        ("evictionHard: {nodefs.available: 10%}", KubeletSettings(eviction_bytes=0)),
        ("evictionHard: {nodefs.available: 10%}\nmergeDefaultEvictionSettings: true", KubeletSettings()),
    ],
)
def test_what_the_file_says_is_read_and_the_rest_is_kubelets_default(
    tmp_path: Path, text: str, settings: KubeletSettings
) -> None:
    assert read(written(tmp_path, text)) == settings


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
    (tmp_path / "10.conf").write_text("[1]")
    assert "10.conf: " in str(KubeletConfigFile(written(tmp_path, ""), tmp_path).read().problem)
