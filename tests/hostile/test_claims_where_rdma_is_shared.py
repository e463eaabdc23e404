"""Where all network namespaces share the RDMA devices, as the kernel has it by default, no ADD moves one into a pod.

The claim's status names the device all the same: it is the one whose verbs files the containers have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.ledger import Ledger
from agent.model.allocation import Claim, ClaimRef, ClaimState, Undo
from agent.model.device import RdmaDevice
from agent.offer.units import plain_offer
from hack.sim.cluster.apiserver import ApiServerStandIn
from tests.awaiting import until
from tests.deviceplugin.dra.test_driver import OFFERED, Node
from tests.node import POD, attach, change, claimed, open_books
from tests.node import node as machine
from tests.sim.cluster.dra_documents import allocated
from tests.sim.cluster.dra_documents import claim as claim_document
from tests.sim.cluster.test_apiserver import call

VF = "0000:12:00.1"
HAS = RdmaDevice("mlx5_8", "CA", "02:00", "", (), ())
OURS = {"driver": "nodefabric.io", "pool": "node-1", "device": "vf-1"}
RESULT = {"interfaces": [{"name": "net1", "mac": "02:00:00:00:00:01", "sandbox": "/ns"}]}


def in_a_pod(ledger: Ledger, uid: str, undo: Undo) -> None:
    """Have the books know a claim whose device an ADD has brought into its pod."""
    device = claimed("nic", "node-1", "vf-1", "rdma/vf", "vf", VF, f"{uid}-0-vf-1")
    ledger.prepare_claim(Claim(ClaimRef(uid, "ns", "c"), ClaimState.PREPARING, (device,), (POD,)))
    ledger.set_claim_state(uid, ClaimState.PREPARED)
    row = attach(ledger, VF, undo=undo, claim_uid=uid)
    ledger.finish_attach([row.attachment_id], RESULT)


async def status_data(folder: Path, undo: Undo, *, exclusive: bool) -> Mapping[str, Any]:
    """Run the agent's part, and return `data` of the device as the API server has it.

    The node is scanned when the driver runs already, as after a start of the agent while the pod is there.
    """
    snapshot = replace(change(machine(), VF, rdma_devices=(HAS,)), rdma_exclusive=exclusive)
    with open_books(folder) as ledger, ApiServerStandIn() as server:
        server.state.add_node("node-1")
        path = "/apis/resource.k8s.io/v1/namespaces/ns/resourceclaims"
        made = call(server.port, "POST", path, claim_document())[1]
        status = allocated(OURS, node="node-1", pods=[POD])["status"]
        assert call(server.port, "PUT", f"{path}/c/status", {**made, "status": status})[0] == 200
        in_a_pod(ledger, made["metadata"]["uid"], undo)
        node = Node(folder, ledger)
        node.server = server
        node.config.set(node.configured(*OFFERED))

        def told() -> Any:
            return (call(server.port, "GET", f"{path}/c")[1]["status"].get("devices") or [{}])[0].get("data")

        async with node.running() as dra:
            await dra.served()
            node.offer.set(plain_offer(OFFERED, snapshot))
            await until(told)
        return dict(told())


STAYS = Undo("ens1f0v0", "02:00:00:00:01:00", 1500, False)


@pytest.mark.parametrize(
    ("came_along", "exclusive", "named"),
    [("", False, {"rdmaDevice": "mlx5_8"}), ("mlx5_21", True, {"rdmaDevice": "mlx5_21"}), ("", True, {})],
    ids=["shared with the host", "in the pod, named as the host calls it", "in the host alone"],
)
def test_a_claims_status_names_the_rdma_device_that_its_pod_can_use(
    short_folder: Path, came_along: str, exclusive: bool, named: Mapping[str, str]
) -> None:
    data = asyncio.run(status_data(short_folder, replace(STAYS, rdma=came_along), exclusive=exclusive))
    assert data == {"pciAddress": VF, **named}
