"""Who is named in the relay's file of pods while the configuration is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agent.config import Config
from agent.errors import Unavailable
from agent.kubelet import checkpoint
from agent.model.allocation import PodRef
from agent.model.unit_id import slot_id
from agent.process import relay_file
from cni.pods_file import kernel_boot_id
from hack.sim.dra.claims import CHECKPOINT, ClaimCache, ClaimInfo
from tests.agent.operator.uninstalling import CLAIM
from tests.node import VF, attach, gpu_uuid, granted, open_books, owner

SHARE, GPU = "hca-b83fd20300a00001-2", gpu_uuid(0)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "device-plugins").mkdir()
    return Config(state_dir=tmp_path, run_dir=tmp_path / "run", kubelet_dir=tmp_path)


def written(config: Config) -> tuple[str, set[str]]:
    """Write the file; return its line about unknown pods, and the names."""
    relay_file.write(config)
    _, boot, unknown, *names, end = (config.run_dir / "cni.sock.pods").read_text().splitlines()
    assert (boot, end) == (f"boot {kernel_boot_id()}", "end")
    return unknown, set(names)


def note(config: Config, **units: str) -> None:
    """Have kubelet's checkpoint name the pods, by UID, that have these units."""
    entries = [
        {"PodUID": uid, "ContainerName": "c", "ResourceName": "x/y", "DeviceIDs": {"-1": [unit]}}
        for uid, unit in units.items()
    ]
    (config.kubelet_dir / checkpoint.FILE).write_text(json.dumps({"Data": {"PodDeviceEntries": entries}}))


def test_books_and_kubelets_notes_say_who_may_have_something(config: Config) -> None:
    with open_books(config.state_dir) as books:
        books.grant(granted("rdma/hca", {SHARE: "0000:22:00.0"}))
        books.grant(granted("nvidia.com/gpu", {GPU: GPU}))
        attach(books, "0000:3b:00.3", owner())
        books.prepare_claim(replace(CLAIM, pods=(PodRef("default", "claimer", "u"),)))
    assert written(config) == ("unknown 1", {"default/trainer", "default/claimer", "default/"})
    note(config, granted=SHARE, other=GPU)
    assert written(config) == ("unknown 0", {"default/trainer", "default/claimer", "default/", "granted"})


def test_notes_of_kubelet_that_cannot_be_read_are_not_taken_for_none(config: Config) -> None:
    (config.kubelet_dir / checkpoint.FILE).mkdir()
    with pytest.raises(Unavailable, match="cannot be read: it names pods that have devices"):
        relay_file.write(config)


def test_where_there_are_no_books_kubelets_notes_count(config: Config) -> None:
    assert written(config) == ("unknown 0", set())
    (config.run_dir / "cni.sock.pods").unlink()
    note(config, vf=VF, slot=slot_id("rdma/vf", 0, 3), gpu=GPU)
    noted = ClaimCache(config.kubelet_dir / CHECKPOINT)
    noted.add(ClaimInfo("c1", "ai", "rails", {"p1"}, {"nodefabric.io": []}))
    noted.save()
    assert written(config) == ("unknown 0", {"vf", "slot", "ai/"})
    assert not config.ledger_path.exists()
    note(config)
    assert written(config)[1] == {"vf", "slot", "ai/"}  # a file of this boot is true: nothing was granted since
