"""DELs as kubelet and runtimes really send them: three times, without a namespace, too late, and too early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agent.errors import DeviceBusy
from agent.model.allocation import PodRef
from cni.call import GrantedDevice, Node
from tests.cni.networks import network
from tests.cni.stand_ins import FixedDevices, attachments_of
from tests.cni.tiny_node import Rig, vf
from tests.live import Live

ASKED: dict[str, Any] = {"mac": "02:00:00:00:00:77", "vlan": 100, "trust": "on"}


def test_three_dels_for_one_add_are_all_success_and_undo_it_once(rig: Rig) -> None:
    """One for the sandbox that is stopped, one for its removal, one by kubelet's garbage collector."""
    pod, before = rig.pod(), rig.found()
    rig.add("c1", pod, ipam=rig.ipam(), **ASKED)
    rig.delete("c1", pod)
    rig.delete("c1", None)
    rig.remove(pod)
    rig.detach("c1", None)
    assert (rig.found(), rig.leases(), rig.ledger.owed_leases()) == (before, [], ())


@pytest.mark.parametrize("which", ["no namespace", "own namespace", "namespace of the new owner"])
def test_a_del_after_the_device_was_given_to_a_new_pod_touches_nothing(rig: Rig, which: str) -> None:
    first, second = rig.pod("one"), rig.pod("two")
    rig.add("c1", first, **ASKED)
    rig.detach("c1", first)
    rig.add("c2", second, ipam=rig.ipam(), **{**ASKED, "vlan": 200})
    settings, leases, link = rig.settings(), rig.leases(), rig.in_pod(second)
    rig.delete("c1", {"no namespace": None, "own namespace": first}.get(which, second))
    assert (rig.settings(), rig.leases(), rig.in_pod(second)) == (settings, leases, link)
    assert [row.owner.container_id for row in rig.ledger.attachments()] == ["c2"]
    rig.check("c2", second)


def test_a_del_that_names_another_namespace_finds_the_vf_where_its_row_says(rig: Rig) -> None:
    first, second, before = rig.pod("one"), rig.pod("two"), rig.found()
    rig.add("c1", first, **ASKED)
    rig.detach("c1", second)
    assert (rig.found(), rig.ledger.quarantines()) == (before, ())


@pytest.mark.parametrize("leases", [True, False])
def test_a_del_while_kubelet_is_asked_makes_the_add_undo_itself(rig: Rig, leases: bool) -> None:
    """The runtime has given the ADD up, and will not come again."""
    pod, before = rig.pod(), rig.found()

    def granted(of: PodRef) -> Sequence[GrantedDevice]:
        with rig.call("c1", pod, {}, "eth0") as call:
            attachments.delete(call)
        return (GrantedDevice(vf(0), "rdma/vf", network({"ipam": rig.ipam()} if leases else {})),)

    attachments = attachments_of(Node(rig.machine, rig.ledger, Live(rig.machine.scan)), FixedDevices(answer=granted))
    try:
        with (
            rig.call("c1", pod, {"prevResult": {"cniVersion": "1.0.0"}}, "eth0") as call,
            pytest.raises(DeviceBusy, match="DEL of c1 eth0 came while its ADD was under way"),
        ):
            attachments.add(call)
        assert (rig.found(), rig.leases(), rig.ledger.attachments()) == (before, [], ())
    finally:
        attachments.close()


def test_an_add_is_not_answered_from_a_row_that_is_on_its_way_out(rig: Rig) -> None:
    """Left by an agent that was killed: the VF is there still, but nobody may be told so."""
    pod = rig.pod()
    rig.add("c1", pod, **ASKED)
    (row,) = rig.ledger.attachments()
    rig.ledger.begin_detach([row.attachment_id])
    with pytest.raises(DeviceBusy, match="is still being undone"):
        rig.add("c1", pod, **ASKED)
    assert rig.attachments.heal(vf(0)) == "half-detaching"
    rig.add("c1", pod, **ASKED)
    rig.check("c1", pod)
