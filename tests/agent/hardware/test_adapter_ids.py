"""Vital product data is read once, on threads of its own, and only where a Data Direct function is."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from agent.errors import HardwareError
from agent.hardware import recorded
from agent.hardware.adapter_ids import (
    MOST_READS,
    AdapterIds,
    read_adapter_id,
    with_adapter_ids,
    write_adapter_id,
)
from agent.hardware.sysfs import scan
from agent.model.change import Change
from agent.model.device import Snapshot
from tests.waiting import SECONDS, until

PF, FUNCTION = "0000:03:00.0", "0009:03:00.0"
OTHERS = {"0002:03:00.0": "0008:03:00.0", "0010:03:00.0": "0019:03:00.0", "0012:03:00.0": "0018:03:00.0"}
PAIRS = {PF: FUNCTION, **OTHERS}


def vpd(root: Path, address: str) -> Path:
    return root / "sys/bus/pci/devices" / address / "vpd"


def hang(root: Path, address: str) -> Path:
    """Make vital product data never answer: an open of a FIFO waits for a writer."""
    path = vpd(root, address)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def is_read(fifo: Path) -> bool:
    """Report whether somebody reads, or waits to; that ends by it."""
    try:
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno == errno.ENXIO:
            return False
        raise
    return True


@dataclass
class Node:
    """The GB300 node in a folder of its own."""

    root: Path
    told: list[Change] = field(default_factory=list)
    held: dict[str, threading.Event] = field(default_factory=dict)
    """Functions that answer when that is set."""

    def reader(self, seconds: float = 60.0) -> AdapterIds:
        return AdapterIds(self.read, lambda _, change: self.told.append(change), seconds=seconds)

    def read(self, address: str) -> str:
        if address in self.held:
            assert self.held[address].wait(SECONDS)
        return read_adapter_id(self.root, address)

    def scan(self) -> Snapshot:
        return scan.scan(self.root)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    root = tmp_path / "root"
    root.mkdir()
    recorded.unpack(recorded.load(recorded.find("gb300-4gpu")), root)
    return Node(root)


def known(found: Snapshot) -> tuple[dict[str, str], set[str]]:
    return dict(found.data_direct.of), set(found.data_direct.unknown)


def settled(reader: AdapterIds, found: Snapshot) -> Snapshot:
    reader.added_to(found)
    reader.settle()
    return reader.added_to(found)


def test_each_pf_finds_its_function(node: Node) -> None:
    found = settled(node.reader(), node.scan())
    assert known(found) == (PAIRS, set())
    assert with_adapter_ids(node.scan(), node.root, SECONDS) == found
    assert Change(frozenset({PF})) in node.told


def test_nothing_is_read_on_a_host_without_data_direct_functions(tmp_path: Path) -> None:
    recorded.unpack(recorded.load(recorded.find("h100-8gpu")), tmp_path)
    found = scan.scan(tmp_path)
    fifos = [hang(tmp_path, device.address) for device in found.devices if device.vendor == 0x15B3]
    assert len(fifos) > 8
    reader = AdapterIds(partial(read_adapter_id, tmp_path))
    assert reader.added_to(found) is found
    assert with_adapter_ids(found, tmp_path, SECONDS) is found
    assert not any(map(is_read, fifos))


def test_vfs_and_adapters_of_other_vendors_are_not_read(node: Node) -> None:
    vf = node.scan().by_address[PF].vfs[0]
    fifos = [hang(node.root, address) for address in (vf, "0008:06:00.0")]
    settled(node.reader(), node.scan())
    assert not any(map(is_read, fifos))


@pytest.mark.parametrize("address", [PF, FUNCTION])
def test_a_card_that_hangs_delays_no_other_and_its_late_answer_is_taken(node: Node, address: str) -> None:
    node.held[address], reader = threading.Event(), node.reader(seconds=0.05)
    until(lambda: known(reader.added_to(node.scan())) == (OTHERS, {PF}))
    until(lambda: Change(frozenset({address})) in node.told)
    (problem,) = reader.added_to(node.scan()).problems
    assert (problem.path, problem.text) == (f"/sys/bus/pci/devices/{address}/vpd", "does not answer within 0.05 s")
    node.held[address].set()
    until(lambda: reader.added_to(node.scan()).data_direct.of == PAIRS)
    assert not reader.added_to(node.scan()).problems


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\x90\x40\x00V3", "ends within a resource"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_data_that_cannot_be_read_leaves_its_adapter_unknown(node: Node, content: bytes | None, text: str) -> None:
    path = vpd(node.root, FUNCTION)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    found = settled(node.reader(), node.scan())
    assert known(found) == (OTHERS, {PF})
    assert [problem.text for problem in found.problems] == [text]


@pytest.mark.parametrize(("fails", "reads"), [(2, 3), (1 << 30, MOST_READS)])
def test_a_read_that_failed_is_tried_again_and_given_up_in_the_end(node: Node, fails: int, reads: int) -> None:
    whole, tried = node.scan(), []

    def read(address: str) -> str:
        if address == FUNCTION:
            tried.append(address)
            if len(tried) <= fails:
                raise HardwareError("cannot be read: Input/output error")
        return node.read(address)

    reader = AdapterIds(read, lambda _, change: node.told.append(change), again_seconds=0.001)
    reader.added_to(whole)
    until(lambda: node.told.count(Change(frozenset({FUNCTION}))) == reads)
    found = reader.added_to(whole)
    assert len(tried) == reads
    assert known(found) == ((PAIRS, set()) if fails == 2 else (OTHERS, {PF}))
    assert [problem.text for problem in found.problems] == ["cannot be read: Input/output error"] * (fails > 2)


def test_a_function_is_read_again_only_when_it_came_back(node: Node) -> None:
    reader, whole = node.reader(), node.scan()
    before = settled(reader, whole)
    vpd(node.root, FUNCTION).write_bytes(write_adapter_id("another"))
    rebound = tuple(replace(d, driver="vfio-pci") if d.address == PF else d for d in whole.devices)
    assert settled(reader, replace(whole, devices=rebound)).data_direct == before.data_direct

    without = replace(whole, devices=tuple(d for d in whole.devices if d.address != FUNCTION))
    assert known(reader.added_to(without)) == (OTHERS, {PF})
    assert settled(reader, whole).data_direct.unpaired == (FUNCTION,)


def test_a_pf_whose_function_has_left_the_bus_is_not_taken_for_one_without(node: Node) -> None:
    reader, whole = node.reader(), node.scan()
    settled(reader, whole)
    bare = replace(whole, devices=tuple(d for d in whole.devices if d.address not in PAIRS.values()))
    assert reader.added_to(bare).data_direct.unknown == PAIRS.keys()
    vpd(node.root, FUNCTION).write_bytes(write_adapter_id("another"))
    assert settled(reader, whole).data_direct.unpaired == (FUNCTION,), "what came back is read again"


ADDRESS = "0000:03:00.0"
UUID = "5c3f9b7e-8a41-11ee-8000-b83fd2aaaaaa"


def root_with(tmp_path: Path, content: bytes) -> Path:
    folder = tmp_path / "sys/bus/pci/devices" / ADDRESS
    folder.mkdir(parents=True)
    (folder / "vpd").write_bytes(content)
    return tmp_path


def resource(tag: int, content: bytes) -> bytes:
    return bytes([tag]) + len(content).to_bytes(2, "little") + content


def test_v3_is_found_behind_the_name_and_other_keywords(tmp_path: Path) -> None:
    fields = b"PN\x05MCX8S" + b"SN\x04MT25" + b"V3\x24" + UUID.encode() + b"RV\x01\x00"
    content = resource(0x82, b"ConnectX-8 SuperNIC") + b"\x09\x00" + resource(0x90, fields) + b"\x78"
    assert read_adapter_id(root_with(tmp_path, content), ADDRESS) == UUID


@pytest.mark.parametrize("content", [b"", b"\x78", resource(0x82, b"name") + b"\x79", resource(0x90, b"SN\x02ab")])
def test_data_without_v3_says_none(tmp_path: Path, content: bytes) -> None:
    assert read_adapter_id(root_with(tmp_path, content), ADDRESS) == ""


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\x90\x40\x00V3", "ends within a resource"),
        (b"\x82", "ends within a resource"),
        (resource(0x90, b"V3\x24abc"), "ends within keyword"),
        (resource(0x90, b"V3\x02\xff\xff"), "is no text"),
        (b"\x00" * (1 << 15), "ends within a resource"),
    ],
)
def test_broken_data_is_an_error(tmp_path: Path, content: bytes, text: str) -> None:
    with pytest.raises(HardwareError, match=text):
        read_adapter_id(root_with(tmp_path, content), ADDRESS)
