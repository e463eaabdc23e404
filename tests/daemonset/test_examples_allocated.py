"""The examples with claims as the scheduler meets them: what it gives to them on the node of their configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent import config
from deviceplugin.dra.devices import DraDevice
from hack.sim.cluster.allocator import Node, extended_claim
from hack.sim.cluster.claims_for_pairs import AMD, GPU_CLASS, NIC_DRIVER, PCI_BUS_ID, classes, gpu_slice
from tests.daemonset.manifests import Document, Kube, documents
from tests.daemonset.test_examples import EXAMPLES
from tests.daemonset.test_examples_dra import BY_CLAIM, CONFIG, templates
from tests.deviceplugin.dra.nodes import NODE, Offered, recorded_node

RECORDED = "h100-8gpu"
OF_AMD = "dra-rails-amd"
GPUS = 8


class Scheduler:
    """A node with eight GPUs and the configuration of the examples, and the classes of a cluster."""

    def __init__(self, of_chart: Mapping[str, Document], recorded: str = RECORDED) -> None:
        snapshot = recorded_node(recorded)
        parsed = config.parse(CONFIG.read_text(), CONFIG.name)
        offered = Offered(snapshot, parsed.resources, parsed.dra)
        self.devices: dict[str, DraDevice] = {device.name: device for device in offered.devices}
        self.gpus = {f"gpu-{gpu.index}": gpu.pci_address for gpu in snapshot.all_gpus}
        self.classes = {**of_chart, **{name: classes("")[name] for name in (GPU_CLASS, AMD)}}
        self._node = Node(NODE, [*offered.slices, gpu_slice(snapshot, NODE)], self.classes)
        self._pods = 0

    def place(self, example: str) -> Mapping[str, Sequence[Mapping[str, Any]]] | None:
        """Allocate what a pod of an example claims, by the base of the request; None if it does not fit."""
        ((_, asked),) = templates(EXAMPLES / f"{example}.yaml").items()
        return self.place_claim({"spec": {"devices": asked}})

    def place_claim(self, claim: Mapping[str, Any]) -> Mapping[str, Sequence[Mapping[str, Any]]] | None:
        self._pods += 1
        found = self._node.allocate({f"claim-{self._pods}": claim})
        if found is None:
            return None
        (results,) = found.values()
        by_request: dict[str, list[Mapping[str, Any]]] = {}
        for result in results:
            by_request.setdefault(str(result["request"]).partition("/")[0], []).append(result)
        return by_request

    def gpu(self, result: Mapping[str, Any]) -> Any:
        """Tell which GPU a result is, or stands next to."""
        if result["driver"] != NIC_DRIVER:
            return self.gpus[result["device"]]
        return self.devices[result["device"]].attributes[PCI_BUS_ID]["string"]


@pytest.fixture
def of_chart(kube: Kube) -> Mapping[str, Document]:
    found = kube.template({"config": yaml.safe_load(CONFIG.read_text())})
    return {d["metadata"]["name"]: d for d in found if d["kind"] == "DeviceClass"}


@pytest.fixture
def scheduler(of_chart: Mapping[str, Document]) -> Scheduler:
    return Scheduler(of_chart)


@pytest.mark.parametrize("path", BY_CLAIM, ids=lambda p: p.name)
def test_a_pod_of_each_example_is_placed(of_chart: Mapping[str, Document], path: Path) -> None:
    assert Scheduler(of_chart, "mi300x-8gpu" if path.stem == OF_AMD else RECORDED).place(path.stem)


@pytest.mark.parametrize(
    ("example", "recorded"),
    [("dra-rails", RECORDED), (OF_AMD, "mi300x-8gpu"), (OF_AMD, "mi250-8gpu")],
)
def test_each_rail_is_a_gpu_and_what_stands_next_to_it(
    of_chart: Mapping[str, Document], example: str, recorded: str
) -> None:
    scheduler = Scheduler(of_chart, recorded)
    for _ in range(GPUS // 2):
        found = scheduler.place(example)
        assert found is not None
        pairs = [[scheduler.gpu(one) for (one,) in (found[f"gpu-{n}"], found[f"nic-{n}"])] for n in range(2)]
        assert all(gpu == near for gpu, near in pairs)
        assert pairs[0] != pairs[1]
    assert scheduler.place(example) is None


def test_what_is_preferred_is_had_as_long_as_it_is_there(scheduler: Scheduler) -> None:
    for _ in range(GPUS):
        found = scheduler.place("dra-preferred")
        assert found is not None
        ((nic,), (gpu,)) = found["nic-0"], found["gpu-0"]
        assert nic["request"] == "nic-0/near"
        assert scheduler.gpu(nic) == scheduler.gpu(gpu)


def test_another_adapter_will_do_where_the_near_one_has_none_left(scheduler: Scheduler) -> None:
    first = {"requests": [{"name": "nic", "exactly": {"deviceClassName": "rdma-vf"}}]}
    for _ in range(8):  # takes the place of the first GPU whole
        assert scheduler.place_claim({"spec": {"devices": first}}) is not None
    requests = {str(found["nic-0"][0]["request"]) for found in map(scheduler.place, ["dra-preferred"] * GPUS) if found}
    assert requests == {"nic-0/near", "nic-0/any"}


def test_a_pod_takes_the_whole_node_and_leaves_no_gpu_to_a_second(scheduler: Scheduler) -> None:
    found = scheduler.place("pytorch-dra")
    assert found is not None
    for request in ("gpus", "nics"):
        assert sorted(map(scheduler.gpu, found[request])) == sorted(scheduler.gpus.values())
    assert scheduler.place("pytorch-dra") is None


def test_shares_are_taken_from_one_adapter(scheduler: Scheduler) -> None:
    found = scheduler.place("dra-shares")
    assert found is not None
    ((result,),) = found.values()
    assert result["consumedCapacity"] == {"nodefabric.io/shares": "2"}


def test_for_an_unchanged_pod_the_scheduler_makes_the_claim(scheduler: Scheduler) -> None:
    (pod,) = documents(EXAMPLES / "dra-unchanged.yaml")
    claim = extended_claim(pod, scheduler.classes)
    assert claim is not None
    found = scheduler.place_claim(claim)
    assert found is not None
    ((one, other),) = found.values()
    assert one["device"] != other["device"]
    assert {scheduler.devices[each["device"]].resource_name for each in (one, other)} == {"rdma/vf"}
