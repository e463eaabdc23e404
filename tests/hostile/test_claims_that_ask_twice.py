"""Claims whose allocation gives them more than there is, or whose requests have names that Kubernetes would not take.

Only somebody who may write the status of claims makes them, a scheduler with a fault, say. They are refused at once, in
words, and nothing of them is left.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agent.config import Config
from agent.config.sections import Dra
from agent.errors import ClaimInvalid
from tests.deviceplugin.dra.claim_documents import DRIVER, REF, claim, result
from tests.deviceplugin.dra.preparing import FIRST, HCA, LATE, VF, Desk, Desks, desk, desks, prepared

__all__ = ["desk", "desks"]

EIGHT = replace(HCA, shares=8)
SHARES = f"{DRIVER}/shares"


def shares(request: str, count: int, share_id: str, device: str = "hca-0") -> Any:
    return result(request, device, shareID=share_id, consumedCapacity={SHARES: str(count)})


def refused(desk: Desk, *results: Any) -> str:
    """Have a claim prepared, and return why it is not. Nothing of it is left."""
    with pytest.raises(ClaimInvalid) as caught:
        desk.preparer.prepare(desk.claimed(REF, claim(*results)))
    assert desk.ledger.claims() == ()
    assert not list(desk.folder.glob("*"))
    return str(caught.value)


def test_one_device_under_two_requests_is_refused(desk: Desk) -> None:
    """Not waited for: the claim itself has the device."""
    said = refused(desk, result("left", "vf-0"), result("right", "vf-0"))
    assert said.startswith(f"claim {REF}: requests left and right both have vf-0 ({FIRST}), which only one may have")


def test_one_device_under_two_sub_requests_of_a_request_is_refused(desk: Desk) -> None:
    assert "request nic has vf-0 twice" in refused(desk, result("nic/fast", "vf-0"), result("nic/slow", "vf-0"))
    assert "request hca has hca-0 twice" in refused(desk, result("hca/a", "hca-0"), result("hca/b", "hca-0"))


def test_a_device_is_looked_at_beside_the_request_that_has_it(desk: Desk) -> None:
    assert len(prepared(desk, result("nic", "vf-0"), result("look", "vf-0", adminAccess=True))) == 2


def test_nine_of_eight_shares_are_refused_however_they_are_asked_for(desks: Desks) -> None:
    desk = desks(EIGHT)
    assert "9 shares of hca-0 were allocated to a," in refused(desk, shares("a", 9, "s-1"))
    said = refused(desk, shares("a", 4, "s-1"), shares("b", 4, "s-2"), shares("c", 1, "s-3"))
    assert "9 shares of hca-0 were allocated to a and b and c," in said
    assert "has 8" in said
    ones = [shares("a", 1, f"s-{number}") for number in range(9)]
    assert "9 shares of hca-0 were allocated to a," in refused(desk, *ones)
    assert len(prepared(desk, *ones[:8])) == 8


def test_more_shares_than_one_adapter_has_are_refused_where_the_adapter_is_chosen_late(desks: Desks) -> None:
    desk = desks(replace(EIGHT, binding="late"))
    assert "9 shares of slots-0 were allocated to a," in refused(desk, shares("a", 9, "s-1", "slots-0"))
    assert prepared(desk, shares("a", 8, "s-1", "slots-0"))


def test_several_requests_for_one_place_get_a_device_each(desks: Desks) -> None:
    desk = desks(LATE)
    prepared(desk, result("a", "slots-0", shareID="s-1"), result("b", "slots-0", shareID="s-2"))
    assert len({hold.device for claim in desk.ledger.claims() for hold in claim.devices}) == 2


@pytest.mark.parametrize("has_files", [True, False])
@pytest.mark.parametrize(
    "name", ["n" * 200, "n" * 64, "..", ".", "a/b/c", "/a", "a/", "a/..", "Nic", "a b", "a\nb", "-a"]
)
def test_a_request_has_a_name_as_kubernetes_makes_them(desks: Desks, name: str, has_files: bool) -> None:
    """It becomes part of a file's name, and of a path in containers."""
    desk = desks(VF, config=Config(resources=(VF,), dra=Dra(metadata=has_files)))
    said = refused(desk, result(name, "vf-0"))
    assert "must be the name of a request, or of a request and a sub-request" in said
    assert len(said) < 400


def test_the_longest_names_that_kubernetes_takes_are_prepared(desks: Desks) -> None:
    desk = desks(VF, config=Config(resources=(VF,), dra=Dra(metadata=True)))
    ref = replace(REF, uid="u" * 64, namespace="n" * 63, name="c" * 253)
    name = "r" * 63
    (answer,) = desk.preparer.prepare(desk.claimed(ref, claim(result(f"{name}/{'s' * 63}", "vf-0"), ref=ref)))
    assert answer.request == name
    assert (desk.folder / f"nodefabric-claim-{ref.uid}.{name}.metadata").exists()
    desk.preparer.unprepare(ref)
    assert not list(desk.folder.glob("*"))
