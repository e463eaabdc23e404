"""Networks as a namespace's users write them, who name whatever device they like: the real relay, agent and kubelet."""

from __future__ import annotations

from typing import Any

from hack.sim.runtime import make_netns, remove_netns
from hack.sim.stage import CONFIG, Stage, settled, wait
from tests.e2e.test_pods import units


def call(stage: Stage, command: str, pod: str | None, **conf: Any) -> tuple[int, dict[str, Any]]:
    """Call the relay as Multus does for a pod, into a namespace beside it; for no pod, as somebody does by hand."""
    return stage.call(command, conf, f"sandbox-of-{pod}", stage.folder / "beside", "net7", pod)


def play(stage: Stage, **more: Any) -> None:
    """Start a node whose cluster network does not chain the plugin, as with Multus."""
    stage.run({**CONFIG, **more}, conflist=[{"type": "ptp", "ipam": stage.ipam("cluster", "10.244.0.0/24")}])
    make_netns(stage.folder / "beside")


def test_a_network_that_a_tenant_wrote_takes_no_device_that_kubelet_gave_to_another(stage: Stage) -> None:
    snapshot = stage.build_node("h100-8gpu").scan()
    play(stage)
    pf = next(device for device in snapshot.devices if device.vfs)
    assert pf.netdev is not None
    stage.create_pod("a", {"rdma/vf": 1, "rdma/hca": 1})
    stage.create_pod("b", {"rdma/vf": 1})
    (mine,), (others,) = (units(stage.await_pod(name), "rdma/vf") for name in ("a", "b"))
    (share,) = units(stage.await_pod("a"), "rdma/hca")
    idle = next(d.address for d in snapshot.devices if d.is_vf and d.address not in (mine, others))
    refused = [
        ("a", {"deviceID": others}, f"{others} belongs to rdma/vf, and kubelet has given it to "),
        ("a", {"type": "sriov", "deviceID": others}, f"{others} belongs to rdma/vf"),
        ("a", {"deviceID": idle}, f"{idle} belongs to rdma/vf, and kubelet has given it to no known pod"),
        ("a", {"mode": "nic", "deviceID": pf.address}, "belongs to rdma/hca"),
        ("a", {"mode": "nic", "master": pf.netdev.name}, "belongs to rdma/hca"),
        ("b", {"mode": "macvlan", "master": pf.netdev.name}, f"{pf.netdev.name} belongs to rdma/hca"),
        ("b", {"mode": "macvlan", "deviceID": share}, " belongs to rdma/hca"),
        ("nobody", {"deviceID": idle}, "kubelet knows no pod default/nobody"),
        (None, {"deviceID": idle}, "this call names no pod in CNI_ARGS"),
    ]
    for pod, conf, why in refused:
        status, answer = call(stage, "ADD", pod, **conf)
        assert (status, answer["code"], answer["details"]) == (1, 7, "NotAllowed"), (conf, answer)
        assert why in answer["msg"]
        assert "cni.requireGrant: false" in answer["msg"]
        assert call(stage, "DEL", pod, **conf) == (0, {})
    assert stage.status()["attachments"] == []

    _, answer = call(stage, "ADD", "a", mode="macvlan", deviceID=share)
    assert "is down" in answer["msg"]  # so the share has been taken for the adapter, and the adapter for the pod's
    status, answer = call(stage, "ADD", "a", deviceID=mine)
    assert (status, answer["interfaces"][0]["pciID"]) == (0, mine)
    assert call(stage, "ADD", "a", deviceID=mine) == (0, answer)
    assert call(stage, "DEL", "a", deviceID=mine) == (0, {})

    # b's VF goes to c, among all the others, before anybody has told the agent that b is gone.
    stage.end_pods("b")
    count = sum(device.is_vf for device in snapshot.devices) - 1
    assert others in units(stage.run_pod("c", {"rdma/vf": count}), "rdma/vf")
    assert call(stage, "ADD", "a", deviceID=others)[0] == 1
    assert call(stage, "ADD", "c", deviceID=others)[0] == 0
    assert call(stage, "DEL", "c", deviceID=others) == (0, {})

    stage.write_config({**CONFIG, "cni": {"requireGrant": False}})
    wait("the new configuration", lambda: call(stage, "ADD", None, deviceID=idle)[0] == 0 or None)
    assert call(stage, "DEL", None, deviceID=idle) == (0, {})
    assert settled(lambda: [row["device"] for row in stage.status()["attachments"]]) == []
    remove_netns(stage.folder / "beside")
