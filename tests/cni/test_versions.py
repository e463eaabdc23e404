"""What earlier versions left beside the books: kept DELs, and the file that names pods to the relay."""

from __future__ import annotations

from pathlib import Path

from agent.config import Config
from agent.state import Latest
from cni import pods_file, spool
from cni.pods_file import PodsFile
from cni.protocol import Answer, Request
from tests import versions
from tests.agent.books import open_books


def test_dels_that_an_earlier_relay_kept_are_carried_out(tmp_path: Path) -> None:
    versions.unpack(versions.WITH_JOURNAL, tmp_path)
    asked: list[Request] = []

    def answer(request: Request) -> Answer:
        asked.append(request)
        return Answer(0, b"")

    assert spool.Spool(tmp_path / "spool").replay(answer) == 2
    assert [request.env["CNI_CONTAINERID"] for request in asked] == ["c0", "c7"]
    assert {request.env["CNI_COMMAND"] for request in asked} == {"DEL"}
    assert asked[0].stdin == (
        b'{"cniVersion": "1.0.0", "name": "rails", "type": "nodefabric", "deviceID": "0000:3b:00.2"}'
    )
    assert 1795390000 < (asked[0].spooled_at or 0) < (asked[1].spooled_at or 0) < 1795395000
    assert list((tmp_path / "spool").iterdir()) == []


def test_an_earlier_versions_file_of_pods_holds_on_in_the_same_boot(tmp_path: Path) -> None:
    versions.unpack(versions.WITH_PODS, tmp_path)
    file = pods_file.path_of(tmp_path / "cni.sock")
    assert file.read_text().splitlines()[3:] == ["default/trainer", "default/worker", "end"]
    with open_books(tmp_path, "boot-1") as books:
        kept = PodsFile(file, "kernel-boot-1", books, Latest(Config(kubelet_dir=tmp_path)))
        kept.look()
        assert file.read_text().splitlines()[3:] == ["default/trainer", "default/worker", "end"]
        (row,) = books.attachments()
        books.finish_detach(row)
        books.release(["0000:3b:00.2"])
        assert file.read_text().splitlines()[3:] == ["default/worker", "end"]


def test_an_earlier_versions_file_of_pods_goes_after_a_reboot(tmp_path: Path) -> None:
    versions.unpack(versions.WITH_PODS, tmp_path)
    file = pods_file.path_of(tmp_path / "cni.sock")
    with open_books(tmp_path, "boot-2") as books:
        PodsFile(file, "kernel-boot-2", books, Latest(Config(kubelet_dir=tmp_path))).look()
        assert not file.exists()
