"""The RDMA device goes along into the pod and comes back, whatever happens to it there."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agent.errors import AttachmentError, DeviceBusy, HardwareError, NetlinkFailed
from hack.sim.rdma import SimulatedRdma
from tests.cni import tiny_node
from tests.cni.modes import rdma_node
from tests.cni.stand_ins import NoFacts
from tests.cni.tiny_node import Rig, vf
from tests.node import granted
from tests.waiting import until


def inside(node: Rig, pod: Path) -> list[str]:
    with open(pod) as netns:
        return [found.name for found in node.machine.rdma.devices(netns.fileno())]


def outside(node: Rig) -> list[str]:
    return [found.name for found in node.machine.rdma.devices()]


def test_the_rdma_device_goes_along_and_comes_back(exclusive: Rig) -> None:
    before, pod = exclusive.found(), exclusive.pod()
    exclusive.add("c1", pod)
    (row,) = exclusive.ledger.attachments()
    assert (row.undo.rdma, row.undo.extra["rdma_index"]) == ("mlx5_1", 0)
    assert inside(exclusive, pod) == ["mlx5_1"]
    assert outside(exclusive) == ["mlx5_2", "mlx5_3"]
    exclusive.check("c1", pod)
    exclusive.detach("c1", pod)
    assert outside(exclusive) == ["mlx5_1", "mlx5_2", "mlx5_3"]
    assert (inside(exclusive, pod), exclusive.found()) == ([], before)


def test_a_device_whose_name_was_taken_comes_back_under_the_name_it_has(exclusive: Rig) -> None:
    pod = exclusive.pod()
    exclusive.add("c1", pod)
    with open(pod) as netns:
        (found,) = exclusive.machine.rdma.devices(netns.fileno())
        exclusive.machine.rdma.rename(found, "mine", netns.fileno())
    second = exclusive.machine.find_rdma(vf(1))
    assert second is not None
    exclusive.machine.rdma.rename(second, "mlx5_1")
    exclusive.detach("c1", pod)
    assert outside(exclusive) == ["mine", "mlx5_1", "mlx5_3"]
    assert exclusive.ledger.quarantines() == ()


def test_check_misses_a_device_that_was_taken_out(exclusive: Rig) -> None:
    pod = exclusive.pod()
    exclusive.add("c1", pod)
    with open(pod) as netns:
        (found,) = exclusive.machine.rdma.devices(netns.fileno())
        exclusive.machine.rdma.move_out(found, netns.fileno())
    with pytest.raises(AttachmentError, match="RDMA device mlx5_1 is not in the pod"):
        exclusive.check("c1", pod)


def test_a_driver_that_refuses_is_named_with_what_to_do_and_the_vf_is_back(exclusive: Rig) -> None:
    before, pod = exclusive.found(), exclusive.pod()
    exclusive.machine.rdma.refuse("mlx5_1")
    with pytest.raises(NetlinkFailed, match=r"mlx5_core of 0000:3b:00.2 cannot take mlx5_1.*`rdma: false`") as caught:
        exclusive.add("c1", pod)
    assert caught.value.errno == errno.EOPNOTSUPP
    assert exclusive.found() == before
    assert exclusive.ledger.attachment_on(vf(0)) is None
    exclusive.add("c1", pod, rdma=False)
    exclusive.check("c1", pod)
    assert inside(exclusive, pod) == []
    assert "mlx5_1" in outside(exclusive)
    exclusive.detach("c1", pod)


def test_a_vf_without_an_rdma_device_needs_none_unless_it_is_asked_for(own_network: None, tmp_path: Path) -> None:
    with tiny_node.open_rig(tmp_path) as plain:
        plain.machine.rdma.set_mode("exclusive")
        pod = plain.pod()
        plain.add("c1", pod)
        with pytest.raises(HardwareError, match="has no RDMA device in the host: load its RDMA driver"):
            plain.add("c2", plain.pod("other"), deviceID=vf(1), rdma=True)


def test_in_shared_mode_nothing_moves_and_an_own_device_is_refused(own_network: None, tmp_path: Path) -> None:
    with rdma_node.opened(tmp_path, mode="shared") as shared:
        pod = shared.pod()
        shared.add("c1", pod)
        (row,) = shared.ledger.attachments()
        assert row.undo.rdma is None
        with pytest.raises(HardwareError, match=r"shared by all namespaces.*ib_core.netns_mode=0"):
            shared.add("c2", shared.pod("other"), deviceID=vf(1), rdma=True)


def test_a_device_that_another_pod_had_at_the_grant_must_have_the_number_of_then(
    own_network: None, tmp_path: Path
) -> None:
    with rdma_node.opened(tmp_path, facts=NoFacts({vf(1): "/dev/infiniband/uverbs7"})) as node:
        node.add("c1", node.pod())  # of a device that kubelet has given to nobody, nobody was told
        node.ledger.grant(granted("rdma/vf", {vf(1): vf(1)}))
        pod = node.pod("other")
        with pytest.raises(HardwareError, match=r"came with /dev/infiniband/uverbs7 and has /dev/infiniband/uverbs1"):
            node.add("c2", pod, deviceID=vf(1))
        node.await_back(1)
        assert node.in_pod(pod) is None
        assert "mlx5_2" in outside(node)


def test_a_whole_adapter_takes_its_rdma_device_along(exclusive: Rig) -> None:
    pod = exclusive.pod()
    exclusive.add("c1", pod, mode="nic", deviceID=vf(1))
    assert inside(exclusive, pod) == ["mlx5_2"]
    exclusive.check("c1", pod)
    exclusive.detach("c1", pod)
    assert outside(exclusive) == ["mlx5_1", "mlx5_2", "mlx5_3"]


@contextmanager
def hanging(rdma: SimulatedRdma) -> Iterator[None]:
    """Let another thread be in the midst of binding a VF anew, whose driver does not come to an end."""
    holds, ends = threading.Event(), threading.Event()

    def hang() -> None:
        with rdma.renumbering(vf(2)):
            holds.set()
            assert ends.wait(60)

    thread = threading.Thread(target=hang)
    thread.start()
    try:
        assert holds.wait(30)
        yield
    finally:
        ends.set()
        thread.join()


@pytest.fixture
def impatient(own_network: None, tmp_path: Path) -> Iterator[Rig]:
    """A node that waits a moment only for others' RDMA devices."""
    quick = SimulatedRdma(tmp_path, tmp_path / "root", wait_seconds=0.05)
    with rdma_node.opened(tmp_path, host=lambda machine: replace(machine, rdma=quick)) as rig:
        yield replace(rig, machine=replace(rig.machine, rdma=quick))


def test_an_add_does_not_wait_for_ever_for_a_vf_that_does_not_come_back(impatient: Rig) -> None:
    before, pod = impatient.found(), impatient.pod()
    with hanging(impatient.machine.rdma):
        with pytest.raises(DeviceBusy, match=rf"{vf(0)} has waited 0\.05 s .*: {vf(2)} is still being"):
            impatient.add("c1", pod)
        # Nothing had moved but the interface, so no other step is waited for on its way back.
        assert (impatient.found(), impatient.ledger.quarantines(), impatient.ledger.attachments()) == (before, (), ())
    impatient.add("c1", pod)
    assert inside(impatient, pod) == ["mlx5_1"]


def test_a_del_that_meets_a_vf_that_does_not_come_back_is_finished_later(impatient: Rig) -> None:
    before, pod = impatient.found(), impatient.pod()
    impatient.add("c1", pod)
    with hanging(impatient.machine.rdma):
        impatient.delete("c1", pod)
        until(lambda: impatient.ledger.quarantines() != ())
        assert f"{vf(2)} is still being moved" in impatient.ledger.quarantines()[0].reason
        until(lambda: impatient.found() == before)  # the interface does not wait
        (row,) = impatient.ledger.attachments()
        until(lambda: row not in impatient.attachments.detacher.leaving)
        with pytest.raises(DeviceBusy, match=f"{vf(2)} is still being moved"):
            impatient.attachments.heal(vf(0))
        assert inside(impatient, pod) == ["mlx5_1"]
    assert impatient.attachments.heal(vf(0)) is not None
    assert outside(impatient) == ["mlx5_1", "mlx5_2", "mlx5_3"]
    assert (impatient.found(), impatient.ledger.quarantines(), impatient.ledger.attachments()) == (before, (), ())
