"""What kubelet replays, as its checkpoint tells: units withheld, and whether answers may have CDI names."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.config import Config, Resource
from agent.edits.build import unit_specs
from agent.edits.specs import Specs
from agent.edits.unit_specs import UnitSpecs
from agent.kubelet.cri import Sandbox
from agent.kubelet.podresources import HeldUnit
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.offer.offer import Offer
from agent.offer.units import plain_offer
from agent.reconcile.units import Units
from agent.reconcile.view import View
from agent.state import Latest
from proto.deviceplugin.v1beta1 import api_pb2
from tests import node as books
from tests.agent.edits.unit_specs_rig import OTHER, SHARE, permuted
from tests.agent.reconcile.outside import Answers
from tests.node import change, granted, node

HCA = Resource("rdma/hca", "hca", shares=2)
VF = Resource("rdma/dpdk", "vf")
GPU = Resource("nvidia.com/gpu", "gpu")
RESOURCES = (HCA, VF, GPU)
VERBS = "/dev/infiniband/uverbs"


class Offered(Answers):
    """Offers the resources on a snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self.snapshot = node()

    def offer(self) -> Offer:
        return plain_offer(RESOURCES, self.snapshot)


@dataclass
class Rig:
    folder: Path
    ledger: Ledger
    outside: Offered
    specs: Specs
    by_cdi: Latest[bool]
    units: Units
    settled: Latest[bool]
    config: Latest[Config]

    def note(self, *entries: tuple[str, str, list[str], api_pb2.ContainerAllocateResponse]) -> None:
        """Write kubelet's checkpoint: pod UID, resource, units and answer."""
        noted = [
            {
                "PodUID": uid,
                "ContainerName": "main",
                "ResourceName": resource,
                "DeviceIDs": {"0": ids},
                "AllocResp": base64.b64encode(answer.SerializeToString()).decode(),
            }
            for uid, resource, ids, answer in entries
        ]
        folder = self.folder / "device-plugins"
        folder.mkdir(exist_ok=True)
        document = {"Data": {"PodDeviceEntries": noted}}
        (folder / "kubelet_internal_checkpoint").write_text(json.dumps(document))

    def heal(self, *held: HeldUnit) -> None:
        self.units.heal(View(held_units=held))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    config = Latest(Config(resources=RESOURCES, kubelet_dir=tmp_path, cdi_dir=tmp_path / "cdi"))
    with books.open_books(tmp_path) as ledger:
        outside, by_cdi, settled = Offered(), Latest(True), Latest(False)
        specs = Specs(ledger, tmp_path / "cdi")
        units = Units(config, ledger, UnitSpecs(ledger, specs, Latest(True)), by_cdi, outside, settled)
        yield Rig(tmp_path, ledger, outside, specs, by_cdi, units, settled, config)


def said(rig: Rig) -> tuple[frozenset[tuple[str, str]], str | None]:
    return rig.outside.renumbered, rig.outside.renumbered_text


def paths(*named: str) -> api_pb2.ContainerAllocateResponse:
    return api_pb2.ContainerAllocateResponse(devices=[api_pb2.DeviceSpec(host_path=path) for path in named])


def test_a_container_that_would_get_another_adapter_is_told_of_and_its_units_withheld(rig: Rig) -> None:
    answer = paths(f"{VERBS}1", "/dev/infiniband/rdma_cm")
    rig.note(("uid-a", HCA.name, [SHARE], answer), ("uid-b", HCA.name, [OTHER], paths(f"{VERBS}2")))
    rig.ledger.grant(granted(HCA.name, {SHARE: "0000:22:00.0", OTHER: "0000:32:00.0"}))
    rig.heal()
    assert said(rig) == (frozenset(), None)
    rig.outside.snapshot = permuted(node())
    rig.heal(HeldUnit(PodRef("default", "a"), HCA.name, SHARE, "main"))
    assert rig.outside.renumbered == {(HCA.name, SHARE), (HCA.name, OTHER)}
    assert rig.outside.renumbered_text is not None
    assert (
        f"container main of pod default/a has {SHARE} of rdma/hca, and would find {VERBS}1 there, which is a file of"
        " 0000:12:00.0 by now: recreate the pod"
    ) in rig.outside.renumbered_text
    assert "of pod with UID uid-b has" in rig.outside.renumbered_text
    rig.note()  # kubelet has forgotten both pods
    rig.heal()
    assert said(rig) == (frozenset(), None)


def test_units_of_containers_that_are_no_more_are_offered_though_kubelet_still_notes_them(rig: Rig) -> None:
    rig.outside.snapshot = permuted(node())
    rig.note(("uid-a", HCA.name, [SHARE], paths(f"{VERBS}1")), ("uid-b", HCA.name, [OTHER], paths(f"{VERBS}2")))
    rig.heal()
    assert rig.outside.renumbered == {(HCA.name, SHARE), (HCA.name, OTHER)}  # the books may be new
    rig.settled.set(True)
    rig.heal(HeldUnit(PodRef("default", "a"), HCA.name, SHARE, "main"))
    assert rig.outside.renumbered == {(HCA.name, SHARE)}
    rig.ledger.grant(granted(HCA.name, {OTHER: "0000:32:00.0"}))
    rig.heal()
    assert rig.outside.renumbered == {(HCA.name, OTHER)}
    rig.ledger.release([OTHER])
    running = Sandbox("c1", PodRef("default", "a", "uid-a"), ready=True)
    rig.units.heal(View(held_units=(), sandboxes=[running]))  # PodResources tells of no init container
    assert rig.outside.renumbered == {(HCA.name, SHARE)}
    rig.heal()
    assert said(rig) == (frozenset(), None)


@pytest.mark.parametrize(
    ("resource", "unit", "path", "changes"),
    [
        (VF, "0000:12:00.1", "/dev/vfio/7", {"iommu_group": 9, "driver": "vfio-pci"}),
        (VF, "0000:12:00.1", "/dev/cxi0", {"cxi": "cxi1"}),
        (GPU, "GPU-00000001-1111-2222-3333-444444444444", "/dev/nvidia2", {}),
    ],
)
def test_files_of_vfio_of_slingshot_and_of_gpus_are_compared_too(
    rig: Rig, resource: Resource, unit: str, path: str, changes: dict[str, object]
) -> None:
    rig.outside.snapshot = change(node(), "0000:12:00.1", **changes)
    rig.outside.snapshot = change(rig.outside.snapshot, "0000:22:00.1", driver="vfio-pci", iommu_group=7, cxi="cxi0")
    rig.note(("uid-a", resource.name, [unit], paths(path)), ("uid-b", "other.com/device", ["x"], paths(path)))
    rig.heal()
    assert rig.outside.renumbered == {(resource.name, unit)}


def test_an_answer_of_names_misleads_nobody_whatever_the_numbers(rig: Rig) -> None:
    named = api_pb2.ContainerAllocateResponse(cdi_devices=[api_pb2.CDIDevice(name=f"nodefabric.io/hca={SHARE}")])
    rig.note(("uid-a", HCA.name, [SHARE], named))
    rig.outside.snapshot = permuted(node())
    rig.ledger.grant(granted(HCA.name, {SHARE: "0000:22:00.0"}))  # it came back into lost books
    rig.heal()
    assert rig.outside.renumbered_text is None
    assert "uverbs2" in (rig.folder / f"cdi/nodefabric-unit-{SHARE}.json").read_text()
    assert rig.by_cdi.value


def test_paths_are_answered_where_runtime_or_kubelet_know_no_names(rig: Rig) -> None:
    answered = []
    for said in (False, True):
        rig.outside.resolves_cdi = said
        rig.heal()
        answered.append(rig.by_cdi.value)
    assert answered == [False, True]
    offer = rig.outside.offer()
    unit = offer.find(HCA.name, SHARE)
    assert unit is not None
    rig.specs.grant(granted(HCA.name, {SHARE: unit.device}, unit_specs(HCA, [unit], offer.snapshot)))
    rig.ledger.bind([SHARE], PodRef("default", "a"))
    rig.note(("uid-a", HCA.name, [SHARE], api_pb2.ContainerAllocateResponse()))
    rig.heal()
    assert not rig.by_cdi.value
