"""Which pods may have something by a DRA claim that comes into their network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agent.config import Config
from agent.errors import LedgerError
from agent.ledger import Ledger
from agent.model.allocation import Claim, ClaimDevice, ClaimRef, ClaimState, PodRef
from agent.state import Latest
from tests.cni.holding import HCA, RESOURCES, SHARES, TRAINER, VF, WEB, named, open_holders
from tests.cni.holding import books as books  # the fixture
from tests.cni.holding import path as path  # the fixture


def of_claim(kind: str = "vf", resource_name: str = "rdma/vf", device: str = VF, **more: object) -> ClaimDevice:
    made = ClaimDevice("r", "node", "d", resource_name, kind, device, "name", exclusive=kind != "hca")
    return replace(made, **more)  # type: ignore[arg-type]


def claim(*devices: ClaimDevice, only_pod: str = "uid-t", pods: tuple[PodRef, ...] = (TRAINER,)) -> Claim:
    ref = ClaimRef("uid-claim", "default", "nics")
    return Claim(ref, ClaimState.PREPARING, devices or (of_claim(),), pods, only_pod)


def test_the_pod_of_a_claim_is_in_the_file_before_kubelet_hears_of_it_and_until_the_claim_is_gone(
    path: Path, books: Ledger
) -> None:
    open_holders(path, books)
    books.prepare_claim(claim())
    assert named(path) == ["default/trainer", "uid-t"]
    books.set_claim_state("uid-claim", ClaimState.PREPARED)
    books.set_claim_state("uid-claim", ClaimState.UNPREPARING)
    assert named(path) == ["default/trainer", "uid-t"]
    books.remove_claim("uid-claim")
    assert named(path) == []


def test_any_pod_of_its_namespace_may_have_a_claim_that_has_no_owner(path: Path, books: Ledger) -> None:
    kept = open_holders(path, books)
    books.prepare_claim(claim(only_pod="", pods=(TRAINER, WEB)))
    assert named(path) == ["default/", "default/trainer", "shop/web"]
    assert not kept.has_unknown  # kubelet need not be asked again and again whose a grant is
    books.remove_claim("uid-claim")
    assert named(path) == []


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (of_claim(), True),
        (of_claim("nic", "rdma/nic"), True),
        (of_claim(admin=True), False),
        (of_claim("hca", "rdma/hca", HCA), False),
        (of_claim("hca", "rdma/hca", HCA, network={"mode": "macvlan"}), True),
        (of_claim("hca", "rdma/gone", HCA), True),
        (of_claim(resource_name="rdma/gone"), True),
    ],
)
def test_only_claims_of_what_may_join_a_network_count(
    path: Path, books: Ledger, device: ClaimDevice, expected: bool
) -> None:
    open_holders(path, books)
    books.prepare_claim(claim(device))
    assert bool(named(path)) is expected


def test_claims_of_earlier_agents_and_a_new_configuration_count(path: Path, books: Ledger) -> None:
    books.prepare_claim(claim(of_claim("hca", "rdma/hca", HCA)))
    config = Latest(Config(resources=RESOURCES, kubelet_dir=path.parent.parent))
    open_holders(path, books, config=config)
    assert named(path) == []
    config.set(replace(config.value, resources=(replace(SHARES, network="n"),)))
    assert named(path) == ["default/trainer", "uid-t"]


def test_a_claim_is_not_prepared_while_the_file_goes_on_to_say_otherwise(path: Path, books: Ledger) -> None:
    kept = open_holders(path, books)
    with kept.preparing(claim()):
        assert named(path) == ["?"]
    assert named(path) == []
    kept.close()
    with pytest.raises(LedgerError, match="is written no more"):
        books.prepare_claim(claim())
    assert books.claims() == ()
