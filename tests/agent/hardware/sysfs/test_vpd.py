"""Keyword V3 of vital product data."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.errors import HardwareError
from agent.hardware.sysfs.vpd import read_adapter_id, write_adapter_id

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


def test_what_is_written_for_recorded_nodes_is_read_back(tmp_path: Path) -> None:
    assert read_adapter_id(root_with(tmp_path, write_adapter_id(UUID)), ADDRESS) == UUID


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


def test_a_function_without_vital_product_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="No such file"):
        read_adapter_id(tmp_path, ADDRESS)
