"""Two adapters, as labels tell of them."""

from __future__ import annotations

from dataclasses import replace

from agent.model.device import PciDevice, RdmaDevice


def adapter(address: str, **changes: object) -> PciDevice:
    rdma = RdmaDevice(f"mlx5_{address[5:7]}", "CA", f"946d:ae03:0000:{address[5:7]}00", "28.39.3004", (), ())
    made = PciDevice(
        address=address,
        path=(f"pci{address[:7]}", address),
        pci_class=0x020000,
        vendor=0x15B3,
        device=0x1021,
        driver="mlx5_core",
        numa_node=0,
        iommu_group=None,
        rdma_devices=(rdma,),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


ONE, TWO = adapter("0000:3b:00.0"), adapter("0000:5e:00.0")
