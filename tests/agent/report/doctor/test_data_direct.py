"""What doctor says of kernel and rdma-core where adapters have Data Direct functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agent.model.device import Snapshot
from agent.report.doctor import checks_hardware
from agent.report.doctor.collect import data_direct
from agent.report.doctor.facts import Facts, Severity

LIBRARY = "usr/lib/aarch64-linux-gnu/libmlx5.so.1"
KNOWS = b"\x7fELF mlx5dv_get_data_direct_sysfs_path\0"


@pytest.mark.parametrize(
    ("node", "driver", "library", "severity", "says"),
    [
        ("gb300-4gpu", "mlx5_ib", KNOWS, Severity.FINE, "4 functions; kernel and libmlx5 know them"),
        ("gb300-4gpu", None, KNOWS, Severity.WARNING, "(6.8.0-64k) is too old: take Linux 6.12"),
        ("gb300-4gpu", "mlx5_ib", b"\x7fELF", Severity.WARNING, f"/{LIBRARY} does not know Data Direct"),
        ("gb300-4gpu", "mlx5_ib", None, Severity.UNSEEN, "rdma-core 54"),
        ("h100-8gpu", "mlx5_ib", KNOWS, None, ""),
    ],
)
def test_kernel_and_library_must_know_the_functions_that_adapters_have(
    tmp_path: Path,
    node_snapshot: Callable[[str], Snapshot],
    node: str,
    driver: str | None,
    library: bytes | None,
    severity: Severity | None,
    says: str,
) -> None:
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/osrelease").write_text("6.8.0-64k\n")
    if library is not None:
        (tmp_path / LIBRARY).parent.mkdir(parents=True)
        (tmp_path / LIBRARY).write_bytes(library)
    found = node_snapshot(node)
    devices = tuple(replace(d, driver=driver) if d.device == 0x2100 else d for d in found.devices)
    snapshot = replace(found, devices=devices)
    findings = list(checks_hardware.data_direct(Facts(snapshot, data_direct=data_direct(tmp_path, snapshot))))
    assert [f.severity for f in findings] == ([severity] if severity is not None else [])
    assert all(says in f"{f.text} | {f.remedy}" for f in findings)
