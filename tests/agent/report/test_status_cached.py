"""The status document is made once for each state of the node, however many ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

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
