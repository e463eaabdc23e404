"""Failed calls for claims reach whoever is to be told, and kubelet all the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from agent.errors import AgentError, DeviceBusy, Unavailable
from agent.model.allocation import ClaimRef
from deviceplugin.dra.server import PreparedDevice
from deviceplugin.dra.told import ToldClaims

REF = ClaimRef("uid-c", "default", "c")


class Failing:
    """Claims that cannot be carried out, and who hears of it."""

    def __init__(self, error: AgentError | None) -> None:
        self.error = error
        self.heard: list[tuple[ClaimRef, str, AgentError]] = []

    def prepare(self, ref: ClaimRef) -> Sequence[PreparedDevice]:
        if self.error is not None:
            raise self.error
        return (PreparedDevice((), "node", "vf"),)

    def unprepare(self, ref: ClaimRef) -> None:
        if self.error is not None:
            raise self.error

    def claim_failed(self, ref: ClaimRef, what: str, error: AgentError) -> None:
        self.heard.append((ref, what, error))


def test_a_claim_that_is_not_prepared_is_told_and_fails() -> None:
    failing = Failing(Unavailable("the API server is away"))
    with pytest.raises(Unavailable):
        ToldClaims(failing, failing).prepare(REF)
    assert failing.heard == [(REF, "not prepared", failing.error)]


def test_a_claim_that_is_not_unprepared_is_told_and_fails() -> None:
    failing = Failing(DeviceBusy("the pod lives"))
    with pytest.raises(DeviceBusy):
        ToldClaims(failing, failing).unprepare(REF)
    assert failing.heard == [(REF, "not unprepared", failing.error)]


def test_nobody_is_told_of_claims_that_succeed() -> None:
    fine = Failing(None)
    told = ToldClaims(fine, fine)
    assert [device.device_name for device in told.prepare(REF)] == ["vf"]
    told.unprepare(REF)
    assert fine.heard == []
