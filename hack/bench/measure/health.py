"""From a kernel event to kubelet's list: the agent as a process, on the node with 1,024 VFs, over its real sockets.

A PF's link goes and comes in the recorded sysfs, with the event that a kernel would send, sent by this
machine's kernel; time runs until the list with 64 units more or fewer is read from the stream. Links must last
for no time here (`downSeconds: 0`), so the figure is the way of the event alone. A driver that is unbound from
a VF needs no such setting: hard faults are told at once.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hack.sim import uevents
from hack.sim.machine import SimulatedMachine
from hack.sim.stage import Stage
from measure import faults, gpu_errors
from measure.figures import Figures, quantile
from measure.lists import Lists

NODE = "dense-16x64"
VFS_OF_PF = 64
RELAY = Path(__file__).parents[3] / "build/shim/native/nodefabric-cni"
CONFIG: dict[str, Any] = {
    "resources": [
        {"name": "rdma/hca", "kind": "hca", "select": {"vendors": ["15b3"]}},
        {"name": "rdma/vf", "kind": "vf", "select": {"vendors": ["15b3"]}},
    ],
    "health": {"downSeconds": 0, "upSeconds": 0},
}
CHURN_PER_SECOND = 20


def measure(say: Callable[[str], None], events: int = 60, relay: Path = RELAY) -> Figures:
    """Measure on a quiet node, then on one where pods come and go. In a network namespace of its own only."""
    if uevents.is_the_machines_own():
        raise RuntimeError("health is measured in a network namespace of its own: run it under unshare --net --mount")
    with _agent(relay, say) as (stage, machine):
        lists = Lists(stage.folder / "kubelet/device-plugins", "rdma/vf")
        try:
            say(f"health: {events} links go and come, {events} drivers are unbound, on {NODE}")
            links = tuple(faults.links(machine))
            vfs = [device for device in machine.scan().devices if device.is_vf][:: VFS_OF_PF - 1]
            link = faults.sample(lists, links, events)
            driver = faults.sample(lists, [faults.driver(machine, vf) for vf in vfs], events)
            say(f"health: {events} links go and come, while {CHURN_PER_SECOND} VFs a second move into pods or back")
            with _churn(machine):
                churn = faults.sample(lists, links, events)
        finally:
            lists.close()
    return {
        "health_event_to_list_ms": quantile(link, 0.5),
        "health_event_to_list_p99_ms": quantile(link, 0.99),
        "health_driver_to_list_ms": quantile(driver, 0.5),
        "health_driver_to_list_p99_ms": quantile(driver, 0.99),
        "health_event_to_list_churn_ms": quantile(churn, 0.5),
        "health_event_to_list_churn_p99_ms": quantile(churn, 0.99),
        **gpu_errors.measure(say, events, relay),
    }


@contextmanager
def _churn(machine: SimulatedMachine) -> Iterator[None]:
    """Let interfaces of VFs leave the host and come back, as they do with pods."""
    vfs = [device for device in machine.scan().devices if device.is_vf and device.netdev is not None]
    stop = threading.Event()

    def run() -> None:
        chance = random.Random(11)
        away: list[tuple[Path, str]] = []
        while not stop.wait(1 / CHURN_PER_SECOND):
            if len(away) > 16 or (away and chance.random() < 0.5):
                _bring_back(machine, *away.pop(chance.randrange(len(away))))
                continue
            vf = chance.choice(vfs)
            link = machine.root / "sys/class/net" / (vf.netdev.name if vf.netdev is not None else "")
            if link.is_symlink():
                target = os.readlink(link)
                path = uevents.devpath(machine.root, link)
                link.unlink()
                uevents.emit("remove", path, "net")
                away.append((link, target))
        for left in away:
            _bring_back(machine, *left)

    thread = threading.Thread(target=run, name="churn")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _bring_back(machine: SimulatedMachine, link: Path, target: str) -> None:
    link.symlink_to(target)
    uevents.emit("add", uevents.devpath(machine.root, link), "net")


@contextmanager
def _agent(relay: Path, say: Callable[[str], None]) -> Iterator[tuple[Stage, SimulatedMachine]]:
    # In a socket's path are 107 characters: a folder with a short name.
    with tempfile.TemporaryDirectory(prefix="nf-bench-", dir="/var/tmp") as folder:
        stage = Stage(Path(folder), relay)
        try:
            machine = stage.build_node(NODE, with_links=False)
            stage.start_kubelet()
            stage.write_config(CONFIG)
            stage.start_agent()
            stage.await_ready()
            yield stage, machine
        except BaseException:
            say(stage.log_ends())
            raise
        finally:
            stage.close()
