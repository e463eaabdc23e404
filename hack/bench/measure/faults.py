"""Faults of adapters that come and go in a recorded sysfs, each with the event that a kernel would send."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from agent.model.device import PciDevice
from hack.sim import uevents
from hack.sim.machine import SimulatedMachine
from measure.lists import Lists

SETTLE_SECONDS = (0.15, 0.35)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that makes units unhealthy, and its end."""

    begin: Callable[[], None]
    end: Callable[[], None]
    units: int
    """How many become unhealthy by it."""


def sample(lists: Lists, faults: Iterable[Fault], events: int) -> list[float]:
    """Let one fault after the other begin and end, and time each until the list says so; in milliseconds."""
    chance = random.Random(7)
    found: list[float] = []
    for fault in cycle(tuple(faults)):
        for happen, more in ((fault.begin, fault.units), (fault.end, 0)):
            time.sleep(chance.uniform(*SETTLE_SECONDS))
            began = time.perf_counter()
            happen()
            found.append((lists.await_unhealthy(more) - began) * 1000)
        if len(found) >= events:
            break
    return found[:events]


def link(machine: SimulatedMachine, pf: PciDevice, units: int) -> Fault:
    """Take the link of a PF away, and give it back."""
    folder = machine.root / "sys/bus/pci/devices" / pf.address
    assert pf.netdev is not None
    netdev = folder / "net" / pf.netdev.name
    states = [folder / "infiniband" / rdma.name / "ports/1/state" for rdma in pf.rdma_devices[:1]]

    def change(carrier: str, port: str) -> None:
        for state in states:
            state.write_text(f"{port}\n")
        (netdev / "carrier").write_text(f"{carrier}\n")
        uevents.emit("change", uevents.devpath(machine.root, netdev), "net")

    return Fault(lambda: change("0", "1: DOWN"), lambda: change("1", "4: ACTIVE"), units)


def driver(machine: SimulatedMachine, device: PciDevice, units: int = 1) -> Fault:
    """Unbind the driver of a function, and bind it again."""
    folder = machine.root / "sys/bus/pci/devices" / device.address
    target = os.readlink(folder / "driver")

    def unbind() -> None:
        (folder / "driver").unlink()
        _say(machine, folder, "unbind")

    def bind() -> None:
        (folder / "driver").symlink_to(target)
        _say(machine, folder, "bind")

    return Fault(unbind, bind, units)


def links(machine: SimulatedMachine) -> Iterator[Fault]:
    """List the links of all PFs with VFs."""
    for device in machine.scan().devices:
        if device.vfs and device.netdev is not None:
            yield link(machine, device, len(device.vfs))


def _say(machine: SimulatedMachine, folder: Path, what: str) -> None:
    uevents.emit(what, uevents.devpath(machine.root, folder), "pci")
