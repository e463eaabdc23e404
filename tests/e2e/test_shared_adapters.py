"""A share of an HCA brings an interface upon it, if the resource names a network of such a mode."""

from __future__ import annotations

import subprocess
from typing import Any

from hack.sim.stage import CONFIG, Stage, wait


def kernel_has_macvlan() -> bool:
    """Try it; the test's network is its own."""
    subprocess.run(["ip", "link", "add", "probe0", "type", "veth", "peer", "name", "probe1"], check=True)
    try:
        made = ["ip", "link", "add", "link", "probe0", "name", "probe2", "type", "macvlan"]
        return subprocess.run(made, capture_output=True, check=False).returncode == 0
    finally:
        subprocess.run(["ip", "link", "delete", "probe0"], check=True)


def test_a_pod_with_shares_gets_one_interface_for_each_adapter(stage: Stage) -> None:
    expected = kernel_has_macvlan()
    stage.build_node("h100-8gpu")
    shared = {"name": "shared", "mode": "macvlan", "ipam": stage.ipam("shared", "192.168.200.0/24")}
    hca = {"name": "rdma/hca", "kind": "hca", "select": {"rdmaDevices": ["mlx5_0"]}, "network": "shared"}
    netdev = stage_netdev(stage)
    subprocess.run(["ip", "link", "set", netdev, "up"], check=True)
    stage.run({**CONFIG, "resources": [hca], "networks": [shared]})
    stage.create_pod("a", {"rdma/hca": 2})

    def settled() -> dict[str, Any] | None:
        pod = stage.pod("a")
        return pod if pod is not None and (pod["phase"] == "Running" or pod["message"]) else None

    pod = wait("an end of the pod's ADD", settled)
    if not expected:
        assert f"make macvlan interface net1 upon {netdev}" in pod["message"]
        assert "load the module macvlan" in pod["message"]
        assert stage.status()["attachments"] == []
        return
    assert [i["name"] for i in pod["cni_result"]["interfaces"] if i.get("sandbox")] == ["eth0", "net1"]
    (row,) = stage.status()["attachments"]
    assert row["device"].endswith("/net1")
    stage.end_pods("a")
    assert wait("empty books", lambda: not stage.status()["attachments"])


def stage_netdev(stage: Stage) -> str:
    """Name the interface of the adapter mlx5_0."""
    device = next(d for d in stage.machine.scan().devices if [r.name for r in d.rdma_devices] == ["mlx5_0"])
    assert device.netdev is not None
    return device.netdev.name
