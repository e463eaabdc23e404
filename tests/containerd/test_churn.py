"""Many pods, several at a time: nothing stays behind, neither ours nor the runtime's.

NODEFABRIC_CHURN_PODS and NODEFABRIC_CHURN_AT_A_TIME make more of it; with -s it says how long sandboxes take.
"""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from hack.sim.machine import SimulatedMachine
from tests.containerd.node import Node, Pod

PODS = int(os.environ.get("NODEFABRIC_CHURN_PODS", "12"))
AT_A_TIME = int(os.environ.get("NODEFABRIC_CHURN_AT_A_TIME", "4"))


def test_many_pods_come_and_go_and_nothing_stays_behind(node: Node, hardware: SimulatedMachine) -> None:
    before = hardware.links.by_device()
    pods = [node.admit(f"p{n}", {"rdma/vf": 1} if n % 3 else {}) for n in range(PODS)]

    def live(pod: Pod) -> tuple[bool, float]:
        began = time.monotonic()
        sandbox = node.run(pod)
        took = time.monotonic() - began
        wanted = bool(pod.units("rdma/vf"))
        assert ("net1" in node.links(sandbox)) is wanted
        node.end(sandbox)
        node.forget(pod)
        return wanted, took

    with ThreadPoolExecutor(AT_A_TIME) as threads:
        times = list(threads.map(live, pods))
    for text, wanted in (("a VF", True), ("nothing of ours", False)):
        median = statistics.median(took for has, took in times if has is wanted)
        print(f"{node.runtime.cri.version()}: a sandbox with {text} is there after {median * 1000:.0f} ms (median)")
    assert node.unhealed(hardware, before) == []
    assert node.runtime.cri.sandboxes() == {}
    assert list(node.runtime.netns_folder.iterdir()) == []
