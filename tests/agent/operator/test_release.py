"""`nodefabric release`: frees what is stuck, takes nothing from a pod that lives, with and without an agent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from agent.config import Config
from agent.errors import InUse, RequestInvalid, Unavailable, UnknownDevice
from agent.ledger import Ledger
from agent.ledger.database import lock_folder
from agent.model.allocation import Attachment
from agent.model.device import Snapshot
from agent.operator import release as command
from agent.operator.admin import AdminServer
from agent.state import Latest
from cni.heal import ReleaseRequest
from hack.sim.machine import SimulatedMachine
from tests.agent.reconcile.outside import Answers
from tests.agent.reconcile.scene import reconciler_of
from tests.cni import tiny_node
from tests.cni.tiny_node import Rig, open_rig, vf
from tests.waiting import until


def gone(row: Attachment) -> bool | None:
    """Say that nobody knows a pod."""
    return False


def wish(device: str = vf(0), *, force: bool = False) -> ReleaseRequest:
    return ReleaseRequest(device, "a test", force)


@pytest.fixture
def rig(own_network: None, tmp_path: Path) -> Iterator[Rig]:
    tiny_node.create(tmp_path)
    with open_rig(tmp_path) as rig:
        yield rig


@pytest.mark.parametrize(("known", "text"), [(True, "the node still knows"), (None, "kubelet cannot be asked")])
def test_a_pod_that_is_known_or_may_be_keeps_its_device(rig: Rig, known: bool | None, text: str) -> None:
    pod = rig.pod()
    rig.add("c1", pod)
    rig.remove(pod)
    until(lambda: rig.machine.find_netdev(vf(0)) is not None)
    with pytest.raises(InUse, match=text):
        rig.attachments.release(wish(), lambda row: known)
    assert len(rig.ledger.attachments()) == 1
    rig.attachments.release(wish(), gone)
    assert rig.ledger.attachments() == ()


@pytest.mark.parametrize("device", ["0000:99:00.1", "ens1f0v1", "", "'; DROP TABLE grants"])
def test_a_device_that_nobody_has_is_told(rig: Rig, device: str) -> None:
    with pytest.raises(UnknownDevice, match="is in no pod and not in quarantine"):
        rig.attachments.release(wish(device), gone)


def test_a_device_in_quarantine_is_offered_again_once_it_is_seen_or_by_force(rig: Rig) -> None:
    rig.ledger.quarantine(vf(0), "clean-up failed")
    assert rig.attachments.release(wish(), gone) == f"{vf(0)} leaves quarantine"
    assert rig.ledger.quarantines() == ()
    rig.ledger.quarantine(vf(0), "clean-up failed")
    rig.unplug()
    with pytest.raises(InUse, match="cannot be verified to be clean"):
        rig.attachments.release(wish(), gone)
    assert rig.ledger.quarantines() != ()
    rig.attachments.release(wish(force=True), gone)
    assert rig.ledger.quarantines() == ()


def test_what_does_not_come_back_is_forgotten_by_force_only(rig: Rig) -> None:
    pod = rig.pod()
    rig.add("c1", pod, ipam=rig.stub_ipam(tiny_node.stub_answer("10.0.0.2/24")))
    (row,) = rig.ledger.attachments()
    rig.ledger.begin_detach([row.attachment_id])
    with open(pod):
        rig.remove(pod)  # the namespace lives on, unseen, with the device
        with pytest.raises(Exception, match="still lives"):
            rig.attachments.release(wish(), gone)
        assert [q.device for q in rig.ledger.quarantines()] == [vf(0)]
        done = rig.attachments.release(wish(force=True), gone)
        assert done.startswith(f"{vf(0)} is forgotten though it is not back: ")
        assert (rig.ledger.attachments(), rig.ledger.quarantines()) == ((), ())
        assert [lease.container_id for lease in rig.ledger.owed_leases()] == ["c1"]


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({"device": 5, "reason": "x"}, "device must name"),
        ({"device": "x" * 301, "reason": "x"}, "device must name"),
        ({"device": "x", "reason": " "}, "reason must say why"),
        ({"device": "x", "reason": "x" * 501}, "reason must say why"),
        ({"device": "x", "reason": "x", "force": "yes"}, "force must be"),
    ],
)
def test_a_request_that_is_none_is_refused(request_: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestInvalid, match=text):
        command.wish_of(request_)


def config(folder: Path, run: Path) -> Config:
    return Config(state_dir=folder, run_dir=run, kubelet_dir=folder / "kubelet", netns_folders=(folder,))


def test_without_an_agent_the_books_are_worked_on_themselves(
    own_network: None, tmp_path: Path, short_folder: Path
) -> None:
    tiny_node.create(tmp_path)
    with open_rig(tmp_path) as rig:
        pod, before = rig.pod(), rig.found()
        rig.add("c1", pod, trust="on")
    conf = config(tmp_path, short_folder)
    with pytest.raises(InUse, match="lives"):
        command.release(conf, wish(), lambda: SimulatedMachine.open(tmp_path))
    assert command.release(conf, wish(force=True), lambda: SimulatedMachine.open(tmp_path)).endswith(
        "is back, and free"
    )
    with open_rig(tmp_path) as rig:
        assert rig.found() == before
        assert rig.ledger.attachments() == ()


def test_an_agent_that_has_the_books_and_does_not_answer_is_not_passed_by(tmp_path: Path, short_folder: Path) -> None:
    lock = lock_folder(tmp_path)
    try:
        with pytest.raises(Unavailable, match="an agent has the ledger open, but the agent does not answer"):
            command.release(config(tmp_path, short_folder), wish(), lambda: pytest.fail("the books were opened"))
    finally:
        os.close(lock)


def test_a_kubelet_that_hangs_now_is_not_taken_at_its_former_word(rig: Rig) -> None:
    """A minute ago it did not know the pod: it may have begun since."""
    rig.add("c1", pod := rig.pod())
    rig.remove(pod)
    until(lambda: rig.machine.find_netdev(vf(0)) is not None)
    answers = [asyncio.sleep(0, ()), asyncio.Event().wait()]

    async def held_units() -> Any:
        return await answers.pop(0)

    outside = Answers(units=lambda: None, held_units=held_units)
    reconciler = reconciler_of(rig.ledger, rig.attachments, Latest(Snapshot()), outside)

    async def ask() -> str:
        await reconciler.look_around()
        loop = asyncio.get_running_loop()
        answer = command.answering(rig.attachments, reconciler, loop, lambda action, reason: None, look_seconds=0.2)
        return await asyncio.to_thread(answer, asdict(wish()))

    with pytest.raises(InUse, match="kubelet cannot be asked"):
        asyncio.run(ask())
    assert len(rig.ledger.attachments()) == 1


def test_the_running_agent_is_asked_and_its_no_is_a_no(tmp_path: Path, short_folder: Path) -> None:
    asked: list[ReleaseRequest] = []

    def answer(request: Any) -> str:
        asked.append(command.wish_of(request))
        if len(asked) == 1:
            raise InUse("a pod has it")
        return "done"

    server = AdminServer(short_folder / "admin.sock", {"release": answer})
    server.start()
    try:
        conf = config(tmp_path, short_folder)
        with pytest.raises(InUse, match="a pod has it"):
            command.release(conf, wish(), lambda: pytest.fail("the books were opened"))
        assert command.release(conf, wish(force=True), lambda: pytest.fail("the books were opened")) == "done"
        assert asked == [wish(), wish(force=True)]
    finally:
        server.close()


def test_the_books_of_another_boot_are_not_trusted(own_network: None, tmp_path: Path, short_folder: Path) -> None:
    tiny_node.create(tmp_path)
    with open_rig(tmp_path, boot_id="yesterday") as rig:
        pod = rig.pod()
        rig.add("c1", pod)
        rig.remove(pod)
        until(lambda: rig.machine.find_netdev(vf(0)) is not None)
    done = command.release(config(tmp_path, short_folder), wish(force=True), lambda: SimulatedMachine.open(tmp_path))
    assert done.endswith("is back, and free")
    ledger = Ledger.open(tmp_path / "ledger.db", "boot")
    assert ledger.attachments() == ()
    ledger.close()
