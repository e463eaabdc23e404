"""Bindings and specs that no call asks for any more, and slots of a resource that is configured no more."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from agent.errors import Unavailable, UnknownUnit
from agent.kubelet.checkpoint import FILE
from agent.model.allocation import Binding
from agent.reconcile.units import SlotView
from tests import descriptors
from tests.agent.reconcile.scene import Scene
from tests.cni.slots.binding import LATE, OTHER, POD, RESOURCES, Rig, call, slot


def test_specs_are_made_to_fit_the_books(rig: Rig) -> None:
    rig.grant(POD, slot(0), slot(1))
    rig.bind(call("c1"))
    written = [rig.spec(slot(n)) for n in range(2)]
    rig.specs.remove(slot(0))
    rig.specs.write("vf", slot(1), {"env": ["STALE=1"]})
    rig.specs.write("vf", slot(2), {"env": ["NOBODYS=1"]})
    silent = SlotView(time.time(), (), None, None)
    assert set(rig.mend(silent)) == {("spec-write", slot(0)), ("spec-write", slot(1))}
    assert [rig.spec(slot(n)) for n in range(2)] == written
    assert rig.mend(rig.known()) == (("spec-remove", slot(2)),)
    assert rig.mend(rig.known()) == ()
    assert rig.specs.slots() == {slot(0), slot(1)}


def test_a_resource_that_is_configured_no_more_is_named_with_what_helps(rig: Rig) -> None:
    rig.grant(POD, slot(0))
    for others in (RESOURCES[1:], (replace(LATE, binding="early"), *RESOURCES[1:])):
        rig.resources = others
        with pytest.raises(
            UnknownUnit, match=r"container worker has slots of rdma/vf.*put the resource back, or recre"
        ):
            rig.bind(call("c1"))
        with pytest.raises(UnknownUnit):  # by a new agent too
            rig.make().bind(call("c1"), lambda: True)
    assert rig.ledger.bindings() == ()
    rig.resources = RESOURCES
    assert rig.bind(call("c1")).keys() == {slot(0)}


def test_a_resource_that_leaves_the_configuration_while_its_devices_are_waited_for_is_named(rig: Rig) -> None:
    rig.grant(POD, slot(0))
    for n, device in enumerate(rig.vfs):
        rig.attach(device, call(f"old-{n}"))

    def leave() -> bool:
        rig.resources = RESOURCES[1:]
        return True

    with pytest.raises(UnknownUnit, match="put the resource back"):
        rig.bind(call("c1"), leave)


def test_pods_without_slots_start_whatever_became_of_late_binding(rig: Rig) -> None:
    rig.grant(POD, slot(0))
    rig.resources = RESOURCES[1:]
    assert rig.bind(call("c2", OTHER)) == {}
    rig.ledger.release([slot(0)])
    asked = rig.asked
    assert rig.bind(call("c2", OTHER)) == {}
    assert rig.asked == asked  # nobody has any slots


def test_bindings_are_released_by_what_is_over_and_not_by_what_came_since(rig: Rig) -> None:
    rig.grant(POD, slot(0))
    rig.grant(OTHER, slot(1))
    rig.bind(call("c1"))
    rig.bind(call("c2", OTHER))
    released = rig.bound.release(lambda binding: binding.container_id == "c1")
    assert [b.unit_id for b in released] == [slot(0)]
    assert rig.specs.slots() == {slot(1)}
    assert rig.bound.release(lambda binding: False) == ()


def test_what_kubelets_checkpoint_counts_to_a_pod_is_told(rig: Rig) -> None:
    rig.grant(POD, slot(0), slot(1))
    rig.bind(call("c1"))
    first, second = rig.ledger.bindings()
    assert not rig.bound.is_noted(first)
    entry = {"PodUID": POD.uid, "ContainerName": "worker", "ResourceName": "rdma/vf", "DeviceIDs": {"0": [slot(0)]}}
    (rig.folder / FILE).parent.mkdir()
    (rig.folder / FILE).write_text(json.dumps({"Data": {"PodDeviceEntries": [entry]}}))
    assert rig.bound.is_noted(first)
    assert not rig.bound.is_noted(second)
    assert not rig.bound.is_noted(replace(first, pod=OTHER))
    with descriptors.none_left():
        assert rig.bound.is_noted(second)  # for all that can be told
    # The reconciler goes by it where no runtime can be asked, and kubelet lists static pods alone.
    scene = Scene(rig.ledger, rig.bound)
    scene.sandboxes = Unavailable("nobody listens")
    scene.pods = frozenset({("kube-system", "kube-proxy-gpu-7")})
    scene.now += 3600
    scene.run_once()
    assert rig.ledger.bindings() == (first,)


def test_a_binding_that_a_call_makes_its_own_while_it_is_judged_keeps_its_spec(rig: Rig) -> None:
    rig.grant(POD, slot(0), slot(1))
    rig.bind(call("c1", ifname="net1", device=slot(0)))

    def judge(binding: Binding) -> bool:
        if binding.unit_id == slot(1):
            rig.bind(call("c1", ifname="net2", device=slot(1)))
        return binding.unit_id == slot(1)

    assert rig.bound.release(judge) == ()
    assert rig.ledger.binding_of(slot(1)) is not None
    assert rig.spec(slot(1)) is not None
