"""The one netlink message of our own: golden bytes, and the kernel's own judgement."""

from __future__ import annotations

import errno
import sys

import pytest

from agent.hardware.vf_vlan import encode, set_vf_vlan

LITTLE_ENDIAN = """
    40000000 1300 0500 01000000 00000000   length, RTM_SETLINK, request + ack, sequence, port
    00 00 0000 07000000 00000000 00000000  interface 7
    2000 1680  1c00 0180  1800 0c80        VFINFO_LIST, VF_INFO, VF_VLAN_LIST
    1400 0100 03000000 64000000 02000000   VLAN_INFO: VF 3, VLAN 100, priority 2
    88a8 0000                              802.1ad as on the wire, padding
"""


@pytest.mark.skipif(sys.byteorder != "little", reason="the golden bytes are little-endian")
def test_the_request_is_what_the_kernel_reads() -> None:
    message = encode(7, 3, vlan=100, qos=2, proto=0x88A8)
    words = "".join(line[4:43] for line in LITTLE_ENDIAN.splitlines()).replace(" ", "")
    assert message.hex() == words


def test_the_kernels_refusal_is_an_error_with_its_errno() -> None:
    with pytest.raises(OSError, match=r".") as caught:
        set_vf_vlan(1, 0, vlan=1, qos=0, proto=0x8100)  # lo has no VFs; without root: not permitted
    assert caught.value.errno in (errno.EOPNOTSUPP, errno.EPERM)
