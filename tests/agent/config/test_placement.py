"""The section `placement`: what plugins call GPUs, and a file that tells where they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent import config
from agent.config import Config
from agent.model.gpu_ids import GpuIds
from tests.agent.config.refused import problems_of


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


@pytest.mark.parametrize(
    ("entry", "path", "said"),
    [
        ("{resource: npu, pattern: '(?P<pci>.+)'}", "gpuIds[0].resource", "must be domain/name"),
        ("{resource: example.com/npu}", "gpuIds[0].pattern", "is missing"),
        ("{pattern: '(?P<pci>.+)'}", "gpuIds[0].resource", "is missing"),
        ("{resource: example.com/npu, pattern: '('}", "gpuIds[0].pattern", "must be a regular expression with named"),
        ("{resource: example.com/npu, pattern: 'npu'}", "gpuIds[0].pattern", "must be a regular expression with named"),
        ("{resource: example.com/npu, pattern: '(?P<pci>a{99999999999})'}", "gpuIds[0].pattern", "must be a regular"),
        ("{resource: example.com/npu, pattern: '(?P<pci>([a-f]+)*)'}", "gpuIds[0].pattern", "in a repeated group"),
        (f"{{resource: a.b/npu, pattern: '(?P<pci>{'.' * 200})'}}", "gpuIds[0].pattern", "at most 200 characters"),
        ("{resource: example.com/npu, pattern: '(?P<n>.)'}", "gpuIds[0].pattern", "has no group pci"),
        ("{resource: example.com/npu, pattern: '(?P<n>.)', gpu: 'x{m}'}", "gpuIds[0].gpu", "has no group m"),
        ("{resource: example.com/npu, pattern: '(?P<n>.)', gpu: 'x'}", "gpuIds[0].gpu", "must be text with groups"),
        ("{resource: example.com/npu, pattern: '(?P<pci>.)', x: 1}", "gpuIds[0].x", "is not a known key"),
    ],
)
def test_what_cannot_be_is_refused_with_its_path(entry: str, path: str, said: str) -> None:
    (problem,) = problems_of(f"resources: []\nplacement: {{gpuIds: [{entry}]}}\n")
    assert problem.startswith(f"placement.{path}: ")
    assert said in problem
