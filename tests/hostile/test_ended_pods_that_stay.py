"""A Job's pod has ended and nobody deletes it: kubelet lists it no more, and the scheduler plugin still counts it.

The plugin takes an object over only if its fingerprint is that of the pods that it counts. While the two differ, a node
that has a pod of any other scheduler answers "invalid node topology data" to every pod of this one.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from agent.cluster.topology.noderesourcetopology import fingerprint
from agent.config.topology import Fingerprint, Topology
from agent.kubelet.podresources import PodDevices
from agent.model.allocation import PodRef
from hack.sim.cluster.apiserver import Fault
from tests.agent.cluster.publications import Rig
from tests.awaiting import until

BY_DEFAULT = Topology(publish=True, coalesce_seconds=0.02, start_spread_seconds=0)
LISTED = fingerprint([("ns", "running")])
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


def test_the_scheduler_finds_its_own_fingerprint_in_what_is_published_by_default(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node(tmp_path) as rig:
            await until(lambda: rig.fingerprint() is not None)
            assert rig.fingerprint() == COUNTED

    asyncio.run(scenario())


def test_without_the_right_to_list_pods_status_says_what_that_does_and_what_helps(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = node(tmp_path)
        rig.server.state.set_fault(Fault(status=403, path="/api/v1/pods"))
        async with rig:
            await until(lambda: rig.fingerprint() == LISTED)
            said = str(rig.complaints[-1])
            assert "pods that have ended and are not deleted" in said
            assert "topology.fingerprint.pods: podresources" in said

    asyncio.run(scenario())


def test_who_chooses_kubelets_list_needs_no_right_and_is_not_warned(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = node(tmp_path, replace(BY_DEFAULT, fingerprint=Fingerprint("podresources")))
        rig.server.state.set_fault(Fault(status=403, path="/api/v1/pods"))
        async with rig:
            await until(lambda: rig.fingerprint() == LISTED)
            assert rig.complaints == []

    asyncio.run(scenario())
