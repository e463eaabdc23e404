"""Which events of the PCI bus the monitor of GPUs hears of."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.hardware.machine import passing_on
from agent.hardware.nvml.monitor import GpuMonitor
from agent.model.change import Change, OnEvent

DEVICE = "0000:3b:00.2"


class Listening(GpuMonitor):
    def __init__(self) -> None:
        super().__init__(is_installed=lambda: False)
        self.heard: list[tuple[str, str]] = []

    def pci_event(self, action: str, address: str) -> None:
        self.heard.append((action, address))


@pytest.mark.parametrize(
    ("pci_class", "concerns_gpus"),
    [
        ("0x020000", False),
        ("0x020700", False),
        ("0x0c0600", False),
        ("0x030200", True),
        ("0x068000", True),
        (None, True),
    ],
)
def test_a_vf_that_is_bound_anew_is_no_reason_to_read_gpus(
    tmp_path: Path, pci_class: str | None, concerns_gpus: bool
) -> None:
    folder = tmp_path / "sys/bus/pci/devices" / DEVICE
    if pci_class is not None:
        folder.mkdir(parents=True)
        (folder / "class").write_text(f"{pci_class}\n")
    told: list[str] = []
    monitor = Listening()
    pass_on: OnEvent = passing_on(lambda what, change: told.append(what), monitor, tmp_path)
    pass_on(f"pci bind {DEVICE}", Change())
    assert told == [f"pci bind {DEVICE}"]
    assert monitor.heard == ([("bind", DEVICE)] if concerns_gpus else [])
