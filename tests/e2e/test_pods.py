"""Pods come and go: what they get, and that nothing of it stays behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agent.kubelet import checkpoint
from hack.sim.demo import not_back, still_attached
from hack.sim.stage import Stage, in_pod, settled

ALL = {"rdma/hca": 1, "rdma/vf": 1, "nvidia.com/gpu": 1}


def units(pod: dict[str, Any], resource: str) -> list[str]:
    found: list[str] = pod["containers"][0]["devices"].get(resource, [])
    return found


def noted(stage: Stage) -> list[str]:
    """List the units whose Allocate kubelet has had answered. They are granted in the agent's books a moment before."""
    return [unit for entry in checkpoint.entries(stage.folder / "kubelet") or () for unit in entry.unit_ids]


def allocatable(stage: Stage, resource: str) -> int:
    """Tell how many units of a resource kubelet may hand out."""
    file = stage.folder / "pods/node.json"
    node = json.loads(file.read_text()) if file.exists() else {"allocatable": {}}
    return int(node["allocatable"].get(resource, 0))


def restraints(process: str) -> tuple[int, int]:
    status = dict(line.split(":", 1) for line in Path(process, "status").read_text().splitlines())
    return int(status["Seccomp_filters"]), int(status["NoNewPrivs"])


def test_pods_get_their_devices_and_leave_nothing_behind(node: Stage) -> None:
    machine = node.machine
    before = machine.links.by_device()
    for name in ("a", "b"):
        node.create_pod(name, ALL)
    a, b = node.await_pod("a"), node.await_pod("b")

    vf = units(a, "rdma/vf")[0]
    link = machine.links.by_device()
    assert vf not in link
    address = next(ip["address"] for ip in a["cni_result"]["ips"] if ip["address"].startswith("192.168.100."))
    assert address in in_pod(a, "ip", "-brief", "address", "show", "net1")
    other = next(ip["address"] for ip in b["cni_result"]["ips"] if ip["address"].startswith("192.168.100."))
    assert "2 received" in in_pod(a, "ping", "-c", "2", "-i", "0.2", "-W", "2", other.partition("/")[0])
    assert {row["pod"] for row in node.status()["attachments"]} == {"default/a", "default/b"}

    leases = node.folder / "leases-rails/rails"
    assert len(list(leases.glob("192.168.*"))) == 2
    assert len(node.status()["grants"]) == 6

    # The agent that attaches has given up mounts and the like in every thread.
    filters, _ = restraints("/proc/self")
    threads = [*Path(f"/proc/{node.processes['agent'].pid}/task").iterdir()]
    assert len(threads) > 5
    assert {restraints(str(thread)) for thread in threads if thread.exists()} == {(filters + 1, 1)}

    node.end_pods("a", "b")
    assert settled(lambda: [*not_back(machine, before), *still_attached(node)]) == []
    assert list(leases.glob("192.168.*")) == []
    assert settled(lambda: [grant["unit"] for grant in node.status()["grants"]]) == []
    assert [resource["granted"] for resource in node.status()["resources"]] == [0, 0, 0]


def test_the_variable_lists_vfs_in_the_order_of_interfaces_and_a_share_brings_one_adapters_files(
    node: Stage,
) -> None:
    pod = node.run_pod("many", {"rdma/vf": 6})
    interfaces = [row for row in node.status()["attachments"] if row["pod"] == "default/many"]
    by_name = {row["ifname"]: row["device"] for row in interfaces}
    listed = pod["containers"][0]["envs"]["PCIDEVICE_RDMA_VF"].split(",")
    assert listed == [by_name[f"net{number}"] for number in range(1, 7)]
    assert all(f"net{number}@" in in_pod(pod, "ip", "-brief", "link") for number in range(1, 7))
    files = node.files_of(node.run_pod("shares", {"rdma/hca": 1})["containers"][0])
    assert sum("uverbs" in path for path in files) == 1
    assert {path for path in files if "uverbs" not in path} == {"/dev/infiniband/rdma_cm"}
