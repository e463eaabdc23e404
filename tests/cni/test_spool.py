"""DELs that the relay left on disk, carried out later."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cni import protocol, spool
from cni.protocol import Answer, Request


def put(folder: Path, name: str, container_id: str, command: str = "DEL") -> Path:
    file = folder / name
    file.write_bytes(protocol.encode_request(Request({"CNI_COMMAND": command, "CNI_CONTAINERID": container_id}, b"{}")))
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


@pytest.mark.parametrize("content", [b"", b"garbage", b"NFC1\0\0\0\x09A=1\0\0{}", b"x" * (protocol.MAX_REQUEST + 9)])
def test_a_file_that_is_no_request_is_set_aside(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "1.del").write_bytes(content)
    put(tmp_path, "2.del", "c2")
    server = Server()
    assert spool.replay(tmp_path, server.answer) == 1
    assert server.asked == ["c2"]
    assert names(tmp_path) == ["1.bad"]


def test_anything_but_a_del_is_set_aside(tmp_path: Path) -> None:
    put(tmp_path, "1.del", "c1", command="ADD")
    server = Server()
    assert spool.replay(tmp_path, server.answer) == 0
    assert server.asked == []
    assert names(tmp_path) == ["1.bad"]


def test_files_of_other_names_are_let_be(tmp_path: Path) -> None:
    """The relay writes under another name first."""
    put(tmp_path, ".1.del.new", "c1")
    put(tmp_path, "1.bad", "c1")
    (tmp_path / "folder.del").mkdir()
    assert spool.replay(tmp_path, Server().answer) == 0
    assert names(tmp_path) == [".1.del.new", "1.bad", "folder.del"]


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
