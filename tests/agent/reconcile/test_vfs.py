"""Which VFs without a row are remembered, put back or looked for, and when a quarantine is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from agent.model.allocation import Quarantine
from agent.model.device import Snapshot
from agent.model.vf_identity import KnownDevice
from agent.reconcile.vfs import Survey, forgotten, quarantines_to_end, survey
from tests.cni.tiny_node import mac_of, tiny_snapshot, vf


def known(index: int, name: str | None = None, boot_id: str = "boot") -> KnownDevice:
    identity = f"15b3:101d/02:00:00:00:00:01/{index}"
    return KnownDevice(vf(index), identity, name or f"ens1f0v{index}", mac_of(index), 1500, boot_id)


KNOWN = [known(0), known(1), known(2)]
YESTERDAY = [known(0, "enp1", "yesterday"), known(1, "enp2", "yesterday")]


@pytest.mark.parametrize(
    ("snapshot", "held", "before", "expected"),
    [
        # What is in the host is learnt once, and anew with the name that an administrator gave.
        (tiny_snapshot(3), (), (), Survey(learn=tuple(KNOWN))),
        (tiny_snapshot(3), (), KNOWN, Survey()),
        (tiny_snapshot(3, names={1: "storage1"}), (), KNOWN, Survey(learn=(known(1, "storage1"),))),
        # What has a row is the row's business, and what was known before a reboot says nothing about now.
        (tiny_snapshot(3, in_pods=[0], names={1: "net1"}), (vf(0), vf(1)), KNOWN, Survey()),
        (tiny_snapshot(2), (), YESTERDAY, Survey(learn=(known(0), known(1)))),
        # A pod's name is strange, which siblings show where nothing is remembered.
        *(
            (tiny_snapshot(3, names={1: name}), (), KNOWN, Survey(strange=(vf(1),)))
            for name in ("net1", "eth0", "dev17")
        ),
        (tiny_snapshot(3, names={1: "net1"}), (), (), Survey(learn=(known(0), known(2)), strange=(vf(1),))),
        (tiny_snapshot(3, names={1: "dev17"}), (), (), Survey(learn=(known(0), known(2)), strange=(vf(1),))),
    ],
)
def test_vfs_without_a_row_are_remembered_or_strange(
    snapshot: Snapshot, held: Sequence[str], before: Sequence[KnownDevice], expected: Survey
) -> None:
    assert survey(snapshot, held, before) == expected


def test_a_vf_without_an_interface_is_missing_unless_its_driver_gives_none() -> None:
    snapshot = tiny_snapshot(3, in_pods=[0, 1, 2])
    assert survey(snapshot, {vf(2)}, KNOWN).missing == (vf(0), vf(1))
    for driver in ("vfio-pci", "mlx5_vfio_pci", None, "uio_pci_generic"):
        changed = replace(
            snapshot, devices=tuple(replace(d, driver=driver) if d.is_vf else d for d in snapshot.devices)
        )
        assert survey(changed, (), KNOWN).missing == ()


def test_what_is_gone_or_of_an_earlier_boot_is_forgotten() -> None:
    assert forgotten(tiny_snapshot(1), [known(0), known(1), known(2, boot_id="old")]) == (vf(1), vf(2))


@pytest.mark.parametrize(
    ("entry", "snapshot", "held", "reason"),
    [
        (Quarantine(vf(0), "stuck", 1.0, "boot"), tiny_snapshot(1), set(), "verified"),
        (Quarantine(vf(0), "stuck", 1.0, ""), tiny_snapshot(1), set(), "verified"),
        (Quarantine(vf(0), "stuck", 1.0, "boot"), tiny_snapshot(1), {vf(0)}, None),
        (Quarantine(vf(0), "stuck", 1.0, "yesterday"), tiny_snapshot(1), {vf(0)}, None),
        (Quarantine(vf(0), "stuck", 1.0, "boot"), tiny_snapshot(1, in_pods=[0]), set(), None),
        (Quarantine(vf(0), "stuck", 1.0, "boot"), tiny_snapshot(0), set(), "device-gone"),
        (Quarantine(vf(0), "stuck", 1.0, "yesterday"), tiny_snapshot(1, in_pods=[0]), set(), "rebooted"),
        (Quarantine("ens1f0/c1/net1", "stuck", 1.0, "boot"), tiny_snapshot(1), set(), "verified"),
    ],
)
def test_a_quarantine_ends_when_the_device_is_verifiably_clean(
    entry: Quarantine, snapshot: Snapshot, held: set[str], reason: str | None
) -> None:
    ended = quarantines_to_end([entry], snapshot, held, "boot")
    assert ended == ({} if reason is None else {entry.device: reason})
