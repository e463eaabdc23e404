"""Variables that tell libraries which adapters are theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.config import ENVIRONMENTS, Resource, Select, parse, parse_pf
from agent.edits.build import FILES, helper_variables, variables_of_container
from agent.errors import ConfigError
from agent.model.device import Snapshot
from agent.offer.units import list_units
from hack.sim.pods import Container
from tests.deviceplugin.machines import node
from tests.deviceplugin.rig import rig, run

HCAS = [device.rdma_devices[0] for device in node(rails=2, vfs=0).devices if device.rdma_devices]


def hca(name: str, *words: str, pf: str = "rail0", binding: str = "early") -> Resource:
    return Resource(name, "hca", Select(pf=(parse_pf(pf),)), shares=2, environment=words, binding=binding)


def test_each_word_stands_for_its_variables() -> None:
    assert dict(helper_variables(ENVIRONMENTS, HCAS)) == {
        "NCCL_IB_HCA": "=mlx5_0,mlx5_1",
        "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1",
        "NVSHMEM_HCA_LIST": "mlx5_0:1,mlx5_1:1",
        "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1",
        "MV2_IBA_HCA": "mlx5_0:mlx5_1",
        **FILES,
    }


def test_a_container_without_an_rdma_device_gets_none_but_those_of_files() -> None:
    assert dict(helper_variables(ENVIRONMENTS, [])) == FILES


def test_kubelet_gets_them_with_the_grant(short_folder: Path) -> None:
    async def work() -> None:
        resources = (hca("rdma/a", "nccl"), hca("rdma/b", "ucx", pf="rail1"))
        async with rig(short_folder, resources=resources) as r:
            pod = await r.run_pod("p", Container("main", (("rdma/a", 1), ("rdma/b", 1))))
            (container,) = pod["containers"]
            assert container["envs"] == {"NCCL_IB_HCA": "=mlx5_0", "UCX_NET_DEVICES": "mlx5_1:1"}

    run(work())


def test_a_container_with_units_of_several_resources_gets_one_value_for_all() -> None:
    snapshot: Snapshot = node(rails=3, vfs=0)
    resources = [hca(f"rdma/{n}", *words, pf=f"rail{n}") for n, words in enumerate((("nccl",), ("nccl", "ucx"), ()))]
    units = list_units(resources, snapshot)
    held = [(resource, units[resource.name][:1]) for resource in resources]
    assert dict(variables_of_container(held, snapshot)) == {
        "NCCL_IB_HCA": "=mlx5_0,mlx5_1",
        "UCX_NET_DEVICES": "mlx5_1:1",
    }


def test_two_resources_with_early_binding_may_not_set_one_variable() -> None:
    first = "{name: a/b, kind: vf, environment: [nccl], select: {pf: [x]}}"
    text = f"resources: [{first}, {{name: a/c, kind: hca, environment: [ucx, nccl]}}]"
    with pytest.raises(ConfigError) as refused:
        parse(text, "x")
    (problem,) = refused.value.problems
    assert problem.startswith("resources[1].environment: nccl is set by resources[0] (a/b) already")


def test_resources_with_late_binding_may_set_one_variable() -> None:
    late = "{name: a/%s, kind: vf, binding: late, environment: [nccl], select: {pf: [%s]}}"
    early = "{name: a/d, kind: hca, environment: [nccl]}"
    assert parse(f"resources: [{late % ('b', 'x')}, {late % ('c', 'y')}, {early}]", "x").resources
