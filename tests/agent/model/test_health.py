from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agent.model.device import LinkLayer, Netdev, PciDevice, RdmaDevice, RdmaPort, Snapshot
from agent.model.device_health import HealthPolicy, judge_nic
from agent.model.health import HEALTHY, Health, Tempo, tempo_of, text_of
from tests.node import pci

PF, VF = "0000:3b:00.0", "0000:3b:00.1"


def function(address: str, driver: str | None = "mlx5_core", **facts: Any) -> PciDevice:
    return pci(address, **{"driver": driver, "iommu_group": 7, **facts})


def netdev(carrier: bool | None, name: str = "ens1f0", port: str = "") -> Netdev:
    return Netdev(name, 5, "02:00:00:00:00:01", 1500, "up", carrier, LinkLayer.ETHERNET, 1000, port)


def rdma(*states: str, layer: LinkLayer = LinkLayer.ETHERNET) -> RdmaDevice:
    ports = tuple(RdmaPort(n, state, layer, 100.0) for n, state in enumerate(states, 1))
    return RdmaDevice("mlx5_0", "CA", "", "", ports, ())


def judged(
    pf: PciDevice, vf: PciDevice | None = None, quarantined: str | None = None, follow_link: bool = True
) -> Health:
    device = vf or pf
    snapshot = Snapshot(devices=(pf,) if device is pf else (pf, device))
    return judge_nic(device, snapshot, quarantined=quarantined, policy=HealthPolicy(follow_link=follow_link))


VF_OF_IT = function(VF, physfn=PF)


def test_a_word_that_is_none_of_ours_has_no_sentence() -> None:
    assert (text_of("Tired"), tempo_of("Tired")) == ("", Tempo.AT_ONCE)


@pytest.mark.parametrize(
    ("pf", "reason"),
    [
        (function(PF), ""),
        (function(PF, driver=None), "NoDriver"),
        (function(PF, driver="vfio-pci", iommu_group=None), "NoIommuGroup"),
        (function(PF, driver="mlx5_vfio_pci", iommu_group=None), "NoIommuGroup"),
        (function(PF, driver="vfio-pci"), ""),
        (function(PF, netdevs=(netdev(True),)), ""),
        (function(PF, netdevs=(netdev(None),)), ""),
        (function(PF, netdevs=(netdev(False),)), "LinkDown"),
        (function(PF, netdevs=(netdev(False), netdev(True, "ens1f1"))), ""),
        (function(PF, netdevs=(netdev(False), netdev(True, "rep", "pf0vf0"))), "LinkDown"),
        (function(PF, rdma_devices=(rdma("DOWN"),), netdevs=(netdev(True),)), "PortDown"),
        (function(PF, rdma_devices=(rdma("DOWN", "ACTIVE"),), netdevs=(netdev(False),)), ""),
        (function(PF, rdma_devices=(rdma("ACTIVE_DEFER"),)), ""),
        (function(PF, rdma_devices=(rdma("INIT"),)), "PortDown"),
    ],
)
def test_a_pf_is_judged_by_driver_ports_and_carrier(pf: PciDevice, reason: str) -> None:
    assert judged(pf).reason == reason


@pytest.mark.parametrize(
    ("pf", "vf", "reason"),
    [
        (function(PF), VF_OF_IT, ""),
        (function(PF, driver=None), VF_OF_IT, "ParentDown"),
        (function(PF), function(VF, physfn="0000:99:00.0"), "ParentDown"),
        (function(PF), function(VF, physfn=PF, driver=None), "NoDriver"),
        (function(PF, netdevs=(netdev(False),)), VF_OF_IT, "LinkDown"),
        (function(PF, netdevs=(netdev(True),)), function(VF, physfn=PF, netdevs=(netdev(False),)), ""),
        (function(PF, rdma_devices=(rdma("DOWN"),), netdevs=(netdev(None),)), VF_OF_IT, ""),
        (function(PF, rdma_devices=(rdma("DOWN"),), netdevs=(netdev(False),)), VF_OF_IT, "LinkDown"),
        (function(PF, rdma_devices=(rdma("DOWN", layer=LinkLayer.INFINIBAND),)), VF_OF_IT, "PortDown"),
        (function(PF, driver="vfio-pci"), VF_OF_IT, ""),
    ],
)
def test_a_vf_follows_its_pf(pf: PciDevice, vf: PciDevice, reason: str) -> None:
    assert judged(pf, vf).reason == reason


def test_where_links_are_ignored_a_vf_still_needs_its_pf() -> None:
    down = function(PF, netdevs=(netdev(False),))
    assert judged(down, VF_OF_IT, follow_link=False) == HEALTHY
    assert judged(down, follow_link=False).reason == "LinkDown"
    assert judged(replace(down, driver=None), VF_OF_IT, follow_link=False).reason == "ParentDown"
