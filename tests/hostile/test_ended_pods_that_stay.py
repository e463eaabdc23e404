"""A Job's pod has ended and nobody deletes it: kubelet lists it no more, and the scheduler plugin still counts it.

The plugin takes an object over only if its fingerprint is that of the pods that it counts. While the two differ, a node
that has a pod of any other scheduler answers "invalid node topology data" to every pod of this one.
"""

from __future__ import annotations

from pathlib import Path

from agent.cluster.topology.noderesourcetopology import fingerprint
from agent.config.topology import Topology
from agent.kubelet.podresources import PodDevices
from agent.model.allocation import PodRef
from tests.agent.cluster.publications import Rig
from tests.awaiting import until

BY_DEFAULT = Topology(publish=True, start_spread_seconds=0)
COUNTED = fingerprint([("ns", "running"), ("ns", "ended"), ("ns", "failed")])
"""All bound pods that are not Pending: the plugin's dedicated informer, its default."""


def node(folder: Path, config: Topology = BY_DEFAULT) -> Rig:
    """Make a node with one pod that runs, and with pods that have ended and stay."""
    rig = Rig(folder, config)
    rig.server.state.add_node("worker-1")
    for name, phase in (("running", "Running"), ("ended", "Succeeded"), ("failed", "Failed"), ("new", "Pending")):
        rig.server.state.put_pod("worker-1", "ns", name, phase)
    rig.kubelet.pods = (PodDevices(PodRef("ns", "running")),)
    return rig


async def test_the_scheduler_finds_its_own_fingerprint_in_what_is_published_by_default(tmp_path: Path) -> None:
    async with node(tmp_path) as rig:
        await until(lambda: rig.fingerprint() is not None)
        assert rig.fingerprint() == COUNTED
