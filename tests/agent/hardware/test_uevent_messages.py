from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.hardware.uevent_messages import Uevent, change_of, parse

VF_ADDED = (
    b"add@/devices/pci0000:3a/0000:3b:00.1\0ACTION=add\0DEVPATH=/devices/pci0000:3a/0000:3b:00.1\0"
    b"SUBSYSTEM=pci\0PCI_ID=15B3:101E\0SEQNUM=4711\0"
)


def test_a_message_is_read() -> None:
    event = parse(VF_ADDED)
    assert event == Uevent("add", "/devices/pci0000:3a/0000:3b:00.1", "pci")
    assert str(event) == "pci add 0000:3b:00.1"


def test_other_subsystems_and_udevs_own_messages_are_left_out() -> None:
    assert parse(VF_ADDED.replace(b"SUBSYSTEM=pci\0", b"SUBSYSTEM=queues\0")) is None
    assert parse(b"libudev\0\xfe\xed\xca\xfe" + bytes(40)) is None
    assert parse(b"add@/x\0SUBSYSTEM=pci\0") is None


def test_a_pods_veth_says_nothing_about_the_hardware() -> None:
    veth = Uevent("add", "/devices/virtual/net/veth0", "net")
    assert change_of(veth) is None
    assert change_of(veth, virtual_links=True)


@given(st.binary(max_size=300))
def test_no_packet_is_too_strange(packet: bytes) -> None:
    for shape in (packet, b"add@/x\0SUBSYSTEM=net\0ACTION=a\0DEVPATH=" + packet):
        event = parse(shape)
        if event is not None:
            change_of(event)
