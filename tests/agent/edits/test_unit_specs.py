"""The CDI specs of granted units, on made-up nodes whose numbers change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent.config.resources import RailNic
from agent.edits.build import unit_specs
from agent.edits.unit_specs import owners
from agent.errors import LedgerError, Unavailable
from agent.kubelet.checkpoint import Entry
from agent.model.allocation import UnitSpec
from agent.offer.units import plain_offer
from tests import node as books
from tests.agent.edits.unit_specs_rig import (
    HCA,
    OTHER,
    RAIL,
    SHARE,
    VF,
    VF_UNIT,
    VFIO,
    Rig,
    opened,
    permuted,
    with_vf_rdma,
)
from tests.node import UNDO, change, gpu_uuid, node, without


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with opened(tmp_path) as made:
        yield made


def specs_on(rig: Rig, device: str) -> dict[str, UnitSpec]:
    return {g.unit_id: g.spec for g in rig.ledger.grants_on(device) if g.spec is not None}


def test_variables_name_all_devices_of_the_container_in_each_spec(rig: Rig) -> None:
    assert rig.grant(node(), HCA, SHARE, OTHER) == (f"nodefabric.io/hca={SHARE}", f"nodefabric.io/hca={OTHER}")
    assert rig.said(SHARE)["env"] == rig.said(OTHER)["env"] == ["NCCL_IB_HCA==mlx5_1,mlx5_2"]
    for unit, number in ((SHARE, 1), (OTHER, 2)):
        assert rig.files(unit) == [f"/dev/infiniband/uverbs{number}", "/dev/infiniband/rdma_cm"]


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


def test_a_vfio_group_that_is_another_number_follows(rig: Rig) -> None:
    rig.resources = (VFIO,)
    snapshot = change(node(), VF_UNIT, driver="vfio-pci", iommu_group=7)
    snapshot = change(snapshot, "0000:12:00.2", driver="vfio-pci", iommu_group=8)
    rig.grant(snapshot, VFIO, VF_UNIT)
    assert rig.files(VF_UNIT) == ["/dev/vfio/vfio", "/dev/vfio/7"]
    rig.renew(permuted(snapshot))
    assert rig.files(VF_UNIT) == ["/dev/vfio/vfio", "/dev/vfio/8"]


def test_a_cxi_device_that_is_another_number_follows(rig: Rig) -> None:
    """HPE Slingshot: the adapter has no RDMA device, and programs open /dev/cxiN."""
    snapshot = change(change(node(), VF_UNIT, cxi="cxi0"), "0000:12:00.2", cxi="cxi1")
    rig.grant(snapshot, replace(VF, environment=()), VF_UNIT)
    assert rig.files(VF_UNIT) == ["/dev/cxi0"]
    later = change(change(snapshot, VF_UNIT, cxi="cxi1"), "0000:12:00.2", cxi="cxi0")
    assert owners(later)["/dev/cxi0"] == {"0000:12:00.2"}
    rig.renew(later)
    assert rig.files(VF_UNIT) == ["/dev/cxi1"]


def test_a_unit_whose_device_is_gone_has_no_spec_until_it_is_back(rig: Rig) -> None:
    rig.grant(node(), HCA, SHARE)
    gone = without(node(), "0000:22:00.0")
    assert rig.renew(gone) == (SHARE,)
    assert rig.there() == set()
    assert rig.specs.rewrite() == []
    assert rig.renew(replace(permuted(node()), generation=gone.generation + 1)) == (SHARE,)
    assert rig.files(SHARE)[0] == "/dev/infiniband/uverbs2"


def test_a_unit_that_is_offered_no_more_follows_its_device_to_another_address(rig: Rig) -> None:
    snapshot = with_vf_rdma(node(), VF_UNIT, "0000:12:00.2")
    rig.grant(snapshot, VF, VF_UNIT)
    gone = without(snapshot, VF_UNIT)
    rig.renew(gone)
    assert rig.there() == set()
    rig.ledger.move_grants({VF_UNIT: "0000:12:00.2"})  # as the reconciler finds out
    assert rig.renew(gone) == (VF_UNIT,)
    assert rig.files(VF_UNIT)[0] == "/dev/infiniband/uverbs51"
    assert "PCIDEVICE_RDMA_VF=0000:12:00.2" in rig.said(VF_UNIT)["env"]


def test_an_offer_that_is_older_than_the_last_changes_nothing(rig: Rig) -> None:
    rig.grant(node(), HCA, SHARE)
    later = permuted(node())
    rig.renew(later)
    assert rig.renew(node()) == ()
    assert rig.files(SHARE)[0] == "/dev/infiniband/uverbs2"


def test_a_spec_is_written_again_if_somebody_removes_it_or_the_agent_was_away(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        rig.grant(node(), HCA, SHARE)
        (rig.folder / f"nodefabric-unit-{SHARE}.json").unlink()
        assert rig.specs.rewrite() == [SHARE]
    (rig.folder / f"nodefabric-unit-{SHARE}.json").unlink()
    with opened(tmp_path) as rig:
        rig.renew(permuted(node()))
        assert rig.files(SHARE)[0] == "/dev/infiniband/uverbs2"


def test_the_spec_goes_with_the_grant_but_not_before_the_books_agree_with_kubelet(tmp_path: Path) -> None:
    with opened(tmp_path, settled=False) as rig:
        rig.grant(node(), HCA, SHARE)
        rig.grant(node(), HCA, OTHER)
        rig.ledger.release([SHARE])
        assert rig.specs.tidy() == ()
        rig.settled.set(True)
        assert rig.specs.tidy() == [SHARE]
        assert rig.there() == {OTHER}
    with opened(tmp_path) as rig:  # a new process sees what an earlier one left
        rig.ledger.release([OTHER])
        rig.specs.look()
        assert rig.specs.tidy() == [OTHER]
        assert rig.there() == set()


def test_what_is_told_at_add_stands_beside_the_device_until_that_has_other_files(rig: Rig) -> None:
    rig.grant(node(), HCA, SHARE)
    mount = {"hostPath": "/run/x", "containerPath": "/run/y", "options": ["ro", "bind"]}
    rig.specs.add_facts(
        {SHARE: {"env": ["NCCL_IB_HCA==mlx5_9", "NCCL_IB_GID_INDEX=3"], "mounts": [mount]}, "strange": {}}
    )
    said = rig.said(SHARE)
    assert said["env"] == ["NCCL_IB_HCA==mlx5_9", "NCCL_IB_GID_INDEX=3"]
    assert said["mounts"] == [mount]
    assert len(said["deviceNodes"]) == 2
    assert rig.renew(replace(node(), generation=2)) == ()
    assert rig.said(SHARE) == said
    rig.renew(permuted(replace(node(), generation=2)))
    assert rig.said(SHARE)["env"] == ["NCCL_IB_HCA==mlx5_2"]
    assert "mounts" not in rig.said(SHARE)


def test_a_unit_that_is_granted_anew_begins_without_what_was_told(rig: Rig) -> None:
    rig.grant(node(), HCA, SHARE)
    rig.specs.add_facts({SHARE: {"env": ["NCCL_IB_GID_INDEX=3"]}})
    rig.grant(node(), HCA, SHARE)
    assert rig.said(SHARE)["env"] == ["NCCL_IB_HCA==mlx5_1"]


def test_files_that_a_device_got_on_its_way_into_a_pod_are_not_taken_from_a_scan(rig: Rig) -> None:
    snapshot = with_vf_rdma(node(), VF_UNIT)
    rig.grant(snapshot, VF, VF_UNIT)
    books.attach(rig.ledger, VF_UNIT, undo=replace(UNDO, rdma="mlx5_50"))
    spec = specs_on(rig, VF_UNIT)[VF_UNIT]
    nodes = [{**each, "path": each["path"].replace("uverbs50", "uverbs77")} for each in spec.edits["deviceNodes"]]
    rig.specs.say({VF_UNIT: replace(spec, edits={**spec.edits, "deviceNodes": nodes})})
    assert rig.renew(replace(snapshot, generation=9)) == ()
    assert rig.files(VF_UNIT)[0] == "/dev/infiniband/uverbs77"


def test_specs_of_a_resource_that_has_left_the_configuration_stay_while_they_are_right(rig: Rig) -> None:
    rig.grant(node(), HCA, SHARE)
    rig.resources = (VF,)
    assert rig.renew(node()) == ()
    assert rig.there() == {SHARE}
    assert rig.renew(permuted(node())) == (SHARE,)
    assert rig.there() == set()


def test_grants_that_come_back_into_lost_books_have_their_specs_again(rig: Rig) -> None:
    offer = plain_offer(rig.resources, permuted(node()))
    rig.ledger.grant(HCA.name, {SHARE: "0000:22:00.0", OTHER: "0000:32:00.0"})  # as kubelet has told of them
    entry = Entry("uid", "main", HCA.name, (OTHER, SHARE))
    rig.specs.adopt([entry], offer, rig.resources)
    assert rig.files(SHARE)[0] == "/dev/infiniband/uverbs2"
    assert rig.said(SHARE)["env"] == rig.said(OTHER)["env"] == ["NCCL_IB_HCA==mlx5_2,mlx5_3"]


def test_a_slot_gets_no_second_file_of_its_name(rig: Rig) -> None:
    slot = "slot-rdma:vf-0-0"
    rig.ledger.grant(VF.name, {slot: VF_UNIT})  # as it is when its pod's device is chosen
    offer = plain_offer(rig.resources, with_vf_rdma(node(), VF_UNIT))
    rig.specs.adopt([Entry("uid", "main", VF.name, (slot,))], offer, rig.resources)
    assert rig.there() == set()
    assert specs_on(rig, slot) == {}


def test_a_spec_that_a_killed_agent_had_yet_to_remove_is_removed_afterwards(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        rig.grant(node(), HCA, SHARE)
        spec = specs_on(rig, "0000:22:00.0")[SHARE]
        rig.ledger.set_specs({SHARE: replace(spec, edits={})})  # and killed before the file was removed
    with opened(tmp_path) as rig:
        rig.specs.look()
        assert rig.renew(without(node(), "0000:22:00.0")) == ()
        assert rig.specs.rewrite() == [SHARE]
        assert rig.there() == set()
        assert rig.specs.rewrite() == []


def test_a_spec_that_cannot_be_written_keeps_none_from_being_removed(rig: Rig) -> None:
    rig.grant(node(), HCA, SHARE)
    rig.grant(node(), HCA, OTHER)
    (rig.folder / f"nodefabric-unit-{SHARE}.json").unlink()
    (rig.folder / f"nodefabric-unit-{SHARE}.json").mkdir()  # in the way
    gone = replace(specs_on(rig, "0000:32:00.0")[OTHER], edits={})
    with pytest.raises(Unavailable):
        rig.specs.say({**specs_on(rig, "0000:22:00.0"), OTHER: gone})
    assert OTHER not in rig.there()


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
    rig.specs.grant(SEVERAL.name, {unit: found.devices}, unit_specs(SEVERAL, [found], offer.snapshot))
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
    assert rig.specs.rewrite() == []


def test_a_rail_keeps_all_the_nics_that_it_was_granted_with(rig: Rig) -> None:
    unit, _ = of_several(rig)
    rig.ledger.move_grants({unit: ("0000:22:00.0", "0000:42:00.0")})
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
