"""The books are lost while pods have devices by claims: on real links, with the healers of an agent's start."""

from __future__ import annotations

from pathlib import Path

from agent.model.allocation import AttachmentState, ClaimState
from agent.reconcile import Reconciler
from agent.reconcile.claims import Claims
from agent.state import Latest
from cni.finding import Finder
from cni.held import ClaimReader
from cni.node import Node
from tests.agent.reconcile.told_outside import ToldOutside
from tests.cni import tiny_node
from tests.cni.claiming import Scene, of_vf
from tests.cni.networks import PREVIOUS
from tests.cni.tiny_node import open_rig, vf
from tests.live import Live
from tests.waiting import until


def heal(scene: Scene) -> None:
    """Let all healers look once, as at a start."""
    rig = scene.rig
    outside = ToldOutside(units=dict, ours=lambda: [vf(i) for i in range(3)])
    scans = Live(rig.machine.scan)
    node = Node(rig.machine, rig.ledger, scans)
    folder = rig.folder
    rig.attachments.finder = Finder(node, scene.granted, netns_folders=(folder,), processes=folder / "no-proc")
    claims = Claims(rig.ledger, scene.specs, scans, outside, Latest[ClaimReader | None](None))
    Reconciler(rig.ledger, rig.attachments, scans, outside, Latest(False), (claims,)).heal_attachments()


def test_a_device_stays_with_its_claim_and_its_pod_and_comes_home_by_its_del(own_network: None, tmp_path: Path) -> None:
    tiny_node.create(tmp_path)
    with open_rig(tmp_path) as rig:
        before = rig.found(0)
        scene = Scene(rig)
        lost = scene.claim("nics", of_vf(0, ifname="rail0", network={"mtu": 1300}))
        pod = rig.pod()
        scene.start("c1", pod)
    for file in tmp_path.glob("ledger.db*"):
        file.unlink()
    with open_rig(tmp_path) as rig:
        scene = Scene(rig)
        rig.ledger.is_new = True  # as it was before the scene
        heal(scene)
        rig.ledger.is_new = False
        (claim,) = rig.ledger.claims()
        assert (claim.devices, claim.pods, claim.state) == (lost.devices, lost.pods, ClaimState.PREPARED)
        (row,) = (each for each in rig.ledger.attachments() if each.claim_uid == claim.ref.uid)
        assert (row.device, row.ifname, row.state, row.owner.pod.name) == (
            *(vf(0), "rail0", AttachmentState.ATTACHED),
            "pod-of-c1",
        )
        rig.delete("c1", pod, ifname="eth0", prevResult=PREVIOUS)
        rig.await_back()
        assert rig.found(0)[0] == before[0]
        again = rig.pod("again")
        scene.start("c1", again)
        assert scene.rows() == {vf(0): ("c1", "rail0", "uid-nics")}
        until(lambda: rig.in_pod(again, "rail0") is not None)
