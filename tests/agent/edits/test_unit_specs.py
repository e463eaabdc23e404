"""The CDI specs of granted units, on made-up nodes whose numbers change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.config.resources import RailNic
from agent.edits.build import unit_specs
from agent.errors import LedgerError
from agent.kubelet.checkpoint import Entry
from agent.model.allocation import Spec
from agent.offer.units import plain_offer
from tests import node as books
from tests.agent.edits.unit_specs_rig import (
    HCA,
    OTHER,
    RAIL,
    SHARE,
    VF,
    VF_UNIT,
    Rig,
    opened,
    permuted,
    with_vf_rdma,
)
from tests.node import UNDO, gpu_uuid, granted, node, without


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with opened(tmp_path) as made:
        yield made


def specs_on(rig: Rig, device: str) -> dict[str, Spec]:
    return {hold.key: hold.spec for hold in rig.ledger.holds_on(device) if hold.spec is not None}


def test_names_mean_the_same_devices_after_all_numbers_have_changed(rig: Rig) -> None:
    snapshot = with_vf_rdma(node(), VF_UNIT, "0000:12:00.2")
    rig.grant(snapshot, HCA, SHARE, OTHER)
    rig.grant(snapshot, VF, VF_UNIT)
    later = permuted(snapshot)
    assert set(rig.renew(later)) == {SHARE, OTHER, VF_UNIT}
    for unit_id, address in ((SHARE, "0000:22:00.0"), (OTHER, "0000:32:00.0"), (VF_UNIT, VF_UNIT)):
        (verbs,) = later.by_address[address].rdma_devices[0].char_device("uverbs")
        assert rig.files(unit_id) == [verbs.path, "/dev/infiniband/rdma_cm"]
    names = [later.by_address[a].rdma_devices[0].name for a in ("0000:22:00.0", "0000:32:00.0")]
    assert rig.said(SHARE)["env"] == rig.said(OTHER)["env"] == [f"NCCL_IB_HCA=={','.join(names)}"]
    assert rig.renew(later) == ()


def test_an_address_is_told_by_the_spec_only_where_it_is_another_than_the_answers(rig: Rig) -> None:
    rig.grant(with_vf_rdma(node(), VF_UNIT), VF, VF_UNIT)
    assert rig.said(VF_UNIT)["env"] == ["UCX_NET_DEVICES=mlx5_50:1"]


def test_a_vf_without_files_needs_no_name(rig: Rig) -> None:
    assert rig.grant(node(), VF, VF_UNIT) == ()
    assert specs_on(rig, VF_UNIT) == {}
    assert rig.there() == set()


def test_a_unit_whose_device_is_gone_has_no_spec_until_it_is_back(rig: Rig) -> None:
    rig.grant(node(), HCA, SHARE)
    gone = without(node(), "0000:22:00.0")
    assert rig.renew(gone) == (SHARE,)
    assert rig.there() == set()
    assert not rig.specs.rewrite()
    assert rig.renew(replace(permuted(node()), generation=gone.generation + 1)) == (SHARE,)
    assert rig.files(SHARE)[0] == "/dev/infiniband/uverbs2"


def test_a_unit_that_is_offered_no_more_follows_its_device_to_another_address(rig: Rig) -> None:
    snapshot = with_vf_rdma(node(), VF_UNIT, "0000:12:00.2")
    rig.grant(snapshot, VF, VF_UNIT)
    gone = without(snapshot, VF_UNIT)
    rig.renew(gone)
    assert rig.there() == set()
    rig.ledger.move({VF_UNIT: ("0000:12:00.2",)})  # as the reconciler finds out
    assert rig.renew(gone) == (VF_UNIT,)
    assert rig.files(VF_UNIT)[0] == "/dev/infiniband/uverbs51"
    assert "PCIDEVICE_RDMA_VF=0000:12:00.2" in rig.said(VF_UNIT)["env"]


def test_an_offer_that_is_older_than_the_last_changes_nothing(rig: Rig) -> None:
    rig.grant(node(), HCA, SHARE)
    later = permuted(node())
    rig.renew(later)
    assert rig.renew(node()) == ()
    assert rig.files(SHARE)[0] == "/dev/infiniband/uverbs2"


def test_the_spec_goes_with_the_unit_but_not_before_the_books_agree_with_kubelet(tmp_path: Path) -> None:
    with opened(tmp_path, settled=False) as rig:
        rig.grant(node(), HCA, SHARE)
        rig.grant(node(), HCA, OTHER)
        rig.ledger.release([SHARE])
        assert rig.units.tidy() == ()
        rig.settled.set(True)
        assert rig.units.tidy() == [f"unit-{SHARE}"]
        assert rig.there() == {OTHER}
    with opened(tmp_path) as rig:  # a new process sees what an earlier one left
        rig.ledger.release([OTHER])
        assert rig.units.tidy() == [f"unit-{OTHER}"]
        assert rig.there() == set()


def add(rig: Rig, unit: str, edits: dict[str, Any]) -> None:
    """Tell what ADD found out."""
    found = rig.ledger.hold(unit)
    assert found is not None
    assert found.spec is not None
    said = found.spec.with_added(edits)
    rig.specs.change(lambda: {unit: said})


def test_what_is_told_at_add_stands_beside_the_device_until_that_has_other_files(rig: Rig) -> None:
    rig.grant(node(), HCA, SHARE)
    mount = {"hostPath": "/run/x", "containerPath": "/run/y", "options": ["ro", "bind"]}
    add(rig, SHARE, {"env": ["NCCL_IB_HCA==mlx5_9", "NCCL_IB_GID_INDEX=3"], "mounts": [mount]})
    said = rig.said(SHARE)
    assert said["env"] == ["NCCL_IB_HCA==mlx5_9", "NCCL_IB_GID_INDEX=3"]
    assert said["mounts"] == [mount]
    assert len(said["deviceNodes"]) == 2
    assert rig.renew(replace(node(), generation=2)) == ()
    assert rig.said(SHARE) == said
    rig.renew(permuted(replace(node(), generation=2)))
    assert rig.said(SHARE)["env"] == ["NCCL_IB_HCA==mlx5_2"]
    assert "mounts" not in rig.said(SHARE)


def test_files_that_a_device_got_on_its_way_into_a_pod_are_not_taken_from_a_scan(rig: Rig) -> None:
    snapshot = with_vf_rdma(node(), VF_UNIT)
    rig.grant(snapshot, VF, VF_UNIT)
    books.attach(rig.ledger, VF_UNIT, undo=replace(UNDO, rdma="mlx5_50"))
    spec = specs_on(rig, VF_UNIT)[VF_UNIT]
    nodes = [{**each, "path": each["path"].replace("uverbs50", "uverbs77")} for each in spec.edits["deviceNodes"]]
    rig.specs.change(lambda: {VF_UNIT: replace(spec, edits={**spec.edits, "deviceNodes": nodes})})
    assert rig.renew(replace(snapshot, generation=9)) == ()
    assert rig.files(VF_UNIT)[0] == "/dev/infiniband/uverbs77"


def test_specs_of_a_resource_that_has_left_the_configuration_stay_while_they_are_right(rig: Rig) -> None:
    rig.grant(node(), HCA, SHARE)
    rig.resources = (VF,)
    assert rig.renew(node()) == ()
    assert rig.there() == {SHARE}
    assert rig.renew(permuted(node())) == (SHARE,)
    assert rig.there() == set()


def test_units_that_come_back_into_lost_books_have_their_specs_again(rig: Rig) -> None:
    offer = plain_offer(rig.resources, permuted(node()))
    rig.ledger.grant(granted(HCA.name, {SHARE: "0000:22:00.0", OTHER: "0000:32:00.0"}))  # as kubelet has told of them
    entry = Entry("uid", "main", HCA.name, (OTHER, SHARE))
    rig.units.adopt([entry], offer, rig.resources)
    assert rig.files(SHARE)[0] == "/dev/infiniband/uverbs2"
    assert rig.said(SHARE)["env"] == rig.said(OTHER)["env"] == ["NCCL_IB_HCA==mlx5_2,mlx5_3"]


def test_a_slot_gets_no_second_file_of_its_name(rig: Rig) -> None:
    slot = "slot-rdma:vf-0-0"
    rig.ledger.grant(granted(VF.name, {slot: VF_UNIT}))  # as it is when its pod's device is chosen
    offer = plain_offer(rig.resources, with_vf_rdma(node(), VF_UNIT))
    rig.units.adopt([Entry("uid", "main", VF.name, (slot,))], offer, rig.resources)
    assert rig.there() == set()
    assert specs_on(rig, slot) == {}


def test_what_the_books_refused_is_said_as_soon_as_they_take_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.grant(node(), HCA, SHARE)
    later = permuted(node())

    def refuse(specs: object) -> None:
        raise LedgerError("no space left")

    with monkeypatch.context() as full:
        full.setattr(rig.ledger, "set_specs", refuse)
        with pytest.raises(LedgerError):
            rig.renew(later)
    assert rig.renew(later) == (SHARE,)
    assert rig.files(SHARE)[0] == "/dev/infiniband/uverbs2"


SEVERAL = replace(RAIL, nic=RailNic("hca", shares=2, count=2), environment=("nccl",))


def of_several(rig: Rig) -> tuple[str, tuple[str, ...]]:
    """Grant the rail of the first GPU, and return it with its NICs."""
    rig.resources = (SEVERAL,)
    unit = f"rail-{gpu_uuid(0)}"
    offer = plain_offer(rig.resources, node())
    found = offer.find(SEVERAL.name, unit)
    assert found is not None
    rig.specs.grant(granted(SEVERAL.name, {unit: found.devices}, unit_specs(SEVERAL, [found], offer.snapshot)))
    return unit, found.devices


def uverbs(rig: Rig, unit: str) -> list[str]:
    return [path for path in rig.files(unit) if "uverbs" in path]


def test_the_spec_of_a_rail_has_the_files_of_all_its_nics_and_follows_each(rig: Rig) -> None:
    unit, nics = of_several(rig)
    assert nics == ("0000:12:00.0", "0000:22:00.0")
    assert uverbs(rig, unit) == ["/dev/infiniband/uverbs0", "/dev/infiniband/uverbs1"]
    assert "NCCL_IB_HCA==mlx5_0,mlx5_1" in rig.said(unit)["env"]
    rig.renew(permuted(node()))
    assert uverbs(rig, unit) == ["/dev/infiniband/uverbs1", "/dev/infiniband/uverbs2"]
    assert not rig.specs.rewrite()


def test_a_rail_keeps_all_the_nics_that_it_was_granted_with(rig: Rig) -> None:
    unit, _ = of_several(rig)
    rig.ledger.move({unit: ("0000:22:00.0", "0000:42:00.0")})
    rig.renew(replace(node(), generation=9))
    assert uverbs(rig, unit) == ["/dev/infiniband/uverbs1", "/dev/infiniband/uverbs3"]


@pytest.mark.parametrize("position", range(2))
def test_a_rail_that_misses_one_of_its_nics_has_no_spec_until_it_is_back(rig: Rig, position: int) -> None:
    unit, nics = of_several(rig)
    rig.renew(without(node(), nics[position]))
    assert rig.there() == set()
    rig.renew(replace(node(), generation=9))
    assert len(uverbs(rig, unit)) == 2


def test_a_nic_that_has_got_files_on_its_way_into_the_pod_keeps_these_beside_the_others(rig: Rig) -> None:
    unit, nics = of_several(rig)
    books.attach(rig.ledger, nics[0], undo=replace(UNDO, rdma="mlx5_50"))
    rig.renew(permuted(node()))
    assert uverbs(rig, unit) == ["/dev/infiniband/uverbs0", "/dev/infiniband/uverbs2"]
