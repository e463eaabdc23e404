"""GUIDs of VFs: the bytes for the kernel, and the files of Mellanox's driver. No kernel at hand has such a PF."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest

from agent.errors import HardwareError, NetlinkFailed
from agent.hardware.netlink import vf_control, vf_settings
from agent.hardware.netlink.codec import attributes
from agent.hardware.netlink.vf_control import PfNetlink

GUID = "02:11:22:33:44:55:66:77"


def test_a_guid_is_set_as_the_kernel_wants_it() -> None:
    golden = (
        "1c001680 18000180"  # IFLA_VFINFO_LIST, IFLA_VF_INFO, both nested
        "14000a00 05000000 00000000"  # IFLA_VF_IB_NODE_GUID of VF 5, then padding
        "7766554433221102"  # the number 0x0211223344556677 in this machine's byte order
    )
    assert vf_control.encode_guid(vf_control.IFLA_VF_IB_NODE_GUID, 5, GUID).hex() == golden.replace(" ", "")
    assert vf_control.encode_guid(vf_control.IFLA_VF_IB_PORT_GUID, 5, GUID)[8:12].hex() == "14000b00"


def attribute(kind: int, payload: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(payload), kind) + payload + bytes(-len(payload) % 4)


def vf(index: int, node: int, port: int) -> bytes:
    guids = attribute(10, struct.pack("=IxxxxQ", index, node)) + attribute(11, struct.pack("=IxxxxQ", index, port))
    return attribute(1, attribute(1, struct.pack("=I", index) + bytes(32)) + guids)


def test_the_guids_of_one_vf_among_many_are_read() -> None:
    vfs = b"".join(vf(n, 0x0200_0000_0000_0000 + n, 0x0300_0000_0000_0000 + n) for n in range(16))
    body = attribute(21, struct.pack("=I", 16)) + attribute(22, vfs)
    content = vf_settings.content(body, 11)
    assert content is not None
    assert vf_control.decode_guids(dict(attributes(content))) == ("02:00:00:00:00:00:00:0b", "03:00:00:00:00:00:00:0b")
    assert vf_settings.content(body, 16) is None


def test_a_kernel_that_does_not_tell_tells_nothing() -> None:
    assert vf_control.decode_guids({}) is None
    assert vf_control.decode_guids({10: bytes(4), 11: bytes(4)}) is None


@pytest.fixture
def ethernet(own_network: None) -> str:
    """An interface that has no VFs to ask about: the kernel answers EOPNOTSUPP, as a driver without GUIDs does."""
    subprocess.run(["ip", "link", "add", "p0", "type", "veth", "peer", "name", "p1"], check=True)
    return "p0"


def test_where_the_driver_refuses_the_files_are_taken(ethernet: str, tmp_path: Path) -> None:
    folder = tmp_path / "sys/class/net" / ethernet / "device/sriov/3"
    folder.mkdir(parents=True)
    for name in ("node", "port"):
        (folder / name).write_text("00:00:00:00:00:00:00:00\n")
    control = PfNetlink(root=tmp_path)
    assert control.guids(ethernet, 3) == (vf_control.NONE, vf_control.NONE)
    control.set_guids(ethernet, 3, GUID, GUID)
    assert (folder / "node").read_text() == (folder / "port").read_text() == GUID
    assert control.guids(ethernet, 3) == (GUID, GUID)


def test_a_driver_that_knows_neither_is_named(ethernet: str, tmp_path: Path) -> None:
    control = PfNetlink(root=tmp_path)
    with pytest.raises(NetlinkFailed, match=f"set the node GUID of VF 3 of p0 to {GUID}: .*not supported"):
        control.set_guids(ethernet, 3, GUID, GUID)
    assert control.guids(ethernet, 3) is None
    with pytest.raises(HardwareError, match="PF interface gone is gone"):
        control.set_guids("gone", 3, GUID, GUID)
