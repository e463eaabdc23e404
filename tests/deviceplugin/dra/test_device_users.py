"""Whether a device that others have is about to be free, and whom that question costs time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent.errors import Unavailable
from agent.model.allocation import ClaimRef, ClaimState, PodRef
from deviceplugin.dra.preparer import DeviceUsers
from tests.deviceplugin.dra.claim_documents import REF, claim, result
from tests.deviceplugin.dra.preparing import VF, Desk, KubeletStandIn

WANTED = REF.uid


class Counting:
    """The API server, asked about claims one after the other."""

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.is_away = False

    def get(self, ref: ClaimRef) -> Any:
        self.asked.append(ref.uid)
        if self.is_away:
            raise Unavailable("no answer within 15 s")
        return self.answers[ref.uid]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """A node whose first eight VFs are in the hands of claims of pods that live."""
    made = Desk(tmp_path, VF)
    with closing(made.ledger):
        for n in range(8):
            ref = ClaimRef(f"claim-{n}", "team", f"c-{n}")
            pod = PodRef("team", f"p-{n}", f"uid-{n}")
            made.preparer.prepare(made.claimed(ref, claim(result("nic", f"vf-{n}"), ref=ref, pods=[pod])))
        yield made


def asking(desk: Desk) -> tuple[Counting, DeviceUsers]:
    reader = Counting(desk.others.claims)
    return reader, DeviceUsers(desk.ledger, reader, KubeletStandIn(desk.others), desk.others)


def test_nobody_is_asked_about_the_others_when_one_device_is_on_its_way_back(desk: Desk) -> None:
    reader, users = asking(desk)
    desk.ledger.set_claim_state("claim-7", ClaimState.UNPREPARING)

    assert users.passes(WANTED, desk.ledger.claimed_devices())
    assert reader.asked == []


def test_an_api_server_that_does_not_answer_is_asked_once_for_all_of_them(desk: Desk) -> None:
    reader, users = asking(desk)
    reader.is_away = True

    assert not users.passes(WANTED, desk.ledger.claimed_devices())
    assert len(reader.asked) == 1


def test_devices_of_pods_that_live_stay_where_they_are(desk: Desk) -> None:
    reader, users = asking(desk)

    assert not users.passes(WANTED, desk.ledger.claimed_devices())
    assert sorted(reader.asked) == [f"claim-{n}" for n in range(8)]
    reader.answers = {**desk.others.claims, "claim-5": None}
    assert users.passes(WANTED, desk.ledger.claimed_devices())


def test_the_books_know_of_a_claim_that_nobody_may_use_any_more_should_kubelet_have_forgotten_it(desk: Desk) -> None:
    reader, users = asking(desk)
    reader.answers = {**desk.others.claims, "claim-5": None}
    for _ in range(2):
        assert users.passes(WANTED, ["0000:22:00.2"])

    states = {claim.ref.uid: claim.state for claim in desk.ledger.claims()}
    assert [uid for uid, state in states.items() if state is ClaimState.UNPREPARING] == ["claim-5"]
    assert reader.asked == ["claim-5"]
