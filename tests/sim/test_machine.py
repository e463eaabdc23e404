"""The simulated node: a recorded sysfs on real kernel links."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.hardware.host import LinkChange
from hack.sim.machine import SimulatedMachine
from tests.cni.tiny_node import create, mac_of, netdev, vf
from tests.waiting import until


@pytest.fixture
def machine(own_network: None, tmp_path: Path) -> Iterator[SimulatedMachine]:
    create(tmp_path)
    made = SimulatedMachine.open(tmp_path)
    yield made
    made.close()


def make_pod(folder: Path, name: str = "pod") -> Path:
    path = folder / name
    path.touch()
    subprocess.run(["unshare", f"--net={path}", "true"], check=True)
    return path


def move_in(machine: SimulatedMachine, pod: Path, index: int = 0) -> None:
    link = machine.find_netdev(vf(index))
    assert link is not None
    with open(pod) as file:
        machine.links.move_in(link, file.fileno(), LinkChange(name=f"net{index}", up=True))


def destroy(pod: Path) -> None:
    subprocess.run(["umount", "--lazy", pod], check=True)


def test_an_interface_that_dies_with_a_pod_comes_back_under_another_name(
    machine: SimulatedMachine, tmp_path: Path
) -> None:
    """As a VF's does: the kernel moves it to the host, and its name may be taken there."""
    pod = make_pod(tmp_path)
    move_in(machine, pod)
    destroy(pod)
    until(lambda: machine.find_netdev(vf(0)) is not None)
    link = machine.find_netdev(vf(0))
    assert link is not None
    assert link.name != netdev(0)
    assert (link.mac, link.device) == (mac_of(0), vf(0))
    assert machine.scan().by_address[vf(0)].netdev is not None
