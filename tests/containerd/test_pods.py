"""Pods of a real runtime: what they get over CNI, device nodes and CDI, and that nothing stays behind."""

from __future__ import annotations

from hack.sim.machine import SimulatedMachine
from hack.sim.stage import files_of
from tests.containerd import machine
from tests.containerd.node import SPECS, Node
from tests.containerd.suites import RUNTIMES

ALL = {"rdma/hca": 1, "rdma/vf": 1, "nvidia.com/gpu": 1}


@RUNTIMES
def test_a_pod_gets_its_vf_and_its_device_files_can_open_no_others_and_leaves_nothing_behind(
    node: Node, hardware: SimulatedMachine
) -> None:
    before = hardware.links.by_device()
    pod = node.admit("a", ALL)
    sandbox = node.run(pod)
    vf, gpu = pod.units("rdma/vf")[0], pod.units("nvidia.com/gpu")[0]

    assert vf not in hardware.links.by_device()
    link = node.links(sandbox)["net1"]
    assert link["address"] == before[vf].mac
    assert link["mtu"] == 4200
    assert [a["local"].startswith("192.168.100.") for a in link["addr_info"] if a["family"] == "inet"] == [True]
    assert [(row["pod"], row["device"]) for row in node.stage.status()["attachments"]] == [("default/a", vf)]

    container = node.start_container(pod, sandbox)
    shown = node.shell(container, "b ls /dev /dev/infiniband; echo $GPU_BY_CDI $PCIDEVICE_RDMA_VF; b ip addr show net1")
    assert shown.status == 0, shown.stderr
    files = files_of(pod.containers[0], SPECS)
    nodes = {path.removeprefix("/dev/infiniband/") for path in files}
    assert {word for word in shown.stdout.split() if word.startswith(("uverbs", "rdma_cm"))} == nodes
    index = next(g.index for g in hardware.gpus if g.uuid == gpu)
    assert [word for word in shown.stdout.split() if word.startswith("nvidia")] == [f"nvidia{index}"]
    assert f"{gpu} {vf}" in shown.stdout
    assert before[vf].mac in shown.stdout
    # A container may make any device file; the runtime's control group says which it may open.
    foreign = next(name for name in ("uverbs0", "uverbs1", "uverbs2") if name not in nodes)
    made = f"b mknod /tmp/other c {machine.RDMA_MAJOR} {machine.minor_of(foreign)}"
    assert "not permitted" in node.shell(container, f"{made}; exec 3</tmp/other").stderr
    for path in files:
        if "uverbs" in path:
            assert "not permitted" not in node.shell(container, f"exec 3<{path}").stderr

    node.end(sandbox)
    node.forget(pod)
    assert node.unhealed(hardware, before) == []
    assert node.runtime.cri.sandboxes() == {}
