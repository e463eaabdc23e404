"""Names and devices in short."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from agent.model.device import Snapshot
from agent.model.listed import grouped, some

Snapshots = Callable[[str], Snapshot]


@pytest.mark.parametrize(
    ("names", "shown"),
    [([], ""), (["a"], "a"), (["a", "b", "c"], "a, b, c"), (["a", "b", "c", "d"], "a, b, c and 1 more")],
)
def test_so_many_names_are_shown_and_the_rest_is_counted(names: Sequence[str], shown: str) -> None:
    assert some(names, 3) == shown


def test_vfs_are_named_by_pf_and_range_and_others_as_they_are_called(node_snapshot: Snapshots) -> None:
    snapshot = node_snapshot("h100-8gpu")
    pfs = [device for device in snapshot.devices if device.vfs]
    first, second, third, *_ = pfs
    assert grouped(first.vfs, snapshot) == "ens1f0np0: VFs 0–7"
    assert grouped([*first.vfs, *second.vfs], snapshot) == "ens1f0np0, ens2f0np0: VFs 0–7 each"
    assert grouped([first.vfs[3]], snapshot) == "ens1f0np0: VF 3"
    apart = [*first.vfs[:3], first.vfs[7], *second.vfs, third.address, f"{third.address} (mlx5_2)", "GPU-1"]
    assert grouped(apart, snapshot) == (
        f"{third.address}, {third.address} (mlx5_2), GPU-1; ens1f0np0: VFs 0–2, 7; ens2f0np0: VFs 0–7"
    )
    assert grouped([], snapshot) == ""


def test_a_thousand_vfs_fit_one_line(node_snapshot: Snapshots) -> None:
    snapshot = node_snapshot("dense-16x64")
    vfs = [device.address for device in snapshot.devices if device.is_vf]
    text = grouped(vfs, snapshot)
    assert len(vfs) == 1024
    assert text.endswith(" and 12 more: VFs 0–63 each")
    uneven = grouped([vf for i, device in enumerate(snapshot.devices) for vf in device.vfs[: 1 + i % 64]], snapshot)
    assert len(uneven) < 300
