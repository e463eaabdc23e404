"""What is read of the books for the lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.model.allocation import Claim, ClaimDevice, ClaimRef, ClaimState, Undo
from agent.offer.offers import read
from tests.agent.books import open_books, owner


@pytest.mark.parametrize(("mode", "expected"), [("nic", {"0000:3b:00.0"}), ("vf", set())])
def test_adapters_that_are_in_pods_are_told_from_vfs(tmp_path: Path, mode: str, expected: set[str]) -> None:
    device, undo = "0000:3b:00.0", Undo("ens1f0", "02:00:00:00:01:00", 1500, False, mode=mode)
    with open_books(tmp_path) as books:
        books.begin_attach(
            owner(),
            ifname="net1",
            device=device,
            resource_name="",
            undo=undo,
            netns_path="/nowhere",
            request={"name": "net", "network": None},
        )
        assert read(books, with_names=False, with_slots=False).whole_adapters == expected


def test_devices_of_claims_are_in_use_and_those_that_are_only_looked_at_are_not(tmp_path: Path) -> None:
    found = [
        ClaimDevice("vf", "node", "vf-0", "rdma/vf", "vf", "0000:3b:00.1", "u-0"),
        ClaimDevice(
            "hca", "node", "hca-0", "rdma/hca", "hca", "0000:3b:00.0", "u-1", share_id="s", exclusive=False, shares=2
        ),
        ClaimDevice("look", "node", "vf-1", "rdma/vf", "vf", "0000:3b:00.2", "u-2", exclusive=False, admin=True),
    ]
    shares = {"hca-0c42a10300651234-0": "0000:3b:00.0", "hca-0c42a10300651235-0": "0000:5e:00.0"}
    with open_books(tmp_path) as books:
        books.prepare_claim(Claim(ClaimRef("u", "ns", "c"), ClaimState.PREPARING, tuple(found)))
        books.grant("rdma/hca", shares)
        assert read(books, with_names=False, with_slots=False).shares_granted == {"hca-0c42a10300651234-0"}
        books.release(shares)
        reading = read(books, with_names=False, with_slots=False)
    assert reading.holders == {"0000:3b:00.1": "rdma/vf", "0000:3b:00.0": "rdma/hca"}
    assert reading.forms == {"0000:3b:00.1": ("rdma/vf", "claim")}
    assert reading.granted == {}
    assert (reading.shares_claimed, reading.shares_granted) == ({"0000:3b:00.0": 2}, frozenset())
