"""What the status document says of claims and their driver."""

from __future__ import annotations

from dataclasses import replace

from agent.ledger.database import Books
from agent.model.allocation import (
    AttachmentState,
    ClaimState,
)
from agent.model.device import Snapshot
from agent.report import status
from agent.report.facts import DriverState, Facts
from tests.agent.books import VF
from tests.agent.ledger.test_claims import claim, of_share, of_vf
from tests.agent.report.status_facts import DRIVER, OTHER, ROW, document, offered


def test_a_claim_is_told_with_its_devices_its_pods_and_how_far_it_is() -> None:
    prepared = replace(claim("c", of_vf(), of_share()), state=ClaimState.PREPARED, since=40.0)
    facts = Facts(Snapshot(), claims=(prepared,), attachments=(replace(ROW, claim_uid="uid-c"),), driver=DRIVER)
    made = document(facts)
    (told,) = made["claims"]
    assert (told["namespace"], told["name"], told["uid"]) == ("default", "c", "uid-c")
    assert (told["state"], told["since"], told["pods"]) == ("prepared", 40.0, ["default/trainer"])
    vf, share = told["devices"]
    assert (vf["device"], vf["name"], vf["state"]) == (VF, "vf-0000-3b-00-2", "attached")
    assert (share["share"], share["resource"], share["state"]) == ("s1", "rdma/hca", "prepared")
    lines = status.text(made, 100.0).splitlines()
    assert "CLAIM      REQUEST  DEVICE        RESOURCE  PODS             STATE     FOR" in lines
    assert f"default/c  nic      {VF}  rdma/vf   default/trainer  attached  1m" in lines


def test_a_claim_on_its_way_back_says_so_though_its_device_is_still_in_the_pod() -> None:
    leaving = replace(claim(), state=ClaimState.UNPREPARING)
    row = replace(ROW, claim_uid="uid-c", state=AttachmentState.DETACHING)
    (told,) = document(Facts(Snapshot(), claims=(leaving,), attachments=(row,)))["claims"]
    assert told["devices"][0]["state"] == "unpreparing"


def test_a_device_that_a_claim_has_counts_as_granted() -> None:
    made = document(Facts(Snapshot(), {"rdma/vf": (offered(VF), offered(OTHER))}, claims=(claim(),)))
    assert made["resources"][0]["granted"] == 1
    assert [(found["device"], found["granted"]) for found in made["offers"]] == [(VF, 1), (OTHER, 0)]


def test_a_driver_is_told_in_one_line_with_what_it_lacks() -> None:
    line = status.text(document(Facts(Snapshot(), driver=DRIVER)), 0.0).splitlines()[1]
    told = "registered with kubelet; 2 slices published; 8 devices, 7 healthy; the cluster leaves out taints"
    assert line == f"DRA driver nodefabric.io: {told}"
    line = status.text(document(Facts(Snapshot(), driver=DriverState("d.io", "not found", None))), 0.0).splitlines()[1]
    told = "NOT REGISTERED with kubelet: not found; slices not known yet; 0 devices, 0 healthy"
    assert line == f"DRA driver d.io: {told}"


def test_a_node_without_claims_is_told_nothing_of_them() -> None:
    made = document()
    assert made.keys().isdisjoint({"dra", "claims"})
    assert "CLAIM" not in status.text(made, 1.0)
    assert "DRA" not in status.text(made, 1.0)


def test_claims_are_told_of_the_books_without_an_agent() -> None:
    made = status.without_agent(Books(claims=(claim(),)), node="n", version="1", problem="does not run")
    assert [told["name"] for told in made["claims"]] == ["c"]
    assert "default/c" in status.text(made, 1.0)
