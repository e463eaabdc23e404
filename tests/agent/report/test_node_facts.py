"""The facts of a node, read from the parts that know."""

from __future__ import annotations

from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest

from agent.config import Config, Resource
from agent.errors import LedgerError
from agent.hardware.host import Host
from agent.inventory import Inventory
from agent.kubelet.podresources import (
    ContainerDevices,
    DeviceAssignment,
    Listing,
    PodDevices,
    PodResources,
)
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.model.counters import Counters
from agent.model.device import Snapshot
from agent.model.health import HEALTHY
from agent.offer.offer import Offer, Unit
from agent.report.overview import NodeFacts
from agent.state import Latest
from tests.node import VF, attach, granted, new_report, open_books, owner

OTHER = "0000:3b:00.3"


class Node:
    """What facts are read from."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        resources = (Resource("rdma/vf", "vf"), Resource("nvidia.com/gpu", "gpu", mig="mixed"))
        self.inventory = Inventory(cast(Host, None))
        self.offer = Latest(Offer())
        self.ledger = Latest(ledger)
        self.kubelet = PodResources(Path("/nowhere"))
        self.facts = NodeFacts(
            Latest(Config(resources=resources)),
            self.inventory,
            self.offer,
            self.ledger,
            self.kubelet,
            new_report(),
        )


def test_before_the_books_are_open_hardware_and_conditions_are_told() -> None:
    node = Node()
    node.inventory.snapshot.set(Snapshot(generation=3))
    found = node.facts.read()
    assert found.snapshot.generation == 3
    assert set(found.conditions) == {"starting", "kubelet"}
    assert found.holds == ()


def test_containers_are_those_of_kubelets_newest_answer(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        node = Node(books)
        books.grant(granted("rdma/vf", {VF: VF}))
        assert node.facts.read().containers == {}
        pod = PodDevices(PodRef("a", "p"), (ContainerDevices("main", (DeviceAssignment("rdma/vf", (VF,)),)),))
        node.kubelet.newest.set(Listing(1.0, (pod,)))
        found = node.facts.read()
        assert found.containers == {VF: "main"}
        assert [hold.key for hold in found.holds] == [VF]


def test_each_offered_resource_has_a_kind_also_one_of_slices_that_are_gone() -> None:
    node = Node()
    vf = Unit(VF, "rdma/vf", "vf", VF, HEALTHY, 0)
    left = Unit(OTHER, "rdma/former", "nic", OTHER, HEALTHY, 0)
    node.offer.set(Offer(Snapshot(), {"rdma/vf": (vf,), "nvidia.com/mig-1g.10gb": (), "rdma/former": (left,)}))
    assert node.facts.kinds() == {"rdma/vf": "vf", "nvidia.com/mig-1g.10gb": "gpu", "rdma/former": "nic"}


def test_counters_are_read_with_what_was_granted_and_what_is_in_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[frozenset[str]] = []

    class Counting:
        def counters(self, snapshot: Snapshot, held: frozenset[str]) -> Counters:
            asked.append(held)
            return Counters()

    host = cast(Host, Counting())
    with open_books(tmp_path) as books:
        node = Node(books)
        books.grant(granted("rdma/vf", {OTHER: OTHER}))
        attach(books, VF, owner())
        node.facts.counters(host)
        monkeypatch.setattr(books, "_read", Mock(side_effect=LedgerError("input/output error")))
        with pytest.raises(LedgerError):
            node.facts.read()
        node.facts.counters(host)
        node.ledger.set(None)
        node.facts.counters(host)
    assert asked == [{VF, OTHER}, {VF, OTHER}, frozenset()]
