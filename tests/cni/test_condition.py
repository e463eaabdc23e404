"""What is wrong with a row, over all that can be known of it."""

from __future__ import annotations

import itertools

from agent.model.allocation import AttachmentState
from cni.condition import BROUGHT_BACK, OWNER_GONE, REBOOTED, RowFacts, condition

ATTACHED = AttachmentState.ATTACHED
ALL = [
    RowFacts(*facts)
    for facts in itertools.product(
        *((True, False), AttachmentState, (True, False), (True, False), (True, False), (True, False, None)),
        (True, False),
    )
]


def test_a_row_of_another_boot_is_void_whatever_else() -> None:
    assert {condition(row) for row in ALL if not row.this_boot} == {REBOOTED}


def test_a_row_that_nobody_finishes_is_undone_whatever_else() -> None:
    half = {condition(row) for row in ALL if row.this_boot and row.state is not ATTACHED}
    assert half == {"half-attaching", "half-detaching"}


def test_nothing_is_taken_from_a_pod_that_lives_or_may_live() -> None:
    for row in ALL:
        if not row.this_boot or row.state is not ATTACHED:
            continue
        if row.is_orphan:
            assert condition(row) == BROUGHT_BACK
            continue
        may_live = row.namespace_lives or row.away or (not row.tells and row.pod_known is not False)
        assert (condition(row) is None) == may_live, row
        assert condition(row) in (None, OWNER_GONE)


def test_a_device_that_is_back_in_the_host_is_nobodys_whatever_kubelet_says() -> None:
    assert condition(RowFacts(True, ATTACHED, False, False, True, True)) == OWNER_GONE
