"""Adapters whose traffic with GPUs takes a Data Direct function, at NVIDIA's example addresses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hack.sim.stage import CONFIG, Stage, wait

GPU_BESIDE = {
    "0000:03:00.0": "0009:06:00.0",
    "0002:03:00.0": "0008:06:00.0",
    "0010:03:00.0": "0019:06:00.0",
    "0012:03:00.0": "0018:06:00.0",
}
"""PF → the GPU that NVIDIA documents beside its Data Direct function."""
SLOW = "0009:03:00.0"
OF_SLOW = "0000:03:00.0"
GPU = {"name": "nvidia.com/gpu", "kind": "gpu"}
VF = {"name": "rdma/vf", "kind": "vf", "select": {"vendors": ["15b3"]}, "network": "rails"}
TOLD = {**VF, "binding": "late", "environment": ["rails", "ncclTopo"]}
RAIL = {"name": "rdma/rail", "kind": "rail", "gpu": {}, "nic": {"kind": "vf"}, "network": "rails"}
WAYS: Mapping[str, tuple[list[Any], dict[str, int]]] = {
    "late": ([TOLD, GPU], {"rdma/vf": 1, "nvidia.com/gpu": 1}),
    "early": ([VF, GPU], {"rdma/vf": 1, "nvidia.com/gpu": 1}),
    "rails": ([RAIL], {"rdma/rail": 1}),
}
"""Resources, and what a pod asks for."""


def start(stage: Stage, resources: list[Any], before: Callable[[Stage], None] = lambda _: None) -> None:
    stage.build_node("gb300-4gpu")
    before(stage)
    stage.run({**CONFIG, "resources": resources})


def nearness(stage: Stage) -> dict[str, Any]:
    found: dict[str, Any] = stage.status()["hardware"]["nearness"]
    return found


def pair_of(stage: Stage, pod: str) -> tuple[str, str]:
    """The PF and the GPU of a pod with one of each, by the agent's books and PCI addresses."""
    status, name = stage.status(), f"default/{pod}"
    (vf,) = (row["device"] for row in status["attachments"] if row["pod"] == name)
    pf = next(nic["address"] for nic in status["hardware"]["nics"] for each in nic["vfs"] if each["address"] == vf)
    (gpu,) = {grant.get("gpu") or grant["device"] for grant in status["grants"] if grant["pod"] == name} & {
        gpu["uuid"] for gpu in status["hardware"]["gpus"]
    }
    return pf, next(each["address"] for each in status["hardware"]["gpus"] if each["uuid"] == gpu)


def rails(stage: Stage) -> dict[str, tuple[Any, str]]:
    """What pods' rails.json say: PF → GPU and locality."""
    files = [*(stage.folder / "cdi-specs").glob("*.rails")]
    every = [rail for file in files for rail in json.loads(file.read_text())["rails"]]
    return {rail["nic"]["pfPciAddress"]: (rail["gpu"], rail["locality"]) for rail in every}


def vpd(stage: Stage, address: str) -> Path:
    return stage.machine.root / "sys/bus/pci/devices" / address / "vpd"


@pytest.mark.parametrize("way", WAYS)
def test_all_pairs_are_those_that_nvidia_documents(stage: Stage, way: str) -> None:
    resources, limits = WAYS[way]
    start(stage, resources)
    wait("the pairs", lambda: nearness(stage)["known"] or None)
    for number in range(4):
        stage.run_pod(f"p{number}", limits)
    if way == "late":
        told = rails(stage)
        assert {pf: gpu["pciAddress"] for pf, (gpu, _) in told.items()} == GPU_BESIDE
        assert {locality for _, locality in told.values()} == {"PXB"}
        assert not [*(stage.folder / "cdi-specs").glob("*.nccl")], "NCCL would take the PFs' places from it"
    assert dict(pair_of(stage, f"p{number}") for number in range(4)) == GPU_BESIDE


def test_a_card_that_hangs_leaves_its_adapter_without_preference_and_holds_up_no_stop(stage: Stage) -> None:
    def hang(stage: Stage) -> None:
        vpd(stage, SLOW).unlink()
        os.mkfifo(vpd(stage, SLOW))

    start(stage, [TOLD, GPU], hang)
    wait("the others", lambda: nearness(stage)["unknownNics"] == [OF_SLOW] or None)
    stage.run_pod("all", {"rdma/vf": 4, "nvidia.com/gpu": 4})
    found = {pf: gpu and gpu["pciAddress"] for pf, (gpu, _) in rails(stage).items()}
    assert found == {**GPU_BESIDE, OF_SLOW: None}, "each of the four has one pod's traffic, and no guess is told"
    numbers = {
        nic["address"]: nic["rail"] for nic in stage.status()["hardware"]["nics"] if nic["address"] in GPU_BESIDE
    }
    assert numbers == {pf: number for number, pf in enumerate(GPU_BESIDE)}
    wait("the reason", lambda: f"{SLOW}/vpd does not answer" in nearness(stage)["reason"] or None)
    stage.end("agent")
