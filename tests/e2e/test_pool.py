"""A network as Multus calls it, with no device: the agent chooses among VFs that no resource offers."""

from __future__ import annotations

from typing import Any

from agent.model.locality import Locality
from agent.placement import Distances
from hack.sim.stage import CONFIG, Stage, settled


def test_a_pod_gets_a_vf_beside_its_gpu_that_no_resource_offers(stage: Stage) -> None:
    machine = stage.build_node("h100-8gpu")
    snapshot = machine.scan()
    pfs = sorted({netdev.name for d in snapshot.devices if d.is_vf and (netdev := snapshot.pf_netdev(d)) is not None})
    offered = {"name": "rdma/vf", "kind": "vf", "select": {"pf": [f"{pf}#0-2" for pf in pfs]}}
    stage.run({**CONFIG, "resources": [offered, {"name": "nvidia.com/gpu", "kind": "gpu"}]})
    pod = stage.run_pod("a", {"nvidia.com/gpu": 1})
    (gpu,) = pod["containers"][0]["devices"]["nvidia.com/gpu"]

    def call(command: str) -> dict[str, Any]:
        status, answer = stage.call(command, {"pf": pfs}, "sandbox-of-a", pod["netns"], "net7", "a")
        assert status == 0, answer
        return answer

    interface = call("ADD")["interfaces"][0]
    device = snapshot.by_address[interface["pciID"]]
    assert device.vf_index is not None
    assert device.vf_index > 2
    assert Distances(snapshot).distance(device.address, gpu) is Locality.PIX
    assert device.address in {row["device"] for row in stage.status()["attachments"]}
    scraped = stage.fetch("/metrics")
    assert f'nodefabric_rdma_port_active{{device="{device.address}"' in scraped
    assert any(
        f'device="{device.address}"' in line and 'pod="a"' in line
        for line in scraped.splitlines()
        if line.startswith("nodefabric_allocation_info{")
    )
    before = machine.links.by_device()
    assert device.address not in before
    call("DEL")
    assert settled(lambda: [row["device"] for row in stage.status()["attachments"]]) == []
    stage.end_pods("a")
