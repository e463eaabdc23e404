"""VF settings: interfaces that have no VFs, as a real kernel answers, and drivers that do not do as they say."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import yaml

from agent.errors import HardwareError, NetlinkFailed
from agent.hardware.netlink import vf_control
from agent.hardware.netlink.rtnetlink import LINK, attributes
from agent.hardware.netlink.vf_control import PfNetlink
from agent.hardware.sysfs import trunk
from agent.model.allocation import VfSettings
from tests.agent.hardware.attributes import attribute
from tests.vf_trunk import TrunkDriver


def test_an_interface_without_vfs_has_no_vf_settings(own_network: None) -> None:
    subprocess.run(["ip", "link", "add", "v0", "type", "veth", "peer", "name", "p0"], check=True)
    control = PfNetlink(settle_seconds=0.1)
    with pytest.raises(HardwareError, match="v0 has no VF 0: look at its sriov_numvfs"):
        control.read("v0", 0)
    with pytest.raises(HardwareError, match="set trust True of VF 0 on v0"):
        control.apply("v0", 0, VfSettings(trust=True))
    with pytest.raises(HardwareError, match="v0 has no VF 0"):
        control.apply("v0", 0, VfSettings(vlan=7))  # the rest of what goes with a VLAN must be read first
    with pytest.raises(HardwareError, match="nothing"):
        control.read("nothing", 0)
    with pytest.raises(HardwareError, match="PF interface nothing is gone"):
        control.apply("nothing", 0, VfSettings(trust=True))
    control.apply("nothing", 0, VfSettings())


class Driver:
    """A PF with one VF, as its driver tells and takes its trust. It stands where a netlink socket does."""

    def __init__(self, *, ignores: int = 0, is_busy: int = 0) -> None:
        """How many requests it acknowledges and forgets, and how many it refuses before for a reset."""
        self.ignores, self.is_busy = ignores, is_busy
        self.trust = False
        self.asked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def find(self, name: str) -> Any:
        return SimpleNamespace(ifindex=7)

    def answer(self, kind: int, body: bytes, *, most: int) -> bytes:
        mac, trust = struct.pack("=I", 0) + bytes(32), struct.pack("=II", 0, self.trust)
        info = attribute(1, attribute(1, mac) + attribute(9, trust))
        return bytes(LINK.size) + attribute(21, struct.pack("=I", 1)) + attribute(22, info)

    def ask(self, kind: int, flags: int, request: bytes) -> None:
        self.asked += 1
        if self.is_busy:
            self.is_busy -= 1
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        if self.ignores:
            self.ignores -= 1
        else:
            self.trust = bool(struct.unpack("=I", request[-4:])[0])


def control(driver: Driver, settle_seconds: float = 30.0) -> PfNetlink:
    return PfNetlink(settle_seconds, open_links=lambda: driver)  # type: ignore[arg-type, return-value]


def test_a_trunk_goes_with_what_rtnetlink_sets(tmp_path: Path) -> None:
    kept, path = TrunkDriver(), trunk.path_of(tmp_path, "ens1f0", 0)
    kept.create(path, 5)
    driver = Driver()
    of_pf = PfNetlink(30.0, tmp_path, lambda: driver, kept.write)  # type: ignore[arg-type, return-value]
    of_pf.apply("ens1f0", 0, VfSettings(trunk="100,200-210"))
    assert (driver.asked, of_pf.read("ens1f0", 0).trunk) == (0, "100,200-210")
    of_pf.apply("ens1f0", 0, VfSettings(trust=True))
    assert of_pf.read("ens1f0", 0).trunk == "100,200-210"
    of_pf.apply("ens1f0", 0, VfSettings(trust=False, trunk=""))
    assert (driver.trust, driver.asked, of_pf.read("ens1f0", 0).trunk) == (False, 2, "")
    path.unlink()
    assert of_pf.read("ens1f0", 0).trunk is None


class Crowded(Driver):
    """A PF with so many VFs that the kernel has no room for them in its answer."""

    def answer(self, kind: int, body: bytes, *, most: int) -> bytes:
        raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))


@pytest.mark.parametrize("settings", [VfSettings(vlan=7), VfSettings(max_tx_rate=50), VfSettings(trust=True)])
def test_a_pf_that_cannot_be_asked_can_be_told(settings: VfSettings) -> None:
    driver = Crowded()
    control(driver).apply("ens1f0", 0, settings)
    assert driver.asked == 1


def test_what_a_driver_forgets_is_set_until_it_holds() -> None:
    driver = Driver(ignores=2)
    control(driver).apply("ens1f0", 0, VfSettings(trust=True))
    assert (driver.trust, driver.asked) == (True, 3)


def test_what_a_driver_never_does_is_told_with_what_is_instead() -> None:
    with pytest.raises(HardwareError, match="trust was set to True without an error but is False after 0 s"):
        control(Driver(ignores=1 << 30), 0.0).apply("ens1f0", 0, VfSettings(trust=True))


def test_a_driver_that_resets_its_vf_is_asked_again() -> None:
    driver = Driver(is_busy=2)
    control(driver).apply("ens1f0", 0, VfSettings(trust=True))
    assert (driver.trust, driver.asked) == (True, 3)
    with pytest.raises(HardwareError, match="set trust True of VF 0 on ens1f0"):
        control(Driver(is_busy=1 << 30), 0.0).apply("ens1f0", 0, VfSettings(trust=True))


pytestmark = pytest.mark.skipif(sys.byteorder != "little", reason="the golden bytes are little-endian")

REQUESTS = yaml.safe_load(Path(__file__).with_name("vf_requests.yaml").read_text())


@pytest.mark.parametrize("row", REQUESTS, ids=lambda row: row["words"])
def test_each_request_is_what_the_kernel_reads(row: dict[str, Any]) -> None:
    settings = VfSettings(**row["settings"])
    [(what, names, attribute)] = vf_control.changes(3, settings)
    assert (what, attribute.hex()) == (row["words"], "".join(row["request"]).replace(" ", ""))
    assert set(names) == set(row["settings"])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (VfSettings(vlan=8), VfSettings(vlan=8, vlan_qos=3, vlan_proto="802.1ad")),
        (VfSettings(max_tx_rate=9), VfSettings(min_tx_rate=10, max_tx_rate=9)),
        (VfSettings(trust=False), VfSettings(trust=False)),
        (VfSettings(min_tx_rate=0, max_tx_rate=5), VfSettings(min_tx_rate=0, max_tx_rate=5)),
    ],
)
def test_what_the_kernel_sets_together_is_completed_from_before(settings: VfSettings, expected: VfSettings) -> None:
    before = VfSettings(vlan=7, vlan_qos=3, vlan_proto="802.1ad", min_tx_rate=10, max_tx_rate=20, trust=True)
    assert vf_control.completed(settings, before) == expected
    assert vf_control.is_complete(settings) == (settings == expected)


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
    proto = struct.pack(">Hxx", vf_control.VLAN_PROTOCOLS[str(of.vlan_proto)])
    parts = [
        attribute(1, struct.pack("=I", index) + mac.ljust(32, b"\0")),
        attribute(13, b"\xff" * 32),
        attribute(2, vlan),
        attribute(6, struct.pack("=III", index, of.min_tx_rate, of.max_tx_rate)),
        attribute(3, struct.pack("=II", index, of.max_tx_rate)),
        attribute(4, struct.pack("=II", index, bool(of.spoofchk))),
        attribute(5, struct.pack("=II", index, vf_control.LINK_STATES.index(str(of.link_state)))),
        attribute(7, struct.pack("=II", index, 0xFFFFFFFF)),
        attribute(9, struct.pack("=II", index, bool(of.trust))),
        *(attribute(kind, struct.pack("=IxxxxQ", index, (kind - 8 << 56) + index)) for kind in (10, 11) if guids),
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
        assert vf_control.find_vf(body, index) == settings_of(index)
    assert vf_control.find_vf(body, number) is None


@pytest.mark.parametrize("number", [7, 400])
def test_a_vf_that_its_driver_did_not_tell_of_is_not_found_and_hides_no_other(number: int) -> None:
    body = message(range(3, number), number)
    assert vf_control.find_vf(body, 2) is None
    assert vf_control.find_vf(body, number - 1) == settings_of(number - 1)


def test_a_message_that_was_cut_gives_no_wrong_values() -> None:
    body = message(range(400), 400)
    for cut in range(len(body), 60, -977):
        for index in (0, 200, 399):
            assert vf_control.find_vf(body[:cut], index) in (None, settings_of(index))


def test_what_a_driver_does_not_tell_is_unknown() -> None:
    info = attribute(
        1, attribute(1, struct.pack("=I", 0) + bytes(32)) + attribute(9, struct.pack("=II", 0, 0xFFFFFFFF))
    )
    body = attribute(21, struct.pack("=I", 1)) + attribute(22, info)
    assert vf_control.find_vf(body, 0) == VfSettings(mac="00:00:00:00:00:00")
    assert vf_control.differing(VfSettings(trust=True, vlan=5), VfSettings(mac="00:00:00:00:00:00")) == ()
    assert vf_control.differing(VfSettings(trust=True, vlan=5), VfSettings(trust=True, vlan=6)) == ("vlan",)


GUID = "02:11:22:33:44:55:66:77"


def test_a_guid_is_set_as_the_kernel_wants_it() -> None:
    golden = (
        "1c001680 18000180"  # IFLA_VFINFO_LIST, IFLA_VF_INFO, both nested
        "14000a00 05000000 00000000"  # IFLA_VF_IB_NODE_GUID of VF 5, then padding
        "7766554433221102"  # the number 0x0211223344556677 in this machine's byte order
    )
    assert vf_control.encode_guid(vf_control.IFLA_VF_IB_NODE_GUID, 5, GUID).hex() == golden.replace(" ", "")
    assert vf_control.encode_guid(vf_control.IFLA_VF_IB_PORT_GUID, 5, GUID)[8:12].hex() == "14000b00"


def test_the_guids_of_one_vf_among_many_are_read() -> None:
    content = vf_control.vf_content(message(range(16), 16, guids=True), 11)
    assert content is not None
    assert vf_control.decode_guids(dict(attributes(content))) == ("02:00:00:00:00:00:00:0b", "03:00:00:00:00:00:00:0b")
    assert vf_control.decode_guids({10: bytes(4), 11: bytes(4)}) is None, "a kernel may not tell"


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
    assert control.guids(ethernet, 3) == ("00:00:00:00:00:00:00:00", "00:00:00:00:00:00:00:00")
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
