"""A driver that hangs in the kernel holds up its own device, and neither the agent's start nor other devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from agent.errors import DeviceBusy
from agent.model.allocation import VfSettings
from hack.sim.machine import RecordedVfControl, SimulatedMachine
from tests.cni import tiny_node
from tests.cni.reconciled import reconciler_of
from tests.cni.tiny_node import Rig, open_rig, vf
from tests.waiting import until


class Driver(RecordedVfControl):
    """Does what it is told of VFs, or hangs until told otherwise."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "vf-settings.json")
        self.hangs = threading.Event()
        self.go = threading.Event()

    def apply(self, pf_netdev: str, vf_index: int, settings: VfSettings) -> None:
        if self.hangs.is_set():
            assert self.go.wait(tiny_node.TIMEOUT_SECONDS)
        super().apply(pf_netdev, vf_index, settings)

    def before(self, machine: SimulatedMachine) -> SimulatedMachine:
        """Give it to a machine."""
        return replace(machine, vf_control=self)


def with_gone_pods(
    folder: Path, check: Callable[[Rig], None], *, hanging: Collection[int], heal_seconds: float
) -> None:
    """Check a node whose first two VFs were left by pods that are gone, and some of which hang when put back."""
    driver = Driver(folder)
    with open_rig(folder, host=driver.before, heal_seconds=heal_seconds) as rig:
        before = [rig.found(index) for index in range(2)]
        for index in range(2):
            pod = rig.pod(f"p{index}")
            rig.add(f"c{index}", pod, deviceID=vf(index), **({"trust": "on"} if index in hanging else {}))
            rig.remove(pod)
        driver.hangs.set()
        try:
            check(rig)
        finally:
            driver.go.set()
        until(lambda: rig.ledger.attachments() == () or rig.attachments.heal(vf(0)))
        until(lambda: rig.ledger.attachments() == () or rig.attachments.heal(vf(1)))
        assert [rig.found(index) for index in range(2)] == before
        assert rig.ledger.quarantines() == ()


def test_a_driver_that_hangs_withholds_its_device_and_holds_up_nobody(
    own_network: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def check(rig: Rig) -> None:
        reconciler, counted = reconciler_of(rig)

        def is_alone(device: str) -> bool:
            reconciler.heal_attachments()
            return [row.device for row in rig.ledger.attachments()] == [device]

        until(lambda: is_alone(vf(0)))  # the other one may be late too, where much else is going on
        assert ("detach-failed", DeviceBusy.reason) in counted
        until(lambda: [entry.device for entry in rig.ledger.quarantines()] == [vf(0)])
        (withheld,) = rig.ledger.quarantines()
        assert withheld.reason == "its driver may hang: it is not back after 0.2 s, look at dmesg"
        (row,) = rig.ledger.attachments()
        assert row in rig.attachments.detacher.leaving
        assert rig.attachments.heal(vf(0)) is None  # somebody is at it

    with_gone_pods(tmp_path, check, hanging=[0], heal_seconds=0.2)
    assert f"healing {vf(0)} is done at last" in caplog.text


def test_others_that_may_wait_for_the_same_are_awaited_for_a_moment_only(own_network: None, tmp_path: Path) -> None:
    def check(rig: Rig) -> None:
        for index, seconds in enumerate(["1.1", "1"]):
            until(partial(rig.machine.find_netdev, vf(index)))
            with pytest.raises(DeviceBusy, match=f"^{vf(index)} is not back after {seconds} s: "):
                rig.attachments.heal(vf(index))
        assert {entry.device for entry in rig.ledger.quarantines()} == {vf(0), vf(1)}

    with_gone_pods(tmp_path, check, hanging=[0, 1], heal_seconds=1.1)


def test_a_del_whose_driver_hangs_withholds_its_device(own_network: None, tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    with open_rig(tmp_path, host=driver.before, heal_seconds=0.2) as rig:
        pod = rig.pod()
        rig.add("c1", pod, deviceID=vf(0), trust="on")
        driver.hangs.set()
        try:
            rig.delete("c1", pod, deviceID=vf(0))
            reconciler, counted = reconciler_of(rig)

            def is_withheld() -> bool:
                reconciler.heal_attachments()
                return bool(rig.ledger.quarantines())

            until(is_withheld)
            (withheld,) = rig.ledger.quarantines()
            assert (withheld.device, withheld.reason) == (
                vf(0),
                "its driver may hang: it is not back after 0.2 s, look at dmesg",
            )
            reconciler.heal_attachments()
            assert counted == [("detach-failed", DeviceBusy.reason)]  # told once
        finally:
            driver.go.set()
        until(lambda: rig.ledger.attachments() == ())
        assert rig.ledger.quarantines() == ()
