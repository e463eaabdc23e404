"""VF settings in rtnetlink's bytes: golden requests, lists as the kernel makes them, and lists too long for it."""

from __future__ import annotations

import struct
import sys

import pytest

from agent.hardware.netlink import vf_settings
from agent.model.allocation import VfSettings
from tests.agent.hardware.attributes import attribute

pytestmark = pytest.mark.skipif(sys.byteorder != "little", reason="the golden bytes are little-endian")

VLAN = """
    2000 1680  1c00 0180  1800 0c80        VFINFO_LIST, VF_INFO, VF_VLAN_LIST
    1400 0100 03000000 64000000 02000000   VLAN_INFO: VF 3, VLAN 100, priority 2
    88a8 0000                              802.1ad as on the wire, padding
"""
MAC = """
    3000 1680  2c00 0180                   VFINFO_LIST, VF_INFO
    2800 0100 03000000 02000000 00070000   VF_MAC: VF 3, six bytes
    00000000 00000000 00000000 00000000
    00000000 00000000
"""
RATE = """
    1800 1680  1400 0180                   VFINFO_LIST, VF_INFO
    1000 0600 03000000 0a000000 64000000   VF_RATE: VF 3, 10 to 100 Mbit/s
"""
TRUST = """
    1400 1680  1000 0180                   VFINFO_LIST, VF_INFO
    0c00 0900 03000000 01000000            VF_TRUST: VF 3, on
"""


def golden(text: str) -> str:
    return "".join(line[4:43] for line in text.splitlines()).replace(" ", "")


@pytest.mark.parametrize(
    ("settings", "words", "expected"),
    [
        (VfSettings(vlan=100, vlan_qos=2, vlan_proto="802.1ad"), "VLAN 100", VLAN),
        (VfSettings(mac="02:00:00:00:00:07"), "MAC 02:00:00:00:00:07", MAC),
        (VfSettings(min_tx_rate=10, max_tx_rate=100), "rate 10..100 Mbit/s", RATE),
        (VfSettings(trust=True), "trust True", TRUST),
        (
            VfSettings(spoofchk=False),
            "spoofchk False",
            TRUST.replace("0900", "0400").replace(" 01000000 ", " 00000000 "),
        ),
        (
            VfSettings(link_state="disable"),
            "link state disable",
            TRUST.replace("0900", "0500").replace(" 01000000 ", " 02000000 "),
        ),
    ],
)
def test_each_request_is_what_the_kernel_reads(settings: VfSettings, words: str, expected: str) -> None:
    [(what, names, attribute)] = vf_settings.changes(3, settings)
    assert (what, attribute.hex()) == (words, golden(expected))
    assert all(getattr(settings, name) is not None for name in names)


def test_nothing_asked_is_nothing_sent() -> None:
    assert list(vf_settings.changes(3, VfSettings())) == []


def test_what_the_kernel_sets_together_is_completed_from_before() -> None:
    before = VfSettings(vlan=7, vlan_qos=3, vlan_proto="802.1ad", min_tx_rate=10, max_tx_rate=20, trust=True)
    assert vf_settings.completed(VfSettings(vlan=8), before) == VfSettings(vlan=8, vlan_qos=3, vlan_proto="802.1ad")
    assert vf_settings.completed(VfSettings(max_tx_rate=9), before) == VfSettings(min_tx_rate=10, max_tx_rate=9)
    assert vf_settings.completed(VfSettings(trust=False), before) == VfSettings(trust=False)
    assert not vf_settings.is_complete(VfSettings(vlan=8))
    assert vf_settings.is_complete(VfSettings(trust=False, min_tx_rate=0, max_tx_rate=5))


def settings_of(index: int) -> VfSettings:
    return VfSettings(
        mac=f"02:00:00:00:{index >> 8:02x}:{index & 255:02x}",
        vlan=index,
        vlan_qos=index % 8,
        vlan_proto="802.1ad" if index % 2 else "802.1q",
        min_tx_rate=index,
        max_tx_rate=2 * index,
        spoofchk=index % 2 == 0,
        trust=index % 3 == 0,
        link_state=("auto", "enable", "disable")[index % 3],
    )


def entry(index: int, guids: bool) -> bytes:
    """Make an IFLA_VF_INFO with all that rtnl_fill_vfinfo puts in, in its order, statistics left out."""
    of = settings_of(index)
    mac = bytes.fromhex(str(of.mac).replace(":", ""))
    vlan = struct.pack("=III", index, of.vlan, of.vlan_qos)
    proto = struct.pack(">Hxx", vf_settings.VLAN_PROTOCOLS[str(of.vlan_proto)])
    parts = [
        attribute(1, struct.pack("=I", index) + mac.ljust(32, b"\0")),
        attribute(13, b"\xff" * 32),
        attribute(2, vlan),
        attribute(6, struct.pack("=III", index, of.min_tx_rate, of.max_tx_rate)),
        attribute(3, struct.pack("=II", index, of.max_tx_rate)),
        attribute(4, struct.pack("=II", index, bool(of.spoofchk))),
        attribute(5, struct.pack("=II", index, vf_settings.LINK_STATES.index(str(of.link_state)))),
        attribute(7, struct.pack("=II", index, 0xFFFFFFFF)),
        attribute(9, struct.pack("=II", index, bool(of.trust))),
        *(attribute(kind, struct.pack("=IxxxxQ", index, index)) for kind in (10, 11) if guids),
        attribute(12, attribute(1, vlan + proto)),
    ]
    return attribute(1, b"".join(parts))


def message(indices: range, number: int, guids: bool = False) -> bytes:
    """Make the attributes of a link message: some before the list, some after it."""
    before = attribute(3, b"ens1f0\0") + attribute(1, bytes(6)) + attribute(21, struct.pack("=I", number))
    after = attribute(43, attribute(2, b"\0")) + attribute(18, attribute(1, b"x\0")) + attribute(1, bytes(6))
    return before + attribute(22, b"".join(entry(i, guids) for i in indices)) + after


@pytest.mark.parametrize("guids", [False, True], ids=["ethernet", "guids"])
@pytest.mark.parametrize("number", [1, 7, 128, 256, 400, 700])
def test_each_vf_is_read_as_it_is_however_many_there_are(number: int, guids: bool) -> None:
    body = message(range(number), number, guids)
    assert (len(body) > 1 << 16) == (number >= 400)  # from here on the length of the list has wrapped round
    for index in range(number):
        assert vf_settings.find(body, index) == settings_of(index)
    assert vf_settings.find(body, number) is None


@pytest.mark.parametrize("number", [7, 400])
def test_a_vf_that_its_driver_did_not_tell_of_is_not_found_and_hides_no_other(number: int) -> None:
    body = message(range(3, number), number)
    assert vf_settings.find(body, 2) is None
    assert vf_settings.find(body, number - 1) == settings_of(number - 1)


def test_a_message_that_was_cut_gives_no_wrong_values() -> None:
    body = message(range(400), 400)
    for cut in range(len(body), 60, -977):
        for index in (0, 200, 399):
            assert vf_settings.find(body[:cut], index) in (None, settings_of(index))


def test_what_a_driver_does_not_tell_is_unknown() -> None:
    info = attribute(
        1, attribute(1, struct.pack("=I", 0) + bytes(32)) + attribute(9, struct.pack("=II", 0, 0xFFFFFFFF))
    )
    body = attribute(21, struct.pack("=I", 1)) + attribute(22, info)
    assert vf_settings.find(body, 0) == VfSettings(mac="00:00:00:00:00:00")
    assert vf_settings.differing(VfSettings(trust=True, vlan=5), VfSettings(mac="00:00:00:00:00:00")) == ()
    assert vf_settings.differing(VfSettings(trust=True, vlan=5), VfSettings(trust=True, vlan=6)) == ("vlan",)
