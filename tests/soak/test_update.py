"""Updates from the last version whose books kept units, slots and claims in tables of their own, and the way back."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from measure import former

from agent.ledger.schema import SCHEMA_VERSION
from hack.sim.demo import not_back, still_attached
from hack.sim.scheduler import claim, create, devices, kubelet_options, start_api_server
from hack.sim.stage import Stage, settled, wait
from tests.e2e.conftest import stage
from tests.versions import BEFORE_HOLDS

__all__ = ["stage"]
WAYS: Mapping[str, Mapping[str, Any]] = {
    "rdma/unit": {"binding": "early"},
    "rdma/slot": {"binding": "late"},
    "rdma/claim": {"offer": "dra"},
}
"""The resources, one for each way to a device: each has two VFs."""


@pytest.fixture(scope="module")
def version_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That version's code, for the packages of this one."""
    try:
        return former.unpack(BEFORE_HOLDS, tmp_path_factory.mktemp("former"))
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode().strip()
        pytest.skip(f"updates from {BEFORE_HOLDS} are not played: this clone does not have that commit ({said})")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_pods_of_each_way_keep_their_devices_through_an_update_and_give_them_back(
    stage: Stage, version_before: Path, number: signal.Signals
) -> None:
    machine = stage.build_node("h100-8gpu")
    before = machine.links.by_device()
    vfs = [device.address for device in machine.scan().devices if device.is_vf]
    resources = [
        {"name": name, "kind": "vf", "select": {"pciAddresses": vfs[2 * n : 2 * n + 2]}, "network": "rails", **way}
        for n, (name, way) in enumerate(WAYS.items())
    ]
    stage.write_config({"resources": resources})
    port = start_api_server(stage)
    stage.start_kubelet(*kubelet_options(port))
    options = "--kubeconfig", str(stage.folder / "kubeconfig")

    stage.code = version_before
    stage.start_agent(*options)
    stage.await_ready()
    claimed, _ = wait("the slices", lambda: [device["name"] for device in devices(port)] or None)
    stage.run_pod("unit", {"rdma/unit": 1})
    stage.run_pod("slot", {"rdma/slot": 1})
    begin_with_claim(stage, port, "claim", claimed)
    stage.await_pod("claim")
    held = attached(stage)
    assert held.keys() == {"default/unit", "default/slot", "default/claim"}
    stage.end("agent", number)

    stage.code = None
    stage.start_agent(*options)
    stage.await_ready()
    assert attached(stage) == held
    stage.run_pod("other-unit", {"rdma/unit": 1})
    stage.run_pod("other-slot", {"rdma/slot": 1})
    begin_with_claim(stage, port, "other-claim", claimed)
    refusal = re.compile(f"{held['default/claim']} is not free: .*default/of-claim.*must end first")
    wait("the refusal", lambda: refusal.search(stage.log("kubelet")))
    now = attached(stage)
    assert held.items() < now.items()
    assert sorted(now.values()) == sorted([*vfs[:4], held["default/claim"]])

    stage.end_pods("unit", "slot", "claim", "other-unit", "other-slot")
    stage.await_pod("other-claim")
    assert attached(stage) == {"default/other-claim": held["default/claim"]}
    stage.end_pods("other-claim")
    assert settled(lambda: [*not_back(machine, before), *still_attached(stage), *stage.status()["grants"]]) == []

    stage.end("agent")
    stage.code = version_before
    stage.start_agent(*options)
    ledger = stage.folder / "state/ledger.db"
    newer = f"{ledger} was written by a newer nodefabric (format {SCHEMA_VERSION}, this one knows 9): install that"
    wait("the former agent's refusal", lambda: newer in stage.log("agent") or None)


def attached(stage: Stage) -> dict[str, str]:
    """Return the device that each pod has."""
    return {row["pod"]: row["device"] for row in stage.status()["attachments"]}


def begin_with_claim(stage: Stage, port: int, name: str, device: str) -> None:
    """Create a pod that has a claim to a device, and do not wait for it."""
    pod = {"name": name, "uid": f"uid-of-{name}"}
    claim(port, f"of-{name}", pod, {"request": "nic", "device": device})
    create(stage, pod, [f"of-{name}"])
