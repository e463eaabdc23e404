"""Two adapters, as labels tell of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agent.model.device import PciDevice, RdmaDevice
from tests.node import pci


def adapter(address: str, **changes: Any) -> PciDevice:
    rdma = RdmaDevice(f"mlx5_{address[5:7]}", "CA", f"946d:ae03:0000:{address[5:7]}00", "28.39.3004", (), ())
    return replace(pci(address, (f"pci{address[:7]}",), rdma_devices=(rdma,)), **changes)


ONE, TWO = adapter("0000:3b:00.0"), adapter("0000:5e:00.0")
