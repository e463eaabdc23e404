"""The real pynvml, in a process of its own, over a small library in place of the driver's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.hardware.nvml import kernel_address

HERE = Path(__file__).parent
READER = """
import dataclasses, json, sys
from agent.hardware.nvml import Nvml
nvml = Nvml()
for line in sys.stdin:
    gpus, problems = nvml.read()
    print(json.dumps({
        "gpus": [dataclasses.asdict(g) for g in gpus],
        "problems": [dataclasses.asdict(p) for p in problems],
        "unavailable": nvml.unavailable and str(nvml.unavailable),
        "loaded": "pynvml" in sys.modules,
    }), flush=True)
nvml.close()
nvml.close()
"""
FIRST = "0 0 85520809984 00000000:1B:00.0 GPU-aaaa NVIDIA H100 80GB HBM3"
SECOND = "0 1 85520809984 00000000:3D:00.0 GPU-bbbb NVIDIA H100 80GB HBM3"
DRIVER_NOT_LOADED = 9
VERSION_MISMATCH = 18


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvml")
    compiler = next(
        ([c] for c in map(shutil.which, ("cc", "gcc", "clang")) if c), [sys.executable, "-m", "ziglang", "cc"]
    )
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", library, HERE / "fake_nvml.c"], check=True)
    return library


class Reader:
    """An `Nvml` in another process."""

    def __init__(self, process: subprocess.Popen[str], state: Path) -> None:
        self._process = process
        self._state = state

    def read(self, initialisation: int, *gpus: str) -> dict[str, Any]:
        self._state.write_text("\n".join([str(initialisation), *gpus]) + "\n")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("read\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


Start = Callable[[Path], Reader]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start(folder: Path) -> Reader:
        state = tmp_path / "gpus"
        process = subprocess.Popen(
            [sys.executable, "-c", READER],
            cwd=HERE.parents[2],
            env={**os.environ, "LD_LIBRARY_PATH": str(folder), "FAKE_NVML": str(state)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return Reader(process, state)

    yield start
    for process in started:
        process.communicate(timeout=30)
        assert process.returncode == 0


@pytest.fixture
def reader(start: Start, library: Path) -> Reader:
    return start(library.parent)


def test_gpus_are_read_with_addresses_in_the_kernels_spelling(reader: Reader) -> None:
    answer = reader.read(0, FIRST, SECOND)
    assert answer["gpus"] == [
        {
            "uuid": "GPU-aaaa",
            "index": 0,
            "minor": 0,
            "pci_address": "0000:1b:00.0",
            "name": "NVIDIA H100 80GB HBM3",
            "memory_bytes": 85520809984,
        },
        {
            "uuid": "GPU-bbbb",
            "index": 1,
            "minor": 1,
            "pci_address": "0000:3d:00.0",
            "name": "NVIDIA H100 80GB HBM3",
            "memory_bytes": 85520809984,
        },
    ]
    assert (answer["problems"], answer["unavailable"]) == ([], None)


def test_no_library_is_normal_and_loads_nothing(start: Start, tmp_path: Path) -> None:
    answer = start(tmp_path).read(0)
    assert (answer["gpus"], answer["problems"], answer["loaded"]) == ([], [], False)
    assert "libnvidia-ml.so.1 cannot be opened" in answer["unavailable"]


def test_a_driver_that_is_loaded_later_is_found_by_a_later_scan(reader: Reader) -> None:
    answer = reader.read(DRIVER_NOT_LOADED)
    assert (answer["gpus"], answer["problems"]) == ([], [])
    assert "does not answer" in answer["unavailable"]
    answer = reader.read(0, FIRST)
    assert [g["uuid"] for g in answer["gpus"]] == ["GPU-aaaa"]
    assert answer["unavailable"] is None


def test_a_driver_that_refuses_is_a_problem(reader: Reader) -> None:
    answer = reader.read(VERSION_MISMATCH, FIRST)
    assert answer["gpus"] == []
    assert [p["path"] for p in answer["problems"]] == ["nvml"]


def test_a_lost_gpu_hides_no_other_and_returns_when_it_is_well(reader: Reader) -> None:
    lost = FIRST.replace("0 0 ", "15 0 ", 1)
    answer = reader.read(0, lost, SECOND)
    assert [(g["uuid"], g["index"]) for g in answer["gpus"]] == [("GPU-bbbb", 1)]
    assert [p["path"] for p in answer["problems"]] == ["nvml/gpu0"]
    answer = reader.read(0, FIRST, SECOND)
    assert [g["uuid"] for g in answer["gpus"]] == ["GPU-aaaa", "GPU-bbbb"]
    assert answer["problems"] == []


def test_what_a_gpu_does_not_support_is_unknown_not_an_error(reader: Reader) -> None:
    answer = reader.read(0, "0 -1 0 00000009:01:00.0 GPU-cccc Integrated")
    assert [(g["minor"], g["memory_bytes"], g["pci_address"]) for g in answer["gpus"]] == [(None, 0, "0009:01:00.0")]


def test_an_address_that_is_none_is_a_problem_of_that_gpu(reader: Reader) -> None:
    answer = reader.read(0, "0 0 1 nonsense GPU-dddd Odd", SECOND)
    assert [g["uuid"] for g in answer["gpus"]] == ["GPU-bbbb"]
    assert [p["path"] for p in answer["problems"]] == ["nvml/gpu0"]


@pytest.mark.parametrize(
    ("nvml", "kernel"),
    [("00000000:1B:00.0", "0000:1b:00.0"), ("0000:af:00.0", "0000:af:00.0"), ("00010000:E1:00.0", "10000:e1:00.0")],
)
def test_addresses_are_spelled_as_the_kernel_does(nvml: str, kernel: str) -> None:
    assert kernel_address(nvml) == kernel
