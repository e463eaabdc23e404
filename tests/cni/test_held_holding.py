"""Which devices a pod holds by kubelet's word, whatever kind of unit stands for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agent.config import Config, RailNic, Resource, SharedPool
from agent.kubelet.podresources import ContainerDevices, DeviceAssignment, PodDevices, PodResources
from agent.ledger import Ledger
from agent.model.allocation import Binding, PodRef
from agent.model.device import PciDevice
from agent.model.health import HEALTHY
from agent.offer.offer import Unit
from cni.grants import Holding
from tests.agent.books import open_books
from tests.cni.granting import granted_of
from tests.deviceplugin.machines import rdma

POD, OTHER = PodRef("default", "p", "uid-p"), PodRef("default", "other", "uid-o")
VF, MOVED, NEW, BOUND, FOREIGN = (f"0000:12:00.{n}" for n in range(1, 6))
PF, POOL, RAIL = "0000:13:00.0", "0000:14:00.0", "0000:15:00.0"
SHARE, SLOT, STRANGE_SLOT = "hca-0c42a10300651234-7", "slot-rdma:late-0-0", "slot-rdma:late-0-1"
RESOURCES = (
    Resource("rdma/vf", "vf"),
    Resource("rdma/late", "vf", binding="late"),
    Resource("rdma/hca", "hca"),
    Resource("rdma/rail", "rail", nic=RailNic("hca")),
    Resource("rdma/pool", "hca", compat=SharedPool(10)),
)
OFFERED = (
    Unit(VF, "rdma/vf", "vf", VF, HEALTHY, 0),
    Unit(NEW, "rdma/vf", "vf", NEW, HEALTHY, 0),
    Unit(SHARE, "rdma/hca", "hca", PF, HEALTHY, 0),
    Unit("rail-GPU-1", "rdma/rail", "rail", RAIL, HEALTHY, 0),
    Unit("3", "rdma/pool", "hca", "", HEALTHY, 0, rdma_devices=("mlx5_4",)),
)
ADAPTER = PciDevice(POOL, (), 0x020000, 0x15B3, 0, None, 0, None, rdma_devices=(rdma(4, "0c42:a103:0065:0004"),))


class Kubelet(PodResources):
    """Knows one pod, with two containers."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"))

    async def get(self, pod: PodRef) -> PodDevices | None:
        if pod.name != POD.name:
            return None
        one = ContainerDevices(
            "one", (DeviceAssignment("rdma/vf", (VF, MOVED)), DeviceAssignment("rdma/late", (SLOT, STRANGE_SLOT)))
        )
        two = ContainerDevices(
            "two",
            (
                DeviceAssignment("rdma/vf", (NEW,)),
                DeviceAssignment("rdma/hca", (SHARE,)),
                DeviceAssignment("rdma/rail", ("rail-GPU-1",)),
                DeviceAssignment("rdma/pool", ("3",)),
                DeviceAssignment("intel.com/sriov", (FOREIGN,)),
            ),
        )
        return PodDevices(POD, (one, two))


def bound(slot: str, device: str, pod: PodRef) -> Binding:
    return Binding(slot, "rdma/late", "vf", device, "one", "c1", "eth0", pod, {})


def holding(folder: Path, pod: PodRef) -> Holding | None:
    async def ask(books: Ledger) -> Holding | None:
        config, loop = Config(resources=RESOURCES), asyncio.get_running_loop()
        granted = granted_of(config, books, Kubelet(), loop, *OFFERED, devices=(ADAPTER,))
        return await asyncio.to_thread(granted.holding, pod)

    with open_books(folder) as books:
        books.grant("rdma/vf", {VF: VF, MOVED: "0000:99:00.1"})
        books.grant("rdma/late", {SLOT: "", STRANGE_SLOT: ""})
        books.bind_slots([bound(SLOT, BOUND, POD), bound(STRANGE_SLOT, "0000:12:01.0", OTHER)])
        return asyncio.run(ask(books))


def test_units_of_all_kinds_stand_for_their_devices(tmp_path: Path) -> None:
    assert holding(tmp_path, POD) == Holding(
        whole=frozenset({VF, "0000:99:00.1", NEW, BOUND, FOREIGN}), shared=frozenset({PF, RAIL, POOL})
    )


def test_a_pod_that_kubelet_does_not_know_holds_nothing_that_is_known(tmp_path: Path) -> None:
    assert holding(tmp_path, OTHER) is None
