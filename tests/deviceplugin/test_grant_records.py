"""Granted VFs and their device-info files, from kubelet's call to the day that the VF is free."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from agent.config import Flags, Resource, parse
from agent.edits.device_info import GrantedFiles
from agent.errors import Unavailable
from agent.offer.units import plain_offer
from agent.state import Latest
from deviceplugin.grant_records import GrantRecords
from hack.sim.pods import Container
from tests.agent.edits import unit_specs_rig as units
from tests.awaiting import until
from tests.deviceplugin.desk import GPU, HCA
from tests.deviceplugin.rig import rig
from tests.node import attach, node, owner

POD = Container("main", (("rdma/vf", 1),))


def names(folder: Path) -> list[str]:
    found = folder / "devinfo/dp"
    return sorted(os.listdir(found)) if found.exists() else []


async def test_a_granted_vf_has_its_file_when_kubelet_has_its_answer_and_again_at_the_next_start(
    short_folder: Path,
) -> None:
    async with rig(short_folder) as r:
        await r.run_pod("a", POD)
        (hold,) = r.ledger.holds()
        (name,) = names(short_folder)
        assert name == f"rdma-vf-{hold.key}-device.json"
        document = json.loads((short_folder / "devinfo/dp" / name).read_text())
        assert document["pci"]["pci-address"] == hold.device
        assert document["pci"]["pf-pci-address"]
    (short_folder / "devinfo/dp" / name).unlink()
    async with rig(short_folder):
        await until(lambda: names(short_folder) == [name])


@pytest.mark.parametrize(
    ("resource", "name"), [(GPU, GPU.name), (HCA, HCA.name), (Resource("rdma/vf", "vf", binding="late"), "rdma/vf")]
)
async def test_other_resources_have_none_nor_slots_of_which_nobody_knows_yet_what_is_behind_them(
    short_folder: Path, resource: Resource, name: str
) -> None:
    async with rig(short_folder, resources=(resource,)) as r:
        assert (await r.run_pod("a", Container("main", ((name, 1),))))["phase"] == "Running"
        assert len(r.ledger.holds()) == 1
        assert names(short_folder) == []


async def test_a_file_stays_until_the_vf_is_neither_granted_nor_in_a_pod(short_folder: Path) -> None:
    async with rig(short_folder) as r:
        await r.run_pod("a", POD)
        (hold,) = r.ledger.holds()
        row = await asyncio.to_thread(attach, r.ledger, hold.device, owner("c1"))
        await asyncio.to_thread(r.ledger.release, [hold.key])
        await r.run_pod("b", POD)
        await until(lambda: len(names(short_folder)) == 2)
        assert f"rdma-vf-{hold.device}-device.json" in names(short_folder)
        await asyncio.to_thread(r.ledger.release, [each.key for each in r.ledger.holds()])
        await until(lambda: len(names(short_folder)) == 1)
        assert len(names(short_folder)) == 1
        await asyncio.to_thread(r.ledger.finish_detach, row)
        await until(lambda: names(short_folder) == [])


async def test_a_bonds_row_makes_no_folders(short_folder: Path) -> None:
    async with rig(short_folder) as r:
        await r.run_pod("a", POD)
        (hold,) = r.ledger.holds()
        await asyncio.to_thread(attach, r.ledger, f"{hold.device}+0000:ff:00.1/c1/net1", owner("c1"))
        before = names(short_folder)
        (short_folder / "devinfo/dp" / before[0]).unlink()
        await until(lambda: names(short_folder) != [])
        assert names(short_folder) == before


def test_a_pools_spec_that_cannot_be_written_leaves_no_unit_with_the_files_of_another_device(tmp_path: Path) -> None:
    pool = {"resourceName": "vf", "selectors": {"pfNames": ["rail0"], "isRdma": True}}
    resources = (units.HCA, *parse(json.dumps({"resourceList": [pool]}), "x", Flags(use_cdi=True)).resources)
    snapshot = units.with_vf_rdma(node(), "0000:12:00.1")
    later = units.permuted(snapshot)
    with units.opened(tmp_path) as r:
        r.grant(snapshot, units.HCA, share := "hca-b83fd20300a00001-0")
        offer = plain_offer(resources, later)
        records = GrantRecords(r.ledger, GrantedFiles(tmp_path), Latest(offer), r.specs, r.units)
        (r.folder / "nodefabric-pool-intel.com_net-pci.json").mkdir()  # in the way
        with pytest.raises(Unavailable, match="pool"):
            records.renew(offer, resources)
        (verbs,) = later.by_address["0000:22:00.0"].rdma_devices[0].char_device("uverbs")
        assert verbs.path in r.files(share)
