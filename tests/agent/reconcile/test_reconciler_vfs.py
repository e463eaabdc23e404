"""VFs without a row: looked for in pods, put back under their own names."""

from __future__ import annotations

import itertools

from agent.errors import HardwareError
from agent.kubelet.cri import Sandbox
from agent.kubelet.podresources import HeldUnit
from agent.model.allocation import PodRef
from tests.agent.reconcile.scene import OTHER_VF, Scene
from tests.cni.tiny_node import tiny_snapshot, vf
from tests.node import POD, VF, attach, claimed_vf, owner, prepare


def test_a_vf_that_cannot_be_put_back_keeps_no_other_from_it(scene: Scene) -> None:
    scene.snapshot = tiny_snapshot(3, names={0: "dev7", 1: "dev8"}, in_pods=[2])
    scene.ours = {vf(0), vf(1), vf(2)}
    scene.hands.errors[vf(0)] = HardwareError("netlink says no")
    scene.run_once()
    assert [device for device, _ in scene.hands.strange] == [vf(1)]
    assert [devices for devices, *_ in scene.hands.looked_for] == [(vf(2),)]


def test_a_vf_that_has_no_interface_and_no_row_is_looked_for_with_all_that_is_known(scene: Scene) -> None:
    scene.snapshot = tiny_snapshot(2, in_pods=[0])
    scene.held_units = [HeldUnit(POD, "rdma/vf", VF)]
    scene.sandboxes = [Sandbox("c1", POD, ready=True), Sandbox("old", PodRef("default", "x"), ready=False)]
    scene.run_once()
    assert scene.hands.looked_for == [((VF,), {VF: POD}, {("default", "trainer"): "c1"}, {VF: "rdma/vf"})]
    assert ("adopt", "found-in-pod") in scene.counted
    attach(scene.books, VF, owner())
    scene.run_once()
    assert len(scene.hands.looked_for) == 1


def test_a_vf_of_a_claim_is_looked_for_as_its_pods(scene: Scene) -> None:
    prepare(scene.books)
    prepare(scene.books, "shared", claimed_vf(OTHER_VF), pods=(POD, PodRef("default", "other")), only_pod="")
    scene.snapshot = tiny_snapshot(2, in_pods=[0, 1])
    scene.run_once()
    (looked_for,) = scene.hands.looked_for
    assert looked_for == ((VF, OTHER_VF), {VF: POD}, {}, {})


def test_a_vf_that_an_old_program_took_after_the_start_is_adopted_before_it_is_looked_for(
    scene: Scene,
) -> None:
    scene.snapshot = tiny_snapshot(2)
    scene.run_once()
    scene.snapshot = tiny_snapshot(2, in_pods=[0])
    scene.hands.adopted = (VF,)
    scene.run_once()
    adopted = [action for action in scene.counted if action[0] == "adopt"]
    assert adopted == [("adopt", "replaced-plugin"), ("adopt", "found-in-pod")]


def test_vfs_that_no_resource_offers_are_left_to_whoever_has_them(scene: Scene) -> None:
    scene.ours = set()
    scene.snapshot = tiny_snapshot(2, in_pods=[0], names={1: "net1"})
    scene.run_once()
    assert (scene.hands.looked_for, scene.hands.strange) == ([], [])


def test_vfs_that_are_found_nowhere_are_looked_for_less_and_less_often(scene: Scene) -> None:
    """It opens every namespace of the node, and most of what is missing has no interface for good."""
    scene.snapshot = tiny_snapshot(2, in_pods=[0])
    looked = []
    for _ in range(100):
        before = len(scene.hands.looked_for)
        scene.reconciler.heal_attachments()
        if len(scene.hands.looked_for) > before:
            looked.append(scene.now)
        scene.now += 1
    assert [round(b - a) for a, b in itertools.pairwise(looked)] == [2, 4, 8, 16, 32]
    scene.snapshot = tiny_snapshot(2, in_pods=[0, 1])
    scene.reconciler.heal_attachments()
    assert scene.hands.looked_for[-1][0] == (VF, OTHER_VF)
