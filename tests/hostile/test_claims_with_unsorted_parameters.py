"""Clients other than kubectl make claims whose parameters' keys are not sorted: their status is written too."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from agent.cluster.apiserver import ApiServer
from agent.model.allocation import ClaimRef
from hack.sim.cluster.apiserver import ApiServerStandIn
from hack.sim.cluster.dra.rights import Caller
from tests.agent.cluster.conftest import api, open_api, server
from tests.agent.cluster.test_claim_status import ATTACHED, DEVICE, QUICK, Writing
from tests.awaiting import until
from tests.sim.cluster.dra_documents import allocated

__all__ = ["api", "open_api", "server"]

UNSORTED = {
    "network": {"mtu": 9000, "addresses": ["192.0.2.7/24"]},
    "apiVersion": "nodefabric.io/v1",
    "about": "x" * 3000,
}
OTHERS = {"driver": "gpu.example.com", "pool": "n", "device": "gpu-0", "data": {"z": 1, "a": 2}}
CALLER = Caller(frozenset(("driver", f"arbitrary-node:{verb}", "nodefabric.io") for verb in ("patch", "update")))


def put(server: ApiServerStandIn, name: str = "c", *devices: dict[str, Any]) -> ClaimRef:
    """Have a claim at the server as a client that does not sort keys has made it."""
    document = allocated(
        DEVICE, {**DEVICE, "driver": "gpu.example.com", "device": "gpu-0"}, ref=ClaimRef("", "ns", name)
    )
    opaque = {"driver": "nodefabric.io", "parameters": UNSORTED}
    document["status"]["allocation"]["devices"]["config"] = [{"source": "FromClaim", "opaque": opaque}]
    document["status"]["devices"] = list(devices)
    stored = server.state.write("ResourceClaim", f"ns/{name}", document, "kube-scheduler")
    return ClaimRef(stored["metadata"]["uid"], "ns", name)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["compact", "with blanks, as Python's"])
async def test_the_status_of_such_a_claim_is_written(
    server: ApiServerStandIn, api: ApiServer, separators: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    ref = put(server, "c", OTHERS)
    server.state.separators, server.state.caller = separators, CALLER
    before = server.state.get("ResourceClaim", "ns/c")

    writing = Writing(server, api)
    async with writing:
        writing.writer.attached(ref, ATTACHED)
        await until(lambda: len(writing.devices()) == 2)
    after = server.state.get("ResourceClaim", "ns/c")
    assert before is not None
    assert after is not None
    assert json.dumps(after["status"]["allocation"]) == json.dumps(before["status"]["allocation"])
    assert after["status"]["reservedFor"] == before["status"]["reservedFor"]
    others, ours = writing.devices()
    assert others == OTHERS, "what other drivers say stays"
    assert ours == ATTACHED
    assert "claim-status" not in writing.conditions.found
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


async def test_a_claim_that_others_change_at_the_same_time_is_read_again(
    server: ApiServerStandIn, api: ApiServer
) -> None:
    ref = put(server)
    calls: list[None] = []

    def change() -> None:
        calls.append(None)
        if len(calls) == 3:  # a patch, a GET, and before the PUT
            found = server.state.get("ResourceClaim", "ns/c")
            assert found is not None
            pods = [{"resource": "pods", "name": "other", "uid": "other"}, *found["status"]["reservedFor"]]
            server.state.write(
                "ResourceClaim", "ns/c", {**found, "status": {**found["status"], "reservedFor": pods}}, "x"
            )

    server.state.before = change

    async with Writing(server, api) as writing:
        writing.writer.attached(ref, ATTACHED)
        await until(writing.devices)
    assert server.state.counts.conflicts == 1
    found = server.state.get("ResourceClaim", "ns/c")
    assert found is not None
    assert [pod["name"] for pod in found["status"]["reservedFor"]] == ["other", "pod"]


async def test_where_that_is_refused_too_it_is_shown_once_and_tried_rarely(
    server: ApiServerStandIn, api: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    refs = [put(server, name) for name in ("c", "d")]
    server.state.separators = (" ,", " :")  # as nobody writes it

    async with Writing(server, api, retry=replace(QUICK, longest=600.0)) as writing:
        for ref in refs:
            writing.writer.attached(ref, ATTACHED)
        await until(lambda: writing.refusals("Refused") == 2)
        for number in range(5):
            for ref in refs:
                writing.writer.attached(ref, {**ATTACHED, "data": {"network": f"net{number}"}})
        await asyncio.sleep(1.0)
        assert writing.refusals("Refused") == 2
        assert "ns/c" in writing.conditions.found["claim-status"]
        assert "immutable" in writing.conditions.found["claim-status"]
        for ref in refs:
            writing.writer.forget(ref.uid)
        assert "claim-status" not in writing.conditions.found
    said = [record for record in caplog.records if record.name == "agent.cluster.claim_objects"]
    assert len(said) == 2, "once for each claim"
