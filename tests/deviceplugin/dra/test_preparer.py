"""Prepare of a claim, with real books and CDI specs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from agent.config import Config
from agent.edits.specs import Specs, file_of_claim
from agent.errors import ClaimConflict, ClaimInvalid, DeviceBusy, DeviceGone, NotYet, Unavailable, UnitUnhealthy
from agent.kubelet.cri import Sandbox
from agent.model.allocation import ClaimRef, ClaimState, Hold, PodRef, Spec
from agent.model.device import Snapshot
from agent.model.health import Reason, unhealthy
from agent.model.mounts import parse_mount
from agent.model.unit_id import slot_id
from agent.reconcile.grants import moved_of_claims
from deviceplugin.dra.preparer import DeviceUsers
from tests.cni.networks import network as configured
from tests.deviceplugin.dra.claim_documents import NODE, POD, REF, claim, network, result
from tests.deviceplugin.dra.preparing import (
    FIRST,
    HCA,
    LATE,
    OTHER,
    OTHER_POD,
    PATIENT,
    QUICK,
    VF,
    Counting,
    Desk,
    Desks,
    KubeletStandIn,
    Others,
    files,
    had_alone,
    of_another,
    prepared,
    spec,
)
from tests.node import bound_slot
from tests.waiting import soon

# ------------------------------------------------------------------------------------------------------- prepare


def test_a_claim_is_in_the_books_and_its_spec_on_disk_when_kubelet_is_answered(desk: Desk) -> None:
    answer = prepared(desk, owner=POD)

    name = f"{REF.uid}-0-vf-0"
    (row,) = desk.ledger.claims()
    assert answer == row.devices
    assert (row.devices[0].key, row.devices[0].request, row.devices[0].pool) == (name, "nic", NODE)
    assert (row.ref, row.state, row.pods, row.only_pod) == (REF, ClaimState.PREPARED, (POD,), POD.uid)
    assert had_alone(desk) == {FIRST: REF}
    assert spec(desk)[name]["env"] == [f"PCIDEVICE_RDMA_VF={FIRST}"]


def test_a_claims_containers_get_the_mounts_of_its_resource_read_only(desks: Desks) -> None:
    desk = desks(replace(VF, mounts=(parse_mount("/opt/cray:/opt/host/cray"),)))
    prepared(desk)
    (mount,) = spec(desk)[f"{REF.uid}-0-vf-0"]["mounts"]
    assert (mount["hostPath"], mount["containerPath"]) == ("/opt/cray", "/opt/host/cray")
    assert {"ro", "nosuid", "nodev"} < set(mount["options"])


def test_a_prepared_claim_gets_the_same_answer_and_its_spec_again(desk: Desk) -> None:
    answer, before = prepared(desk), desk.ledger.claim(REF.uid)
    (desk.folder / f"nodefabric-claim-{REF.uid}.json").unlink()

    assert desk.preparer.prepare(REF) == answer
    assert desk.ledger.claim(REF.uid) == before
    assert spec(desk)


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_claim_that_the_healer_ends_meanwhile_is_not_said_to_be_prepared(desk: Desk, is_gone: bool) -> None:
    prepared(desk)

    class Meanwhile(Specs):
        def sync(self, names: Iterable[str]) -> Sequence[str]:
            desk.ledger.set_claim_state(REF.uid, ClaimState.UNPREPARING)
            desk.specs.remove(file_of_claim(REF.uid))
            if is_gone:
                desk.ledger.remove_claim(REF.uid)
            return super().sync(names)

    with pytest.raises(NotYet, match="was just ended"):
        desk.made(PATIENT, specs=Meanwhile(desk.ledger, desk.folder)).prepare(REF)
    assert files(desk) == []
    assert desk.preparer.prepare(REF)


def test_a_prepared_claim_learns_for_which_pods_it_is_reserved_now(desk: Desk) -> None:
    prepared(desk)
    desk.claimed(REF, claim(result("nic", "vf-0"), pods=[POD, OTHER_POD]))
    desk.preparer.prepare(REF)

    assert desk.ledger.claims()[0].pods == (POD, OTHER_POD)


def test_a_claim_that_got_something_else_meanwhile_is_prepared_anew(desk: Desk) -> None:
    prepared(desk)
    (answer,) = prepared(desk, result("nic", "vf-1"))

    assert answer.device_name == "vf-1"
    assert list(had_alone(desk)) == ["0000:12:00.2"]


def test_without_the_api_server_a_claim_in_the_books_is_answered_and_another_fails(desk: Desk) -> None:
    answer = prepared(desk)
    of_another(desk, "vf-1")
    desk.others.is_away = True

    assert desk.preparer.prepare(REF) == answer
    with pytest.raises(Unavailable, match="team/other cannot be read"):
        desk.preparer.prepare(OTHER)
    assert desk.ledger.claim(OTHER.uid) is None


def test_what_an_add_finds_out_while_the_claim_is_read_stays_in_the_spec(desk: Desk) -> None:
    prepared(desk)
    (device,) = desk.ledger.claims()[0].devices
    edits = {"env": ["CHANGED=1"]}

    class Meanwhile(Others):
        def get(self, ref: ClaimRef) -> Mapping[str, Any] | None:
            desk.specs.change(lambda: {device.key: Spec("claim", edits)})
            return super().get(ref)

    desk.others = Meanwhile(desk.others.claims)
    desk.made(QUICK).prepare(REF)
    assert spec(desk) == {device.key: edits}


def test_after_a_reboot_the_rows_are_made_anew(desk: Desk, desks: Desks) -> None:
    prepared(desk)
    again = desks(VF, HCA, boot_id="another boot")
    again.others.is_away = True
    again.specs.remove(file_of_claim(REF.uid))  # a reboot empties its folder
    with pytest.raises(Unavailable, match="team/two-rails cannot be read"):
        again.preparer.prepare(REF)
    assert files(again) == []
    again.others.is_away = False
    again.claimed(REF, claim(result("nic", "vf-0")))
    again.preparer.prepare(REF)
    assert again.ledger.claims()[0].boot_id == "another boot"


def test_after_a_reboot_that_swaps_two_cards_each_claim_has_its_own_again(desk: Desk, desks: Desks) -> None:
    """Each claim's name of its device is the address of the other's now."""
    first, second = "vf-0", "vf-4"  # of two cards
    prepared(desk, result("nic", first))
    desk.preparer.prepare(of_another(desk, second))
    before = had_alone(desk)
    again = desks(VF, HCA, snapshot=swapped(desk.offer.snapshot), boot_id="another boot")
    again.others.claims = desk.others.claims
    again.ledger.move(moved_of_claims(again.ledger.claims(), again.offer.snapshot))
    for ref, device in ((REF, first), (OTHER, second)):
        (answer,) = again.preparer.prepare(ref)
        assert answer.device_name == device
    assert [*had_alone(again).items()] == [*zip(list(before)[::-1], before.values(), strict=True)]


def test_what_a_slot_had_before_a_reboot_is_free_for_a_claim(desk: Desk, desks: Desks) -> None:
    desk.ledger.bind_slots([SLOT])
    assert prepared(desks(VF, boot_id="another boot"))


def swapped(snapshot: Snapshot) -> Snapshot:
    """The next boot of a node, in which its first two cards stand at each other's address."""
    one, other, *_ = (device for device in snapshot.devices if device.vfs)
    come = {
        one.address: replace(one, rdma_devices=other.rdma_devices),
        other.address: replace(other, rdma_devices=one.rdma_devices),
    }
    devices = tuple(come.get(device.address, device) for device in snapshot.devices)
    return replace(snapshot, devices=devices, boot_id="another boot")


def test_a_claim_that_is_gone_or_was_made_anew_is_refused(desk: Desk) -> None:
    with pytest.raises(ClaimInvalid, match="does not exist"):
        desk.preparer.prepare(REF)
    prepared(desk)
    desk.others.claims.clear()
    with pytest.raises(ClaimInvalid, match="does not exist"):
        desk.preparer.prepare(REF)


def test_a_device_that_nobody_offers_is_refused(desk: Desk) -> None:
    with pytest.raises(DeviceGone, match="vf-99 is gone"):
        prepared(desk, result("nic", "vf-99"))


def test_before_the_first_offer_a_claim_waits(desk: Desk) -> None:
    offered = desk.catalog.value
    desk.catalog.set(())
    with pytest.raises(DeviceBusy, match="not known yet"):
        prepared(desk)
    with soon(0.1, desk.catalog.set, offered):
        assert prepared(desk)


def test_a_claim_for_a_node_that_offers_nothing_to_claims_any_more_is_told_so_at_once(desks: Desks) -> None:
    desk = desks(replace(VF, offer="devicePlugin"), patience=PATIENT)
    began = time.monotonic()
    with pytest.raises(ClaimInvalid, match=r"offers no resource to claims any more.*recreate the pod"):
        prepared(desk)

    assert time.monotonic() - began < 5


def test_an_ill_device_is_refused_unless_it_only_waits_for_its_link(desk: Desk) -> None:
    first, *rest = desk.catalog.value

    def ill(reason: Reason) -> None:
        units = tuple(replace(unit, health=unhealthy(reason)) for unit in first.units)
        desk.catalog.set((replace(first, units=units), *rest))

    ill(Reason.QUARANTINED)
    with pytest.raises(UnitUnhealthy, match="not cleaned up yet"):
        prepared(desk)
    assert prepared(desk, result("nic", "vf-0", tolerations=[{"key": "nodefabric.io/Quarantined"}]))
    desk.preparer.unprepare(REF)
    ill(Reason.LINK_DOWN)
    assert prepared(desk)


def test_parameters_are_in_the_rows_for_the_add(desks: Desks) -> None:
    config = Config(resources=(replace(VF, network="rails"),), networks=(configured({"name": "rails", "vlan": 7}),))
    desk = desks(config=config)
    prepared(desk, config=[network(mtu=9000, ifName="fast%d")])
    (row,) = desk.ledger.claims()[0].devices

    assert (dict(row.network), row.ifname) == ({"name": "rails", "vlan": 7, "mtu": 9000}, "fast%d")


def test_shares_of_one_adapter_go_to_several_claims(desk: Desk) -> None:
    prepared(desk, result("rdma", "hca-0", shareID="s-1"))
    desk.claimed(OTHER, claim(result("rdma", "hca-0", shareID="s-2"), ref=OTHER, pods=[OTHER_POD]))
    (answer,) = desk.preparer.prepare(OTHER)

    assert answer.share_id == "s-2"
    (edits,) = spec(desk, OTHER.uid).values()
    assert [node["path"] for node in edits["deviceNodes"]] == ["/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm"]


def test_who_looks_gets_character_devices_and_takes_nothing_from_anybody(desk: Desk) -> None:
    prepared(desk, result("nic", "vf-0"), result("rdma", "hca-0", shareID="s"))
    looks = (result("look", "vf-0", adminAccess=True), result("see", "hca-0", adminAccess=True))
    desk.claimed(OTHER, claim(*looks, ref=OTHER, pods=[OTHER_POD]))
    desk.preparer.prepare(OTHER)

    assert had_alone(desk) == {FIRST: REF}
    assert [row.admin for row in desk.ledger.claim(OTHER.uid).devices] == [True, True]  # type: ignore[union-attr]
    of_hca = spec(desk, OTHER.uid)[f"{OTHER.uid}-1-hca-0"]
    assert list(of_hca) == ["deviceNodes"]


# --------------------------------------------------------------------------------------- a device in other hands


def test_a_device_of_a_claim_that_is_in_use_is_refused_at_once_naming_that_claim(desks: Desks) -> None:
    desk = desks(VF, patience=PATIENT)
    prepared(desk)
    began = time.monotonic()
    with pytest.raises(ClaimConflict, match="claimed by team/two-rails "):
        desk.preparer.prepare(of_another(desk))

    assert time.monotonic() - began < 5
    assert had_alone(desk) == {FIRST: REF}
    assert files(desk) == [f"nodefabric-claim-{REF.uid}.json"]


@pytest.mark.parametrize("how", ["gone", "not reserved", "unpreparing"])
def test_a_device_of_a_claim_whose_pods_have_ended_is_waited_for(desks: Desks, how: str) -> None:
    desk = desks(VF, patience=PATIENT)
    prepared(desk)
    if how == "gone":
        desk.others.claims.clear()
    elif how == "not reserved":
        desk.claimed(REF, claim(result("nic", "vf-0"), pods=[]))
    else:
        desk.ledger.set_claim_state(REF.uid, ClaimState.UNPREPARING)
    with soon(0.2, desk.preparer.unprepare, REF):
        assert desk.preparer.prepare(of_another(desk))
    assert had_alone(desk) == {FIRST: OTHER}


def test_a_device_in_the_sandbox_of_a_pod_that_lives_is_refused_naming_both(desk: Desk) -> None:
    desk.attach(FIRST, OTHER_POD)
    with pytest.raises(ClaimConflict, match=r"attached to team/other-pod \(sandbox sandbox-1\)"):
        prepared(desk)


def test_a_device_on_its_way_back_is_waited_for(desks: Desks) -> None:
    desk = desks(VF, patience=PATIENT)
    row = desk.attach(FIRST, OTHER_POD)
    desk.ledger.begin_detach([row.attachment_id])
    with soon(0.2, desk.ledger.finish_detach, row):
        assert prepared(desk)


def test_who_waits_looks_ever_more_seldom_and_is_told_what_he_waited_for_in_vain(desks: Desks) -> None:
    """A node full of claims that wait would have no time left for those that need not."""
    desk = desks(VF)
    prepared(desk)
    desk.ledger.set_claim_state(REF.uid, ClaimState.UNPREPARING)
    counted = Counting(desk.ledger)
    waiting = desk.made(replace(PATIENT, prepare=0.6), counted)
    with pytest.raises(DeviceBusy, match=r"claimed by team/two-rails .*still so after 0.6 s"):
        waiting.prepare(of_another(desk))

    assert 5 < counted.looks < 60  # 120 at the first pace


def test_a_device_whose_namespace_has_gone_is_healed_and_had(desk: Desk) -> None:
    row = desk.attach(FIRST, OTHER_POD)

    def heal(device: str) -> None:
        assert device == FIRST
        desk.detached(row)

    desk.others.on_heal = heal
    assert prepared(desk)


SLOT = bound_slot(slot_id("old/vf", 0, 0), "old/vf", "vf", FIRST, "main", "c1", "net1", OTHER_POD, {"env": ["A=1"]})


@pytest.mark.parametrize("hold", [Hold(FIRST, "old/vf", (FIRST,)), SLOT], ids=["unit", "slot"])
def test_what_a_pod_has_from_a_plugin_is_refused_and_that_of_a_pod_that_is_gone_waited_for(
    desk: Desk, hold: Hold
) -> None:
    desk.ledger.grant([replace(hold, devices=() if hold.is_slot else hold.devices)])
    desk.ledger.bind([hold.key], OTHER_POD)
    if hold.is_slot:
        desk.ledger.bind_slots([hold])
    desk.others.held[OTHER_POD.name] = {"main": {"old/vf": [hold.key]}}
    with pytest.raises(ClaimConflict, match="granted to team/other-pod"):
        prepared(desk)

    desk.others.held.clear()
    ends = (desk.ledger.unbind, [hold]) if hold.is_slot else (desk.ledger.release, [hold.key])
    with soon(0.1, *ends):
        assert prepared(desk)


# --------------------------------------------------------------------------------------------------- side by side


def test_claims_side_by_side_never_get_one_device(desks: Desks) -> None:
    desk = desks(LATE, patience=PATIENT)
    refs = [ClaimRef(f"{n:08d}-0000-4000-8000-000000000000", "team", f"claim-{n}") for n in range(16)]
    for ref in refs:
        pod = PodRef("team", ref.name, f"pod-{ref.uid}")
        desk.claimed(ref, claim(result("nic", "slots-0", shareID=ref.name), ref=ref, pods=[pod]))
    failed: list[BaseException] = []

    def prepare(ref: ClaimRef) -> None:
        try:
            desk.preparer.prepare(ref)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=prepare, args=[ref]) for ref in refs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failed == []
    assert len(had_alone(desk)) == 16


# --------------------------------------------------------------------------------------------------------- killed


class Killed(BaseException):
    """The process ends here."""


class Mortal:
    """Books or specs, in whose hands the process dies before or after one of its steps."""

    def __init__(self, whole: Any, step: str, after: bool) -> None:
        self._whole, self._step, self._after = whole, step, after

    def __getattr__(self, name: str) -> Any:
        return self._dying if name == self._step else getattr(self._whole, name)

    def _dying(self, *values: Any) -> None:
        if self._after:
            getattr(self._whole, self._step)(*values)
        raise Killed


STEPS = {
    "prepare": ("prepare_claim", "sync", "set_claim_state"),
    "unprepare": ("set_claim_state", "remove", "remove_claim"),
}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("call", "step"), [(call, step) for call, steps in STEPS.items() for step in steps])
def test_killed_at_any_write_the_next_call_finishes(desks: Desks, call: str, step: str, after: bool) -> None:
    desk = desks(VF)
    desk.claimed(REF, claim(result("nic", "vf-0")))
    if call == "unprepare":
        desk.preparer.prepare(REF)
    dying = desk.made(PATIENT, Mortal(desk.ledger, step, after), Mortal(desk.specs, step, after))
    with pytest.raises(Killed):
        getattr(dying, call)(REF)

    again = desks(VF)
    again.claimed(REF, claim(result("nic", "vf-0")))
    getattr(again.preparer, call)(REF)
    states = [row.state for row in again.ledger.claims()]
    assert states == ([ClaimState.PREPARED] if call == "prepare" else [])
    assert len(files(again)) == len(states)


WANTED = REF.uid


@pytest.fixture
def busy_desk(desks: Desks) -> Desk:
    """A node whose first eight VFs are in the hands of claims of pods that live."""
    made = desks(VF)
    for n in range(8):
        ref = ClaimRef(f"claim-{n}", "team", f"c-{n}")
        pod = PodRef("team", f"p-{n}", f"uid-{n}")
        made.preparer.prepare(made.claimed(ref, claim(result("nic", f"vf-{n}"), ref=ref, pods=[pod])))
    return made


def users_of(desk: Desk) -> DeviceUsers:
    desk.others.asked.clear()
    return DeviceUsers(desk.ledger, desk.others, KubeletStandIn(desk.others), cast(Any, desk.others))


def test_nobody_is_asked_about_the_others_when_one_device_is_on_its_way_back(busy_desk: Desk) -> None:
    busy_desk.ledger.set_claim_state("claim-7", ClaimState.UNPREPARING)
    assert users_of(busy_desk).passes(WANTED, had_alone(busy_desk))
    assert busy_desk.others.asked == []


def test_an_api_server_that_does_not_answer_is_asked_once_for_all_of_them(busy_desk: Desk) -> None:
    busy_desk.others.is_away = True
    assert not users_of(busy_desk).passes(WANTED, had_alone(busy_desk))
    assert len(busy_desk.others.asked) == 1


def test_the_books_know_of_a_claim_that_nobody_may_use_any_more_should_kubelet_have_forgotten_it(
    busy_desk: Desk,
) -> None:
    del busy_desk.others.claims["claim-5"]
    users = users_of(busy_desk)
    for _ in range(2):
        assert users.passes(WANTED, ["0000:22:00.2"])
    states = {claim.ref.uid: claim.state for claim in busy_desk.ledger.claims()}
    assert [uid for uid, state in states.items() if state is ClaimState.UNPREPARING] == ["claim-5"]
    assert busy_desk.others.asked == ["claim team/c-5"]


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
    with soon(0.2, desk.ledger.finish_detach, row):
        desk.preparer.unprepare(REF)
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
