"""A node whose devices have other numbers when the agent starts again, while kubelet replays what it was answered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.hardware import recorded
from agent.model.device import Snapshot
from hack.sim.machine import SimulatedMachine
from hack.sim.stage import CONFIG, Stage, settled
from tests.e2e.test_late import hand_to_programs
from tests.renumbered import lay_out, permuted
from tests.waiting import until

NODE = "h100-8gpu"
VFIO = {"0000:18:00.1": 70, "0000:3a:00.1": 71}
"""VFs for programs, and their IOMMU groups."""
DOCUMENT: Mapping[str, Any] = {
    "resources": [
        {"name": "rdma/hca", "kind": "hca", "management": True, "environment": ["nccl"], "shares": 4},
        {"name": "dpdk/vf", "kind": "vf", "select": {"pciAddresses": list(VFIO), "drivers": ["vfio-pci"]}},
        *CONFIG["resources"][2:],
    ]
}


def begin(stage: Stage, **more: object) -> None:
    hardware = stage.build_node(NODE, with_links=False)
    for address, group in VFIO.items():
        hand_to_programs(hardware.root / "sys/bus/pci/devices" / address, group)
    stage.run({**DOCUMENT, **more})


def reboot(stage: Stage) -> Snapshot:
    """Start the agent anew where all devices have each other's numbers. Specs are on a tmpfs, and gone."""
    stage.end("agent")
    for spec in (stage.folder / "cdi-specs").glob("*"):
        spec.unlink()
    place = lay_out(stage.folder, "node-2", permuted(recorded.find(NODE).read_text()), with_links=False)
    hardware = SimulatedMachine.open(place)
    for (address, _), group in zip(VFIO.items(), reversed(VFIO.values()), strict=True):
        hand_to_programs(hardware.root / "sys/bus/pci/devices" / address, group)
    snapshot = hardware.scan()
    hardware.close()
    stage.host = ("--simulate", str(place))
    stage.start_agent()
    stage.await_ready()
    return snapshot


def own_files(stage: Stage, snapshot: Snapshot, pod: str) -> set[str]:
    """The files that are the devices' of a pod's units, by the node's sysfs."""
    granted = {grant["unit"]: grant["device"] for grant in stage.status()["grants"]}
    found = stage.pod(pod)
    assert found is not None
    units = [unit for c in found["containers"] for ids in c["devices"].values() for unit in ids]
    devices = [snapshot.by_address[granted[unit]] for unit in units]
    rdma = {c.path for d in devices for r in d.rdma_devices for c in r.char_devices if not d.is_for_vfio}
    groups = {f"/dev/vfio/{d.iommu_group}" for d in devices if d.is_for_vfio}
    return (rdma | {"/dev/infiniband/rdma_cm"} if rdma else set()) | (groups | {"/dev/vfio/vfio"} if groups else set())


def files(stage: Stage, pod: str) -> set[str]:
    """The files that a runtime would give to a pod's container now."""
    found = stage.pod(pod)
    assert found is not None
    return set(stage.files_of(found["containers"][0]))


def test_each_container_keeps_its_own_devices_when_all_numbers_are_others(stage: Stage) -> None:
    begin(stage)
    pods = {"a": {"rdma/hca": 2}, "b": {"rdma/hca": 1}, "c": {"dpdk/vf": 1}, "d": {"dpdk/vf": 1, "rdma/hca": 1}}
    for name, limits in pods.items():
        answered = stage.run_pod(name, limits)["containers"][0]
        assert answered["device_nodes"] == []
        assert not any("mlx5" in value for value in answered["envs"].values())
    before = {name: files(stage, name) for name in pods}
    snapshot = reboot(stage)
    after = {name: files(stage, name) for name in pods}
    assert {name: own_files(stage, snapshot, name) for name in pods} == after
    assert all(after[name] != before[name] for name in pods)
    assert "renumbered" not in stage.status()["obstacles"]
    assert settled(lambda: sorted(specs(stage) ^ {grant["unit"] for grant in stage.status()["grants"]})) == []


def specs(stage: Stage) -> set[str]:
    """The units that have a spec."""
    folder = stage.folder / "cdi-specs"
    return {p.name.removeprefix("nodefabric-unit-").removesuffix(".json") for p in folder.glob("nodefabric-unit-*")}


def test_units_whose_pod_was_told_paths_are_withheld_when_these_are_anothers(stage: Stage) -> None:
    begin(stage, cdiNames=False)
    told = stage.run_pod("a", {"rdma/hca": 1})["containers"][0]
    (unit,) = told["devices"]["rdma/hca"]
    assert told["cdi_devices"] == []
    assert any("uverbs" in node["host"] for node in told["device_nodes"])
    assert specs(stage) == set()
    stage.write_config(DOCUMENT)  # an update, say
    reboot(stage)
    until(lambda: "renumbered" in stage.status()["obstacles"])
    text = stage.status()["obstacles"]["renumbered"]
    assert f"container worker of pod default/a has {unit} of rdma/hca" in text
    assert "recreate the pod" in text
    assert stage.status()["ready"]
    (resource,) = [found for found in stage.status()["resources"] if found["name"] == "rdma/hca"]
    assert {(ill["unit"], ill["reason"]) for ill in resource["unhealthy"] if ill["reason"] == "Renumbered"} == {
        (unit, "Renumbered")
    }
    assert stage.run_pod("b", {"rdma/hca": 1})["containers"][0]["cdi_devices"]
    assert "Renumbered" in stage.fetch("/metrics")


def test_a_folder_of_specs_that_cannot_be_written_leaves_paths(stage: Stage) -> None:
    (stage.folder / "cdi-specs").write_text("in the way")
    begin(stage)
    told = stage.run_pod("a", {"rdma/hca": 1})["containers"][0]
    assert told["cdi_devices"] == []
    assert any("uverbs" in node["host"] for node in told["device_nodes"])
    assert Path(stage.folder / "cdi-specs").read_text() == "in the way"
