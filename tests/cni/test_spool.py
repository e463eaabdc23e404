"""DELs that the relay left on disk, carried out later."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.errors import AgentError
from agent.model.allocation import AttachmentState
from cni import protocol, spool
from cni.protocol import Answer, Request
from tests import frames, versions
from tests.cni.relay import Relay
from tests.cni.tiny_node import Rig, stub_answer, vf
from tests.waiting import until


def put(folder: Path, name: str, container_id: str, command: str = "DEL") -> Path:
    file = folder / name
    file.write_bytes(frames.encode_request(Request({"CNI_COMMAND": command, "CNI_CONTAINERID": container_id}, b"{}")))
    return file


class Server:
    """Notes what it is asked, and refuses some containers."""

    def __init__(self, *refused: str) -> None:
        self.asked: list[str] = []
        self.refused = refused

    def answer(self, request: Request) -> Answer:
        container_id = request.env["CNI_CONTAINERID"]
        self.asked.append(container_id)
        return Answer(1, b'{"msg": "no"}') if container_id in self.refused else Answer(0, b"")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_spooled_dels_are_carried_out_in_order_and_removed(tmp_path: Path) -> None:
    for name, container in (("0003-a.del", "c3"), ("0001-b.del", "c1"), ("0002-a.del", "c2")):
        put(tmp_path, name, container)
    server = Server()
    assert spool.replay(tmp_path, server.answer) == 3
    assert server.asked == ["c1", "c2", "c3"]
    assert names(tmp_path) == []


def test_one_that_fails_stays_and_the_others_go_on(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        put(tmp_path, f"{number}.del", f"c{number}")
    assert spool.replay(tmp_path, Server("c2").answer) == 2
    assert names(tmp_path) == ["2.del"]
    assert spool.replay(tmp_path, Server().answer) == 1
    assert names(tmp_path) == []


NO_DELS: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "garbage": lambda file: file.write_bytes(b"garbage"),
    "half a request": lambda file: file.write_bytes(b"NFC1\0\0\0\x09A=1\0\0{}"),
    "too long": lambda file: file.write_bytes(b"x" * (protocol.MAX_REQUEST + 9)),
    "an ADD": lambda file: put(file.parent, file.name, "c1", command="ADD"),
    "somebody else's": lambda file: os.chown(put(file.parent, file.name, "c1"), 1, -1),
    "a link": lambda file: file.symlink_to("/etc/hostname"),
    "a pipe": lambda file: os.mkfifo(file),
}


@pytest.mark.parametrize("kind", NO_DELS)
def test_what_is_no_del_is_removed_and_never_waited_for(tmp_path: Path, kind: str) -> None:
    NO_DELS[kind](tmp_path / "1.del")
    put(tmp_path, "2.del", "c2")
    server = Server()
    assert spool.replay(tmp_path, server.answer) == 1
    assert (server.asked, names(tmp_path)) == (["c2"], [])


def test_a_del_that_no_agent_will_ever_accept_is_removed(tmp_path: Path) -> None:
    put(tmp_path, "1.del", "")
    refusal = Answer(1, b'{"code": 4, "msg": "CNI_CONTAINERID must be letters"}')
    assert spool.replay(tmp_path, lambda request: refusal) == 0
    assert names(tmp_path) == []


@pytest.mark.parametrize("text", [b"", b"null", b"[4]", b'{"code": "4"}', b'{"code": 11}', b"\xff"])
def test_any_other_refusal_keeps_it(tmp_path: Path, text: bytes) -> None:
    put(tmp_path, "1.del", "c1")
    assert spool.replay(tmp_path, lambda request: Answer(1, text)) == 0
    assert names(tmp_path) == ["1.del"]


def test_files_of_other_names_are_let_be(tmp_path: Path) -> None:
    """The relay writes under another name first."""
    put(tmp_path, ".1.del.new", "c1")
    (tmp_path / "folder.del").mkdir()
    assert spool.replay(tmp_path, Server().answer) == 0
    assert names(tmp_path) == [".1.del.new", "folder.del"]


def test_no_spool_is_an_empty_one(tmp_path: Path) -> None:
    assert spool.replay(tmp_path / "missing", Server().answer) == 0
    (tmp_path / "file").touch()
    assert spool.replay(tmp_path / "file", Server().answer) == 0


def test_a_spool_that_cannot_be_written_stops_nothing(own_network: None, tmp_path: Path) -> None:
    put(tmp_path, "1.del", "c1")
    (tmp_path / "2.del").write_bytes(b"garbage")
    put(tmp_path, "3.del", "c3")
    subprocess.run(["mount", "--bind", tmp_path, tmp_path], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", tmp_path], check=True)
        server = Server()
        assert spool.replay(tmp_path, server.answer) == 2
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert server.asked == ["c1", "c3"]
    assert names(tmp_path) == ["1.del", "2.del", "3.del"]


@pytest.fixture
def answering(rig: Rig) -> Callable[[Request], Answer]:
    return rig.server().answer


def spooled_by(relay: Relay, container_id: str, netns: str) -> None:
    stdin = json.dumps({"cniVersion": "1.0.0", "name": "rails", "type": "nodefabric"}).encode()
    more = {"CNI_CONTAINERID": container_id, "CNI_IFNAME": "net1", "CNI_NETNS": netns}
    assert relay.run("DEL", stdin, wait="0", **more).status == 0


def test_what_the_relay_spooled_is_undone_and_never_under_the_devices_next_owner(
    rig: Rig, answering: Callable[[Request], Answer], sanitized_relay: Relay
) -> None:
    first, second = rig.pod("one"), rig.pod("two")
    rig.add("c1", first, mac="02:00:00:00:00:77")
    for netns in ("/var/run/netns/one", "", ""):
        spooled_by(sanitized_relay, "c1", netns)
    assert spool.replay(sanitized_relay.spool, answering) == 2
    rig.await_back()
    rig.add("c2", second, mac="02:00:00:00:00:78")
    for netns in ("/var/run/netns/one", "/var/run/netns/two", ""):
        spooled_by(sanitized_relay, "c1", netns)
    assert spool.replay(sanitized_relay.spool, answering) == 3
    rig.check("c2", second)
    assert [row.owner.container_id for row in rig.ledger.attachments()] == ["c2"]
    assert sanitized_relay.spooled() == []


def test_a_del_from_before_a_new_add_of_the_same_interface_is_let_be(
    rig: Rig, answering: Callable[[Request], Answer], sanitized_relay: Relay, caplog: pytest.LogCaptureFixture
) -> None:
    """Interfaces are unplugged from a pod that runs and plugged in anew, under the same name in the same sandbox."""
    pod = rig.pod()
    rig.add("c1", pod)
    spooled_by(sanitized_relay, "c1", str(pod))
    rig.delete("c1", pod)  # the same, by a repeated DEL
    rig.await_back()
    rig.add("c1", pod, deviceID=vf(1))
    caplog.set_level("INFO")
    assert spool.replay(sanitized_relay.spool, answering) == 1
    (row,) = rig.ledger.attachments()
    assert (row.device, row.state) == (vf(1), AttachmentState.ATTACHED)
    assert "came before" in caplog.text
    assert sanitized_relay.spooled() == []
    spooled_by(sanitized_relay, "c1", str(pod))
    assert spool.replay(sanitized_relay.spool, answering) == 1
    rig.await_back(1)


def test_a_del_from_before_an_add_that_failed_is_carried_out(
    rig: Rig, answering: Callable[[Request], Answer], sanitized_relay: Relay
) -> None:
    pod = rig.pod()
    rig.add("c1", pod)
    spooled_by(sanitized_relay, "c1", str(pod))
    with pytest.raises(AgentError, match="still being undone"):
        rig.add("c1", pod, deviceID=vf(1))
    assert spool.replay(sanitized_relay.spool, answering) == 1
    rig.await_back()


def test_a_del_from_before_an_add_that_is_under_way_waits_for_its_end(
    rig: Rig, answering: Callable[[Request], Answer], sanitized_relay: Relay
) -> None:
    pod = rig.pod()
    spooled_by(sanitized_relay, "c1", str(pod))
    answers: list[int] = []
    script = (
        f"touch {rig.folder}/asked; until [ -e {rig.folder}/go ]; do sleep 0.05; done; {stub_answer('10.0.0.2/24')}"
    )
    adding = threading.Thread(target=lambda: rig.add("c1", pod, ipam=rig.stub_ipam(script)))
    adding.start()
    until((rig.folder / "asked").exists)
    answers.append(spool.replay(sanitized_relay.spool, answering))
    assert len(sanitized_relay.spooled()) == 1
    (rig.folder / "go").touch()
    adding.join()
    answers.append(spool.replay(sanitized_relay.spool, answering))
    assert (answers, sanitized_relay.spooled()) == ([0, 1], [])
    rig.check("c1", pod)


def test_dels_that_an_earlier_relay_kept_are_carried_out(tmp_path: Path) -> None:
    versions.unpack(versions.EARLY, tmp_path)
    asked: list[Request] = []

    def answer(request: Request) -> Answer:
        asked.append(request)
        return Answer(0, b"")

    assert spool.replay(tmp_path / "spool", answer) == 2
    assert [request.env["CNI_CONTAINERID"] for request in asked] == ["c0", "c7"]
    assert {request.env["CNI_COMMAND"] for request in asked} == {"DEL"}
    assert asked[0].stdin == (
        b'{"cniVersion": "1.0.0", "name": "rails", "type": "nodefabric", "deviceID": "0000:3b:00.2"}'
    )
    assert 1795390000 < (asked[0].spooled_at or 0) < (asked[1].spooled_at or 0) < 1795395000
    assert list((tmp_path / "spool").iterdir()) == []
