"""The section `placement`: what plugins call GPUs, and a file that tells where they stand."""

from __future__ import annotations

from pathlib import Path

from agent import config
from agent.config import Config
from agent.model.gpu_ids import GpuIds


def read(text: str) -> Config:
    return config.parse(f"resources: []\nplacement: {text}\n", "test.yaml")


def test_ids_and_a_file_are_read() -> None:
    found = read(
        r"""{topologyFile: /opt/microsoft/topo.xml, gpuIds: [
        {resource: example.com/npu, pattern: 'npu-(?P<pci>.+)'},
        {resource: 'example.com/*', pattern: '(?P<number>\d+)', gpu: 'accel{number}'}]}"""
    ).placement
    assert found.topology_file == Path("/opt/microsoft/topo.xml")
    assert found.gpu_ids == (
        GpuIds("example.com/npu", "npu-(?P<pci>.+)"),
        GpuIds("example.com/*", r"(?P<number>\d+)", "accel{number}"),
    )
    assert read("{}").placement == Config().placement
