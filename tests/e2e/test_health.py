"""A fault in the hardware, seen where people look: the status, the metrics, the events of the node."""

from __future__ import annotations

import subprocess

import pytest

from hack.sim.machine import SimulatedMachine
from hack.sim.stage import CONFIG, Stage, wait

PF, VFS = "0000:18:00.0", 8
PATIENCE = {"downSeconds": 0.2, "upSeconds": 0.2, "goneSeconds": 3600}


@pytest.fixture
def machine(stage: Stage) -> SimulatedMachine:
    """The 8-GPU node with its agent, which is not patient with links."""
    return stage.play("h100-8gpu", {**CONFIG, "health": PATIENCE})


def shown(stage: Stage, resource: str = "rdma/vf") -> dict[str, int]:
    """Count the unhealthy units by reason, as the status tells; it must agree with the metrics."""
    offered = next(r for r in stage.status()["resources"] if r["name"] == resource)
    found: dict[str, int] = {}
    for unit in offered["unhealthy"]:
        found[unit["reason"]] = found.get(unit["reason"], 0) + 1
    metrics: dict[str, int] = {}
    for line in stage.fetch("/metrics").splitlines():
        labels, _, value = line.partition("} ")
        if labels.startswith("nodefabric_unit_unhealthy{") and f'resource="{resource}"' in labels:
            metrics[labels.split('reason="')[1].split('"')[0]] = int(float(value))
    return found if metrics == found else {"the metrics say something else": len(metrics)}


def is_shown(stage: Stage, wanted: dict[str, int], resource: str = "rdma/vf") -> None:
    wait(f"{resource} to be {wanted or 'healthy'}", lambda: shown(stage, resource) == wanted or None)


def peer(machine: SimulatedMachine, device: str, state: str) -> None:
    """Pull or plug the cable: take the other end of the link down or up."""
    assert machine.fabric is not None
    port = machine.fabric.ports[device].port
    netns = machine.root.parent / "fabric.netns"
    subprocess.run(["nsenter", f"--net={netns}", "ip", "link", "set", port, state], check=True)


def test_a_lost_link_is_shown_with_its_reason_and_so_is_its_return(stage: Stage, machine: SimulatedMachine) -> None:
    state = next((machine.root / "sys/bus/pci/devices" / PF / "infiniband").iterdir()) / "ports/1/state"
    netdev = machine.scan().by_address[PF].netdev
    assert netdev is not None
    subprocess.run(["ip", "link", "set", netdev.name, "up"], check=True)
    state.write_text("1: DOWN\n")
    peer(machine, PF, "down")
    is_shown(stage, {"LinkDown": VFS})
    is_shown(stage, {"PortDown": 63}, "rdma/hca")
    state.write_text("4: ACTIVE\n")
    peer(machine, PF, "up")
    is_shown(stage, {})
    is_shown(stage, {}, "rdma/hca")
