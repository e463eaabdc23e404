"""What kubelet has unprepared: devices come back, and a living sandbox keeps its own."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from agent.errors import DeviceBusy
from agent.kubelet.cri import Sandbox
from agent.model.allocation import ClaimState
from tests.deviceplugin.dra.claim_documents import POD, REF, result
from tests.deviceplugin.dra.preparing import FIRST, OTHER, PATIENT, VF, Desk, Desks, files, prepared, spec


def test_an_unprepared_claim_leaves_nothing_and_needs_no_api_server(desk: Desk) -> None:
    prepared(desk)
    desk.others.is_away = True
    desk.preparer.unprepare(REF)

    assert (desk.ledger.claims(), files(desk)) == ((), [])


def test_a_claim_that_nobody_knows_is_unprepared_and_a_stray_spec_goes(desk: Desk) -> None:
    prepared(desk)
    desk.ledger.remove_claim(REF.uid)
    desk.preparer.unprepare(REF)
    desk.preparer.unprepare(OTHER)

    assert files(desk) == []


@pytest.mark.parametrize(
    ("of", "row_of"),
    [(result("nic", "vf-0"), FIRST), (result("rdma", "hca-0", shareID="s"), "0000:12:00.0/sandbox-1/net1")],
)
def test_a_device_or_share_in_a_living_sandbox_keeps_its_claim(desk: Desk, of: Any, row_of: str) -> None:
    prepared(desk, of)
    row = desk.attach(row_of, POD, REF.uid)
    for _ in range(2):
        with pytest.raises(DeviceBusy, match="in sandbox sandbox-1 of pod team/trainer, which lives"):
            desk.preparer.unprepare(REF)

    assert desk.ledger.claims()[0].state is ClaimState.UNPREPARING
    assert spec(desk)
    desk.detached(row)
    desk.preparer.unprepare(REF)
    assert (desk.ledger.claims(), files(desk)) == ((), [])


def test_a_device_that_no_add_brought_in_stays_with_a_sandbox_that_lives(desk: Desk) -> None:
    prepared(desk)
    desk.others.sandboxes = (Sandbox("s-1", POD, ready=True),)
    with pytest.raises(DeviceBusy, match="sandbox s-1 of pod team/trainer, which has the claim, lives"):
        desk.preparer.unprepare(REF)
    assert spec(desk)
    desk.others.sandboxes = (Sandbox("s-1", POD, ready=False), Sandbox("s-2", replace(POD, uid="another"), ready=True))
    desk.preparer.unprepare(REF)
    assert (desk.ledger.claims(), files(desk)) == ((), [])


def test_a_device_on_its_way_back_is_home_when_unprepare_answers(desks: Desks) -> None:
    desk = desks(VF, patience=PATIENT)
    prepared(desk)
    row = desk.attach(FIRST, POD, REF.uid)
    desk.ledger.begin_detach([row.attachment_id])
    later = threading.Timer(0.2, desk.ledger.finish_detach, [row])
    later.start()
    desk.preparer.unprepare(REF)
    later.join()

    assert (desk.ledger.attachments(), desk.ledger.claims()) == ((), ())


def test_a_device_that_does_not_come_back_fails_unprepare_until_it_is_withheld(desk: Desk) -> None:
    prepared(desk)
    row = desk.attach(FIRST, POD, REF.uid)
    desk.ledger.begin_detach([row.attachment_id])
    with pytest.raises(DeviceBusy, match="on its way back from pod team/trainer for more than"):
        desk.preparer.unprepare(REF)

    desk.ledger.quarantine(FIRST, "it does not answer")
    desk.preparer.unprepare(REF)
    assert desk.ledger.claims() == ()


def test_a_device_whose_namespace_has_gone_is_healed_by_unprepare(desk: Desk) -> None:
    prepared(desk)
    row = desk.attach(FIRST, POD, REF.uid)
    desk.others.on_heal = lambda device: desk.detached(row)
    desk.preparer.unprepare(REF)

    assert (desk.ledger.attachments(), desk.ledger.claims()) == ((), ())


def test_a_claim_that_is_being_unprepared_can_be_prepared_again(desk: Desk) -> None:
    answer = prepared(desk)
    desk.ledger.set_claim_state(REF.uid, ClaimState.UNPREPARING)

    assert desk.preparer.prepare(REF) == answer
    assert desk.ledger.claims()[0].state is ClaimState.PREPARED
