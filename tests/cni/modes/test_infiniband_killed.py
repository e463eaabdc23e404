"""The agent SIGKILLed before each change that ADD and DEL of an InfiniBand VF make: the next one mends all."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from hack.sim.machine import SimulatedMachine
from tests.cni import tiny_node
from tests.cni.killed import Step, kill_at_each_step
from tests.cni.modes import rdma_node
from tests.cni.modes.guids import GUID, state
from tests.cni.modes.stepping import run
from tests.cni.tiny_node import vf
from tests.waiting import until


def left_of_the_last() -> bool:
    """The kernel ends links some time after their namespace."""
    links = subprocess.run(["ip", "-brief", "link"], check=True, capture_output=True, text=True).stdout.split("\n")
    return len([line for line in links if line]) > 1


@pytest.mark.parametrize("verb", ["ADD", "DEL"])
def test_an_agent_killed_at_any_change_loses_nothing(own_network: None, tmp_path: Path, verb: str) -> None:
    befores: list[tuple[Any, ...]] = []
    steps = 0

    def prepare(place: Path) -> None:
        if befores:
            SimulatedMachine.destroy(place.with_name(f"step-{steps - 1}"))
            until(lambda: not left_of_the_last())
        rdma_node.create(place, ib=True)
        with tiny_node.open_rig(place) as rig:
            befores.append(state(rig))
            pod = rig.pod()
            if verb == "DEL":
                rig.add("c1", pod, guid=GUID, link_state="enable")

    def work(step: Step) -> None:
        run(Path.cwd(), step, verb, guid=GUID, link_state="enable")

    for place in kill_at_each_step(tmp_path, work, prepare):
        steps += 1
        with tiny_node.open_rig(place) as rig:
            if rig.ledger.attachment_on(vf(0)) is not None:
                assert rig.attachments.heal(vf(0)) in ("half-attaching", "half-detaching")
            assert rig.ledger.attachments() == ()
            assert rig.ledger.quarantines() == ()
            assert state(rig) == befores[-1]
            pod = place / "pod.netns"
            assert rig.in_pod(pod) is None
            with open(pod) as netns:
                assert rig.machine.rdma.devices(netns.fileno()) == ()
        subprocess.run(["umount", "--lazy", pod], check=True)
    assert steps >= 5
    print(f"{verb}: killed at {steps} points")
