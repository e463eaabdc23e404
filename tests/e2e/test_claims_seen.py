"""What people see of a claim while it comes, is there, fails and goes, from a whole agent."""

from __future__ import annotations

from typing import Any

from hack.sim.scheduler import SLICES, call, claim, create, devices
from hack.sim.stage import Stage, wait
from tests.e2e.test_claims import start

A = {"name": "a", "uid": "11111111-2222-4333-8444-555555555555"}
B = {"name": "b", "uid": "22222222-2222-4333-8444-555555555555"}


def events(stage: Stage) -> list[tuple[str, str, bool]]:
    """List the events about claims, oldest first: which, what, and whether it is a warning."""
    found = [e for e in reversed(stage.status()["events"]) if e["kind"] == "claim"]
    return [(e["subject"], e["text"].partition(":")[0], e["warning"]) for e in found]


def test_a_claim_is_told_by_status_metrics_and_events_until_it_is_gone(stage: Stage) -> None:
    port = start(stage)
    wait("the slices", lambda: devices(port) or None)
    driver = wait("kubelet to have the driver, and all slices to be there", lambda: _registered(stage, port))
    assert (driver["problem"], driver["dropped"]) == (None, [])
    assert sum(found["count"] for found in driver["devices"]) == len(devices(port))
    vf = next(device for device in devices(port) if device["name"].startswith("vf-"))

    claim(port, "nics", A, {"request": "nic", "device": vf["name"]})
    create(stage, A, ["nics"])
    stage.await_pod("a")
    (told,) = stage.status()["claims"]
    assert (told["namespace"], told["name"], told["state"], told["pods"]) == (
        "default",
        "nics",
        "prepared",
        ["default/a"],
    )
    (found,) = told["devices"]
    assert (found["request"], found["name"], found["state"]) == ("nic", vf["name"], "attached")
    lines = stage.fetch("/metrics").splitlines()
    assert 'nodefabric_dra_registered{driver="nodefabric.io"} 1.0' in lines
    assert 'nodefabric_dra_claims{resource="rdma/vf",state="attached"} 1.0' in lines
    assert any(
        line.startswith('nodefabric_rpc_duration_milliseconds_count{operation="NodePrepareResources",outcome="ok"')
        for line in lines
    )

    claim(port, "rival", B, {"request": "nic", "device": vf["name"], "pool": "another-node"})
    create(stage, B, ["rival"])
    refused = wait("the refusal", lambda: next((e for e in events(stage) if e[2]), None))
    assert refused == ("default/rival", "not prepared", True)
    stage.delete_pod("b")
    stage.delete_pod("a")
    stage.await_no_pod("a", "b")
    assert events(stage) == [
        ("default/nics", "prepared for default/a", False),
        ("default/rival", "not prepared", True),
        ("default/nics", "unprepared", False),
    ]
    assert stage.status()["claims"] == []


def _registered(stage: Stage, port: int) -> dict[str, Any] | None:
    driver: dict[str, Any] = stage.status().get("dra") or {}
    published = len(call(port, "GET", SLICES)["items"])
    return driver if driver.get("registered") and driver["slices"] == published else None
