"""The spec of a rail with several NICs, as each of them gets other character devices on its way into a pod."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from agent.edits.unit_specs import UnitSpecs
from agent.hardware.host import Host
from agent.model.allocation import Undo, UnitSpec
from agent.model.device import Snapshot
from agent.state import Latest
from cni.add_facts import FactsWriter
from cni.node import Node
from tests.agent.books import open_books, owner

RAIL, NICS = "rail-GPU-1", ("0000:3b:00.0", "0000:3c:00.0")


class Devices:
    """RDMA devices in pods, whose verbs nodes are numbered as a test says."""

    def __init__(self, **numbers: int) -> None:
        self.numbers = numbers

    def devices(self, netns: int) -> list[Any]:
        return [SimpleNamespace(name=name, index=int(name[-1]), node_guid="") for name in self.numbers]

    def char_device(self, found: Any, kind: str, port: int | None, netns: int | None) -> Any:
        return SimpleNamespace(name=f"{kind}{self.numbers[found.name]}")


def test_only_the_files_of_the_nic_that_has_others_change_in_the_spec(tmp_path: Path) -> None:
    common = {"path": "/dev/infiniband/rdma_cm"}
    spec = UnitSpec("rail", (RAIL,), {"env": []})
    for number, nic in enumerate(NICS):
        spec = spec.with_nodes(nic, [{"path": f"/dev/infiniband/uverbs{number}"}, common])
    with open_books(tmp_path) as books:
        specs = UnitSpecs(books, tmp_path / "cdi", Latest(True))
        specs.grant("rdma/rail", {RAIL: NICS}, {RAIL: spec})
        host = cast(Host, SimpleNamespace(rdma=Devices(mlx5_0=8, mlx5_1=9)))
        node = Node(host, books, Latest(Snapshot()))
        facts = FactsWriter(node, cast(Any, None), cast(Any, None), specs, cast(Any, None))
        for number in (1, 0):
            row = books.begin_attach(
                owner(cni_ifname=f"net{number}"),
                ifname=f"net{number}",
                device=NICS[number],
                resource_name="rdma/rail",
                undo=Undo("x", "02:00:00:00:01:00", 1500, False, rdma=f"mlx5_{number}", extra={"rdma_index": number}),
                netns_path="/nowhere",
                request={},
            )
            facts.entered(row, 0)
            said = books.specs_of(NICS[0])[RAIL].edits["deviceNodes"]
            first = "/dev/infiniband/uverbs8" if number == 0 else "/dev/infiniband/uverbs0"
            expected = [first, "/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs9"]
            assert [node["path"] for node in said] == expected
        assert "uverbs8" in (tmp_path / f"cdi/nodefabric-unit-{RAIL}.json").read_text()
