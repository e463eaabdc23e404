"""The facts of a node, read from the parts that know; the document of them is made once for each state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest

from agent.errors import LedgerError
from agent.hardware.host import Host
from agent.kubelet.podresources import (
    ContainerDevices,
    DeviceAssignment,
    Listing,
    PodDevices,
)
from agent.model.allocation import PodRef
from agent.model.counters import Counters
from agent.model.device import Snapshot
from agent.model.health import HEALTHY, unhealthy
from agent.offer.offer import Unit
from tests.agent.report.reported_node import ReportedNode
from tests.node import POD, VF, attach, granted, open_books, owner


def offered(reason: str = "") -> Unit:
    """Make one unit of rdma/vf."""
    return Unit(VF, "rdma/vf", "vf", VF, unhealthy(reason) if reason else HEALTHY, 0)


def test_each_kind_of_change_shows_in_the_next_answer(tmp_path: Path, node_snapshot: Callable[[str], Snapshot]) -> None:
    snapshot = node_snapshot("one-nic")
    with open_books(tmp_path) as books:
        node = ReportedNode(snapshot, {"rdma/vf": (offered(),)}, {"rdma/vf": "vf"}, books)
        overview = node.overview
        tags = [overview.served().tag]

        def changed() -> bool:
            tags.append(overview.served().tag)
            return tags[-1] != tags[-2]

        assert not changed()
        books.grant(granted("rdma/vf", {VF: VF}))
        assert changed()
        row = attach(books, VF, owner())
        assert changed()
        books.finish_attach([row.attachment_id], {})
        assert changed()
        books.bind([VF], POD)
        assert changed()
        books.quarantine(VF, "stuck")
        assert changed()
        node.units = {"rdma/vf": (offered("LinkDown"),)}
        assert changed()
        overview.conditions.set("ledger", "disk full")
        assert changed()
        overview.events.reconciled("detach", "owner-gone")
        assert changed()
        node.snapshot = replace(snapshot, devices=(), generation=2)
        assert changed()
        assert not changed()


OTHER = "0000:3b:00.3"


KINDS = {"rdma/vf": "vf", "nvidia.com/gpu": "gpu"}


def test_before_the_books_are_open_hardware_and_conditions_are_told() -> None:
    found = ReportedNode(Snapshot(generation=3), {}, KINDS, None).facts.read()
    assert found.snapshot.generation == 3
    assert set(found.conditions) == {"starting", "kubelet"}
    assert found.holds == ()


def test_containers_are_those_of_kubelets_newest_answer(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        node = ReportedNode(Snapshot(), {}, KINDS, books)
        books.grant(granted("rdma/vf", {VF: VF}))
        assert node.facts.read().containers == {}
        pod = PodDevices(PodRef("a", "p"), (ContainerDevices("main", (DeviceAssignment("rdma/vf", (VF,)),)),))
        node.kubelet.newest.set(Listing(1.0, (pod,)))
        found = node.facts.read()
        assert found.containers == {VF: "main"}
        assert [hold.key for hold in found.holds] == [VF]


def test_each_offered_resource_has_a_kind_also_one_of_slices_that_are_gone() -> None:
    vf = Unit(VF, "rdma/vf", "vf", VF, HEALTHY, 0)
    left = Unit(OTHER, "rdma/former", "nic", OTHER, HEALTHY, 0)
    units = {"rdma/vf": (vf,), "nvidia.com/mig-1g.10gb": (), "rdma/former": (left,)}
    node = ReportedNode(Snapshot(), units, KINDS, None)
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
        node = ReportedNode(Snapshot(), {}, KINDS, books)
        books.grant(granted("rdma/vf", {OTHER: OTHER}))
        attach(books, VF, owner())
        node.facts.counters(host)
        monkeypatch.setattr(books, "_read", Mock(side_effect=LedgerError("input/output error")))
        with pytest.raises(LedgerError):
            node.facts.read()
        node.facts.counters(host)
        node.books.set(None)
        node.facts.counters(host)
    assert asked == [{VF, OTHER}, {VF, OTHER}, frozenset()]
