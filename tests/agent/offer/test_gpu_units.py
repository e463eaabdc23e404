"""Units of GPUs, slices and replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.config import Resource
from agent.model.device import MigDevice, Snapshot
from agent.model.health import HEALTHY, unhealthy
from agent.model.unit_id import MAX_UNIT_ID
from agent.offer.units import plain_offer, with_profiles
from tests.node import node

NAME = "nvidia.com/gpu"


def uuid(kind: str, number: int) -> str:
    return f"{kind}-{number:08x}-0000-4000-8000-000000000000"


def mig(number: int, profile: str = "1g.10gb", instance: int = 7) -> MigDevice:
    return MigDevice(uuid("MIG", number), profile, instance, 0, 10 << 30)


def machine(*cuts: tuple[MigDevice, ...] | None) -> Snapshot:
    """A node whose first GPUs are cut so; None leaves one whole."""
    whole = node()
    gpus = [
        replace(gpu, uuid=uuid("GPU", gpu.index), mig_mode=cut is not None, mig_devices=cut or ())
        for gpu, cut in zip(whole.gpus, cuts, strict=False)
    ]
    return replace(whole, gpus=tuple(gpus))


def offered(snapshot: Snapshot, **options: object) -> dict[str, list[tuple[str, str, str]]]:
    resources = with_profiles([Resource(NAME, "gpu", **options)], snapshot, ())  # type: ignore[arg-type]
    units = plain_offer(resources, snapshot).offered
    return {name: [(u.unit_id, u.device, u.health.reason) for u in found] for name, found in units.items()}


def gpu(number: int, reason: str = "") -> tuple[str, str, str]:
    return uuid("GPU", number), uuid("GPU", number), reason


def part(number: int) -> tuple[str, str, str]:
    return uuid("MIG", number), uuid("MIG", number), ""


def test_without_a_word_about_slices_a_cut_gpu_is_a_unit_like_others() -> None:
    assert offered(machine(None, (mig(1), mig(2)))) == {NAME: [gpu(0), gpu(1)]}


def test_single_offers_the_slices_in_place_of_the_gpus() -> None:
    snapshot = machine((mig(1), mig(2)), (mig(3), mig(4)))
    assert offered(snapshot, mig="single") == {NAME: [part(1), part(2), part(3), part(4)]}


@pytest.mark.parametrize(
    "snapshot",
    [machine(None, (mig(1),)), machine((mig(1),), (mig(2, "2g.20gb"),)), machine((mig(1), mig(2, "2g.20gb")), None)],
    ids=["one is whole", "two profiles", "two profiles on one GPU"],
)
def test_single_is_impossible_with_gpus_that_differ_and_says_so(snapshot: Snapshot) -> None:
    assert offered(snapshot, mig="single") == {NAME: [gpu(0, "MigUnfit"), gpu(1, "MigUnfit")]}


@pytest.mark.parametrize("strategy", ["single", "mixed"])
def test_a_gpu_to_be_cut_that_has_no_slices_is_said_to(strategy: str) -> None:
    assert offered(machine((), ()), mig=strategy) == {NAME: [gpu(0, "MigUnfit"), gpu(1, "MigUnfit")]}


def test_mixed_makes_a_resource_of_each_profile() -> None:
    snapshot = machine(None, (mig(1), mig(2, "1g.10gb+me", 8), mig(3, "2g.20gb", 9)), (mig(4),))
    assert offered(snapshot, mig="mixed") == {
        NAME: [gpu(0)],
        "nvidia.com/mig-1g.10gb": [part(1), part(4)],
        "nvidia.com/mig-1g.10gb.me": [part(2)],
        "nvidia.com/mig-2g.20gb": [part(3)],
    }


def test_a_profile_that_was_there_keeps_its_resource_and_a_configured_name_is_not_made_twice() -> None:
    base = (Resource(NAME, "gpu", mig="mixed"), Resource("nvidia.com/mig-2g.20gb", "vf"))
    before = with_profiles(base, machine((mig(1), mig(2, "2g.20gb", 8))), ())
    assert [r.name for r in before] == [NAME, "nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb"]
    after = with_profiles(base, machine(None), before)
    assert after == before
    assert plain_offer(after, machine(None)).offered["nvidia.com/mig-1g.10gb"] == ()
    assert with_profiles(base, machine(None), ()) == base


def test_replicas_are_units_of_one_device_with_ids_that_kubelet_takes() -> None:
    found = offered(machine(None, (mig(1),)), mig="mixed", replicas=3)
    assert found[NAME] == [(f"{uuid('GPU', 0)}::{n}", uuid("GPU", 0), "") for n in range(3)]
    assert found["nvidia.com/mig-1g.10gb"] == [(f"{uuid('MIG', 1)}::{n}", uuid("MIG", 1), "") for n in range(3)]
    assert all(len(unit_id) + 4 <= MAX_UNIT_ID for units in found.values() for unit_id, _, _ in units)


def test_slices_and_replicas_have_their_gpus_numa_node_and_ailments() -> None:
    snapshot = machine((mig(1), mig(2)), (mig(3),))
    ill = replace(snapshot.gpus[0], ailments=("GpuLost",))
    snapshot = replace(snapshot, gpus=(ill, snapshot.gpus[1]))
    resources = with_profiles([Resource(NAME, "gpu", mig="single", replicas=2)], snapshot, ())
    units = plain_offer(resources, snapshot).offered[NAME]
    assert [u.health for u in units] == [unhealthy("GpuLost")] * 4 + [HEALTHY] * 2
    home = snapshot.by_address[ill.pci_address].numa_node
    assert {u.numa_node for u in units[:4]} == {home}
