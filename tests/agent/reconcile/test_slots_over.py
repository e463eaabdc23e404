"""When what a slot was bound for is over: only once nobody can still be using it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.kubelet.checkpoint import Entry
from agent.kubelet.cri import Sandbox
from agent.ledger import Ledger
from agent.model.allocation import Hold
from agent.reconcile.grants import SANDBOX_SECONDS, is_over
from agent.reconcile.view import View
from tests.node import POD, VF, attach, bound_slot, owner

BOUND = bound_slot("slot-rdma:vf-0-0", "rdma/vf", "vf", VF, "worker", "c1", "net1", POD, {}, "boot", since=10.0)
REBUILT = replace(BOUND, container_id="")
LATER = BOUND.bound_at + SANDBOX_SECONDS + 1
ANOTHERS = "uid of another"
NOWHERE = "it has another slot"
MINE, OTHERS, NOBODY = {(POD.namespace, POD.name)}, {("kube-system", "kube-proxy-gpu-7")}, set[tuple[str, str]]()


@pytest.mark.parametrize(
    ("slot", "pods", "sandboxes", "asked_at", "noted", "expected"),
    [
        # It ends with its pod, as kubelet says.
        (BOUND, OTHERS, None, LATER, ANOTHERS, True),
        (BOUND, MINE, None, LATER, ANOTHERS, False),
        # One that knows no pods, or none but static ones while its checkpoint says otherwise, is not believed.
        (BOUND, NOBODY, None, LATER, ANOTHERS, False),
        (BOUND, OTHERS, None, LATER, POD.uid, False),
        (BOUND, OTHERS, None, LATER, None, False),  # that cannot be read
        # The runtime knows better which sandboxes live.
        (BOUND, OTHERS, {"c2"}, LATER, POD.uid, True),
        (BOUND, MINE, {"c2"}, LATER, ANOTHERS, True),
        (BOUND, NOBODY, {"c1"}, LATER, ANOTHERS, False),
        # containerd lists a sandbox when all of it stands: after its ADD, and whatever comes after that.
        (BOUND, MINE, {"c2"}, BOUND.bound_at + 1, ANOTHERS, False),
        # Nobody answers; or it was bound since they were asked.
        (BOUND, None, None, LATER, ANOTHERS, False),
        (BOUND, OTHERS, None, BOUND.bound_at, ANOTHERS, False),
        # Its sandbox is not known, so it ends with its pod.
        (REBUILT, MINE, {"c2"}, LATER, ANOTHERS, False),
        (REBUILT, OTHERS, {"c2"}, LATER, ANOTHERS, True),
        (replace(REBUILT, pod=None), OTHERS, None, LATER, NOWHERE, False),  # nor its pod
    ],
)
def test_it_is_over_once_nobody_can_use_it(
    slot: Hold,
    pods: set[tuple[str, str]] | None,
    sandboxes: set[str] | None,
    asked_at: float,
    noted: str | None,
    expected: bool,
) -> None:
    running = None if sandboxes is None else [Sandbox(sandbox, POD, ready=True) for sandbox in sandboxes]
    unit = slot.key if noted != NOWHERE else "slot-rdma:vf-0-1"
    entries = None if noted is None else [Entry(noted, "worker", "rdma/vf", (unit,))]
    assert is_over(slot, View(asked_at, None, pods, running), (), entries) is expected


def test_it_lives_as_long_as_its_attachment(books: Ledger) -> None:
    row = attach(books, VF, owner("c1"))
    assert not is_over(BOUND, View(LATER, None, set(), ()), (row,))
    other = attach(books, "0000:3b:00.3", owner("c1"))
    assert is_over(BOUND, View(LATER, None, set(), ()), (other,))
