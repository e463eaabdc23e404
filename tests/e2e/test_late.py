"""Late binding on a simulated node: slots from kubelet, devices at ADD, CDI specs for as long as the sandbox lives."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.model.locality import Locality
from agent.placement import Distances
from hack.sim.demo import not_back, still_attached
from hack.sim.stage import CONFIG, Stage, settled, wait
from tests.waiting import until

LATE: Mapping[str, Any] = {
    **CONFIG,
    "resources": [
        {"name": "rdma/vf", "kind": "vf", "binding": "late", "select": {"vendors": ["15b3"]}, "network": "rails"},
        {"name": "nvidia.com/gpu", "kind": "gpu"},
    ],
}


@pytest.fixture
def late(stage: Stage) -> Stage:
    """The 8-GPU node with slots."""
    stage.play("h100-8gpu", LATE)
    return stage


def slots_of(pod: Mapping[str, Any], container: int = 0) -> list[str]:
    names = pod["containers"][container]["cdi_devices"]
    return [name.removeprefix("nodefabric.io/vf=") for name in names if "slot" in name]


def specs(stage: Stage) -> dict[str, Mapping[str, Any]]:
    """What the runtime would find for each slot: its edits."""
    found = {}
    for path in (stage.folder / "cdi-specs").glob("*.json"):
        document = json.loads(path.read_text())
        (device,) = document["devices"]
        assert document["kind"] == "nodefabric.io/vf"
        found[device["name"]] = device["containerEdits"]
    return found


def devices_in(stage: Stage, pod: Mapping[str, Any], snapshot: Any, container: int = 0) -> list[str]:
    """The PCI addresses behind a container's slots, from the device nodes of their specs."""
    by_node = {
        c.path: device.address
        for device in snapshot.devices
        if device.is_vf
        for rdma in device.rdma_devices
        for c in rdma.char_devices
    }
    written = specs(stage)
    found = []
    for slot in slots_of(pod, container):
        nodes = [node["path"] for node in written[slot]["deviceNodes"] if "uverbs" in node["path"]]
        assert len(nodes) == 1
        found.append(by_node[nodes[0]])
    return found


def nothing_left(stage: Stage, before: Mapping[str, Any]) -> list[str]:
    return [*not_back(stage.machine, before), *still_attached(stage), *specs(stage)]


def test_all_gpus_of_a_node_find_their_own_vf(late: Stage) -> None:
    snapshot, before = late.machine.scan(), late.machine.links.by_device()
    distances = Distances(snapshot)
    pod = late.run_pod("whole", {"nvidia.com/gpu": 8, "rdma/vf": 8})
    gpus = pod["containers"][0]["devices"]["nvidia.com/gpu"]
    vfs = devices_in(late, pod, snapshot)
    assert sorted(min(distances.distance(gpu, vf) for vf in vfs) for gpu in gpus) == [Locality.PIX] * 8
    # The interfaces are in the order of the GPUs.
    ports = {interface["name"]: interface for interface in pod["cni_result"]["interfaces"] if interface.get("sandbox")}
    in_order = [ports[f"net{n}"]["pciID"] for n in range(1, 9)] if "pciID" in ports["net1"] else []
    for gpu, vf in zip(sorted(gpus, key=distances.gpus.index), in_order, strict=False):
        assert distances.distance(gpu, vf) is Locality.PIX
    late.end_pods("whole")
    assert settled(lambda: nothing_left(late, before)) == []


def test_specs_that_are_removed_under_a_pod_are_back_before_the_reconciler_looks(late: Stage) -> None:
    late.run_pod("a", {"rdma/vf": 2, "nvidia.com/gpu": 1})
    written = specs(late)
    for _ in range(4):  # the reconciler looks once a minute: it could be in time for one of these
        for path in (late.folder / "cdi-specs").glob("*.json"):
            path.unlink()
        assert wait("the specs", lambda: specs(late) == written or None, seconds=10)


def test_a_device_that_no_interface_shows_goes_to_no_second_pod_when_the_books_are_lost(stage: Stage) -> None:
    hardware = stage.build_node("h100-8gpu", with_links=False)
    vfs = [device.address for device in hardware.scan().devices if device.is_vf][:2]
    for n, vf in enumerate(vfs):
        hand_to_programs(hardware.root / "sys/bus/pci/devices" / vf, 70 + n)
    select = {"pciAddresses": vfs, "drivers": ["vfio-pci"]}
    stage.run({"resources": [{"name": "dpdk/vf", "kind": "vf", "binding": "late", "select": select}]})
    (slot,) = slots_of(stage.run_pod("a", {"dpdk/vf": 1}))
    before = specs(stage)
    assert stage.status()["attachments"] == []
    stage.end("agent", signal.SIGKILL)
    for file in (stage.folder / "state").glob("ledger.db*"):
        file.unlink()
    stage.start_agent()
    stage.await_ready()
    assert specs(stage) == before
    (other,) = slots_of(stage.run_pod("b", {"dpdk/vf": 1}))
    told = {name: edits["env"] for name, edits in specs(stage).items()}
    assert sorted(told[name][0].partition("=")[2] for name in (slot, other)) == sorted(vfs)

    def granted() -> dict[str, tuple[str, str]]:
        return {grant["unit"]: (grant["device"], grant["pod"]) for grant in stage.status()["grants"]}

    until(lambda: slot in granted())  # kubelet's word is compared once the lists are made
    assert granted()[slot] == (told[slot][0].partition("=")[2], "default/a")
    stage.end_pods("b")
    assert specs(stage) == before


def hand_to_programs(function: Path, group: int) -> None:
    """Bind a function of a modelled node to vfio-pci."""
    (function / "driver").unlink()
    (function / "driver").symlink_to("../../../../bus/pci/drivers/vfio-pci")
    (function / "iommu_group").unlink(missing_ok=True)
    (function / "iommu_group").symlink_to(f"../../../../kernel/iommu_groups/{group}")


ADAPTERS = ("0000:10:1b.0", "0000:20:1b.0", "0000:90:1b.0", "0000:a0:1b.0")


def spec_of(stage: Stage, kind: str) -> list[tuple[list[str], list[str]]]:
    """List variables and device files of each spec of a kind."""
    found = []
    for path in (stage.folder / "cdi-specs").glob("nodefabric-slot-*.json"):
        document = json.loads(path.read_text())
        if document["kind"] == f"nodefabric.io/{kind}":
            edits = document["devices"][0]["containerEdits"]
            found.append((edits["env"], [node["path"] for node in edits["deviceNodes"]]))
    return found


def test_the_files_of_the_adapters_beside_the_gpus_come_into_the_pod_and_no_interface(stage: Stage) -> None:
    stage.build_node("efa")
    resources = [
        {"name": "ex.com/hca", "kind": "hca", "shares": 1, "binding": "late", "select": {"pciAddresses": ADAPTERS[:2]}},
        {"name": "ex.com/nic", "kind": "nic", "binding": "late", "select": {"pciAddresses": ADAPTERS[2:3]}},
        {"name": "ex.com/early", "kind": "nic", "select": {"pciAddresses": ADAPTERS[3:]}},
        {"name": "nvidia.com/gpu", "kind": "gpu"},
    ]
    stage.run({**CONFIG, "resources": resources, "networks": []})
    snapshot = stage.machine.scan()
    pod = stage.run_pod("a", {"ex.com/hca": 1, "nvidia.com/gpu": 1})
    (gpu,) = pod["containers"][0]["devices"]["nvidia.com/gpu"]
    [(env, files)] = spec_of(stage, "hca")
    [device] = [d for d in snapshot.devices for r in d.rdma_devices if r.char_device("uverbs")[0].path in files]
    distances = Distances(snapshot)
    assert distances.distance(gpu, device.address) == min(distances.distance(gpu, a) for a in ADAPTERS) < Locality.NODE
    assert f"PCIDEVICE_EX_COM_HCA={device.address}" in env
    stage.run_pod("b", {"ex.com/nic": 1, "ex.com/early": 1})
    [(env, _)] = spec_of(stage, "nic")
    assert f"PCIDEVICE_EX_COM_NIC={ADAPTERS[2]}" in env
    assert stage.status()["attachments"] == []
    for name in ("a", "b"):
        stage.end_pods(name)
    assert settled(lambda: list(map(str, (*spec_of(stage, "hca"), *spec_of(stage, "nic"))))) == []
