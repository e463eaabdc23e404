"""hack/check-gpu over the fake library and a modelled node's files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from agent.hardware import recorded
from tests.nvml.fake import GPU_IS_LOST, FakeDriver, as_recorded, environment

ROOT = Path(__file__).parents[2]


def check_gpu(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "hack/check-gpu"), "--seconds", "0.1", *arguments]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=100)


def test_a_host_with_gpus_is_described_and_recorded(tmp_path: Path, nvml_library: Path) -> None:
    node = recorded.load(recorded.find("h100-8gpu"))
    root = tmp_path / "root"
    root.mkdir()
    recorded.unpack(node, root)
    driver = FakeDriver(tmp_path / "driver").show(*map(as_recorded, node.gpus))
    file = tmp_path / "node.json"
    done = check_gpu(
        "--root", str(root), "--record", str(file), "--name", "mine", env=environment(nvml_library, driver)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 GPUs; readings:" in done.stdout
    assert "GPU3 0000:5d:00.0 NVIDIA H100 80GB HBM3, 81559 MiB, NUMA node 0, NVLinks to 7 GPUs (126)" in done.stdout
    assert "errors are watched of 8 GPUs; 0 came" in done.stdout
    assert "Nearest NICs:" in done.stdout
    again = recorded.load(file)
    assert [g.pci_address for g in again.gpus] == [g.pci_address for g in node.gpus]
    assert [sorted(n for _, n in g.nvlinks) for g in again.gpus] == [[18] * 7] * 8
    assert again.gpus[0].uuid not in {g.uuid for g in node.gpus}


def test_what_is_wrong_is_named_and_is_the_status(tmp_path: Path, nvml_library: Path) -> None:
    driver = FakeDriver(tmp_path / "driver").show(*map(as_recorded, recorded.load(recorded.find("h100-8gpu")).gpus))
    driver.change(driver.gpus[0].uuid, error=GPU_IS_LOST)
    done = check_gpu("--root", str(tmp_path), env=environment(nvml_library, driver))
    assert done.returncode == 1
    assert "WRONG: nvml/gpu0 cannot be read: GPU is lost" in done.stdout
    assert "is not in /sys/bus/pci/devices" in done.stdout


def test_a_host_without_a_driver_says_so(tmp_path: Path) -> None:
    done = check_gpu("--root", str(tmp_path), env={"LD_LIBRARY_PATH": str(tmp_path)})
    assert done.returncode == 1
    assert "WRONG: libnvidia-ml.so.1 is not on this node" in done.stdout
