"""The agent is gone at each step of each mode: before each call to kernel, PF and books, however many there are."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from agent.hardware.host import Host
from agent.ledger import Ledger
from agent.state import Latest
from cni.attachment import Attachments
from cni.call import Node
from tests.cni import tiny_node
from tests.cni.modes import guids, rdma_node
from tests.cni.modes.guids import GUID
from tests.cni.stand_ins import attachments_of
from tests.cni.tiny_node import PF, PF_NETDEV, Rig, open_rig, vf
from tests.waiting import until

FEWEST_POINTS = {"vf": 20, "nic": 20, "vfio": 10, "infiniband": 40}
"""Each call is a point; were there fewer, the test would look at nothing."""


class Killed(BaseException):
    """The agent is gone: nothing it would do afterwards happens."""


class Doomed:
    """Passes so many calls on, then none any more."""

    def __init__(self, real: Any, life: Life) -> None:
        self._real, self._life = real, life

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name in ("links", "vf_control", "rdma"):
            return Doomed(found, self._life)
        return self._life.counted(found) if callable(found) else found


@dataclass
class Life:
    """How many calls are left."""

    left: int

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **more: Any) -> Any:
            if self.left <= 0:
                raise Killed
            self.left -= 1
            return call(*args, **more)

        return counted


@dataclass(frozen=True)
class Case:
    device: str
    conf: dict[str, Any]
    netdev: str | None


CASES = {
    "vf": Case(
        vf(0),
        {"mac": "02:00:00:00:00:77", "mtu": 1400, "vlan": 100, "trust": "on", "altNames": ["rail0", "rail1"]},
        tiny_node.netdev(0),
    ),
    "nic": Case(PF, {"mode": "nic", "mac": "02:00:00:00:00:78", "altNames": ["rail0"]}, PF_NETDEV),
    "vfio": Case(vf(1), {"vlan": 100, "trust": "on", "functionReset": True}, None),
    "infiniband": Case(vf(0), {"guid": GUID, "link_state": "enable"}, tiny_node.netdev(0)),
}


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def node(own_network: None, tmp_path: Path, case: Case) -> Any:
    """A node whose second VF is for programs, and whose names are in each other's way; or one of InfiniBand."""
    if case is CASES["infiniband"]:
        rdma_node.create(tmp_path, ib=True)
    else:
        create_ethernet(tmp_path)
    with open_rig(tmp_path) as rig:
        yield rig


def create_ethernet(tmp_path: Path) -> None:
    tiny_node.create(tmp_path)
    folder = tmp_path / "root/sys/bus/pci/devices" / vf(1)
    tiny_node.bind_to_vfio(tmp_path, 1)
    (folder / "reset_method").write_text("flr\n")
    (folder / "reset").write_text("")
    for netdev in (tiny_node.netdev(0), PF_NETDEV):
        subprocess.run(["ip", "link", "property", "add", "dev", netdev, "altname", f"long-{netdev}"], check=True)
    for words in ("up", "txqueuelen 99"):
        subprocess.run(["ip", "link", "set", PF_NETDEV, *words.split()], check=True)
    subprocess.run(["ip", "address", "add", "192.0.2.5/24", "dev", PF_NETDEV], check=True)
    subprocess.run(["ip", "route", "add", "198.51.100.0/24", "via", "192.0.2.1"], check=True)


def state(rig: Rig, case: Case) -> tuple[Any, ...]:
    """All that the case may change about the host."""
    if case is CASES["infiniband"]:
        return guids.state(rig), {found.name for found in rig.machine.rdma.devices()}
    link = rig.machine.links.find(case.netdev) if case.netdev is not None else None
    names = set(link.altnames) if link is not None else None
    return (
        replace(link, ifindex=0, carrier=False, altnames=()) if link is not None else None,
        names,
        [rig.settings(index) for index in range(3)],
        set(rig.machine.links.addresses(PF_NETDEV, None)),
        {route for route in rig.machine.links.routes(None, PF_NETDEV) if route.gateway is not None},
    )


def doomed(rig: Rig, calls: int) -> Attachments:
    """What attaches, in an agent that has so many calls left."""
    life, snapshot = Life(calls), rig.machine.scan()
    host, ledger = cast(Host, Doomed(rig.machine, life)), cast(Ledger, Doomed(rig.ledger, life))
    return attachments_of(Node(host, ledger, Latest(snapshot)))


def add_until(rig: Rig, pod: Path, case: Case, calls: int) -> bool:
    """ADD, in an agent that ends after so many calls. Tell whether it was done before."""
    attachments = doomed(rig, calls)
    try:
        with rig.call("c1", pod, {"deviceID": case.device, **case.conf}) as call:
            attachments.add(call)
    except Killed:
        return False
    return True


def undo_until(rig: Rig, pod: Path, calls: int) -> bool:
    """Bring the device back, in an agent that ends after so many calls. Tell whether it was back before."""
    attachments = doomed(rig, calls)
    [row] = rig.ledger.attachments()
    rig.ledger.begin_detach([row.attachment_id])
    try:
        with open(pod) as netns:
            attachments.detacher.undo(row, netns.fileno())
    except Killed:
        return False
    return True


def test_an_agent_that_ends_at_any_step_loses_nothing(node: Rig, case: Case) -> None:
    points = 0
    before, pod = state(node, case), node.pod()
    node.run_in(pod, "ip", "link", "add", f"long-{case.netdev}", "type", "bridge")  # an altname that is taken there
    inside = node.run_in(pod, "ip", "-br", "link")

    done, calls = False, 0
    while not done:
        done = add_until(node, pod, case, calls)
        if not done:
            points, calls = points + 1, calls + 1
            until(lambda: node.attachments.heal(case.device) is not None or node.ledger.attachments() == ())
        else:
            node.detach("c1", pod)
        assert (state(node, case), node.ledger.attachments(), node.ledger.quarantines()) == (before, (), ())
        assert node.run_in(pod, "ip", "-br", "link") == inside

    done, calls = False, 0
    while not done:
        with node.call("c1", pod, {"deviceID": case.device, **case.conf}) as call:
            node.attachments.add(call)
        done = undo_until(node, pod, calls)
        points, calls = points + 1, calls + 1
        until(lambda: node.attachments.heal(case.device) is not None or node.ledger.attachments() == ())
        assert (state(node, case), node.ledger.attachments(), node.ledger.quarantines()) == (before, (), ())
    name = next(name for name, one in CASES.items() if one is case)
    print(f"{name}: {points} points tried")
    assert points >= FEWEST_POINTS[name]
