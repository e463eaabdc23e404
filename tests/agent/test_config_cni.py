"""The section `cni`: what networks may name, and adapters that the host keeps for itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent import config
from agent.config import CniSettings, Config, Resource
from agent.config.files import Sources
from agent.config.resources import RailNic
from agent.errors import ConfigError
from agent.offer.units import plain_offer
from tests.deviceplugin.machines import node


def test_grants_are_required_unless_the_file_says_otherwise() -> None:
    assert config.parse("{}", "test").cni == CniSettings(require_grant=True, protect=())
    read = config.parse('cni: {requireGrant: false, protect: [ens2f0, "0000:3B:00.0"]}', "test").cni
    assert read == CniSettings(require_grant=False, protect=("ens2f0", "0000:3b:00.0"))


def test_an_adapter_that_is_protected_and_offered_by_name_is_an_error_with_its_path() -> None:
    text = """
cni: {protect: [ens2f0, "0000:3b:00.0", "with space", 3]}
networks:
  - {name: upon, mode: macvlan, master: ens2f0}
resources:
  - {name: rdma/hca, kind: hca, select: [{pf: [ENS2F0]}, {pf: [ens1f0]}]}
  - {name: rdma/nic, kind: nic, select: {rootDevices: ["0000:3B:00.0"], netdevs: [ens2f0]}}
  - {name: rdma/vf, kind: vf, select: {pf: [ens2f0], pciAddresses: ["0000:3b:00.0"]}}
  - {name: rdma/rail, kind: rail, nic: {kind: nic, select: {netdevs: [ens2f0]}}}
"""
    with pytest.raises(ConfigError) as caught:
        config.parse(text, "test")
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "cni.protect[2]",
        "cni.protect[3]",
        "resources[0].select[0].pf",
        "resources[1].select.netdevs",
        "resources[1].select.rootDevices",
        "resources[2].select.pciAddresses",
        "resources[3].nic.select.netdevs",
        "networks[0].master",
    ]
    assert "ens2f0 carries no pod's interface, since cni.protect names it" in caught.value.problems[-1]


@pytest.mark.parametrize("name", ["rail1", "0000:22:00.0"])
def test_a_protected_adapter_is_left_out_of_what_resources_take_and_its_vfs_are_not(name: str) -> None:
    snapshot = node(rails=2, vfs=2)
    resources = (
        Resource("rdma/hca", "hca", shares=1),
        Resource("rdma/vf", "vf"),
        Resource("rdma/rail", "rail", nic=RailNic("hca", shares=1)),
    )
    for resource in resources:
        free = plain_offer([resource], snapshot).offered[resource.name]
        (kept,) = Config(resources=(resource,), cni=CniSettings(protect=(name,))).resources
        left = plain_offer([kept], snapshot).offered[resource.name]
        assert any(unit.device == "0000:22:00.0" for unit in free) is (resource.kind != "vf")
        assert all(unit.device != "0000:22:00.0" for unit in left)
        if resource.kind == "vf":
            assert left == free


def test_what_is_protected_is_so_for_other_plugins_files_too(tmp_path: Path) -> None:
    own, shared = tmp_path / "config.yaml", tmp_path / "shared.json"
    own.write_text("cni: {protect: [rail1]}")
    shared.write_text('{"configList": [{"resourceName": "hca", "rdmaHcaMax": 4, "selectors": {"vendors": ["15b3"]}}]}')
    (pool,) = Sources(own, shared=shared).load().resources
    snapshot = node(rails=2, vfs=0)
    rdma = {d.address: {r.name for r in d.rdma_devices} for d in snapshot.devices if d.rdma_devices}
    (first, *_) = plain_offer([pool], snapshot).offered[pool.name]
    assert set(first.rdma_devices) == set().union(*rdma.values()) - rdma["0000:22:00.0"]
