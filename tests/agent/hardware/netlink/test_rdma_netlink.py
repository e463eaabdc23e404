"""RDMA netlink: requests to the byte, answers as Linux 6.12 gave them, and a socket's errors."""

from __future__ import annotations

import errno
import os
import struct
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.errors import DeviceBusy, DriverUnavailable, HardwareError, NetlinkFailed
from agent.hardware.host import RdmaLink
from agent.hardware.machine import Machine
from agent.hardware.netlink.links import Netlink
from agent.hardware.netlink.rdma_netlink import (
    CMD_GET,
    CMD_GET_CHARDEV,
    CMD_PORT_GET,
    NETNS_MODE,
    RdmaNetlink,
    decode_mode,
)
from agent.hardware.netlink.rtnetlink import NLMSG_DONE, NLMSG_ERROR, NetlinkSocket
from agent.hardware.netlink.vf_control import PfNetlink
from agent.hardware.nvml.monitor import GpuMonitor
from tests.agent.hardware.attributes import attribute

NLDEV_GET = 5 << 10 | CMD_GET
SAMPLE = RdmaLink(3, "rxe0", "5054:00ff:fe12:3456")


def message(kind: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


def device(index: int, name: str | bytes, guid: int) -> bytes:
    return (
        attribute(1, struct.pack("=I", index))
        + attribute(2, (name if isinstance(name, bytes) else name.encode()) + b"\0")
        + attribute(3, struct.pack("=I", 1))
        + attribute(5, b"28.39.1002\0")
        + attribute(6, struct.pack("=Q", guid))
        + attribute(67, b"roce\0")
    )


def test_modes_are_named() -> None:
    assert decode_mode({NETNS_MODE: b"\0"}) == "exclusive"
    assert decode_mode({NETNS_MODE: b"\1"}) == "shared"
    assert decode_mode({NETNS_MODE: b"\7"}) == "unknown mode 7"
    assert decode_mode({}) == "shared"


class Kernel(NetlinkSocket):
    """Answers requests in a test, one packet for each, in place of a netlink socket."""

    def __init__(self, *packets: bytes) -> None:
        self._socket: Any = self
        self.packets = list(packets)
        self.asked = ""

    def send(self, request: bytes) -> None:
        self.asked = request.hex()

    def recvfrom(self, most: int) -> tuple[bytes, tuple[int, int]]:
        return self.packets.pop(0), (0, 0)

    def close(self) -> None:
        return None


def ended(kind: int, number: int) -> bytes:
    return message(kind, struct.pack("=i", -number) + bytes(16))


REQUESTS = yaml.safe_load(Path(__file__).with_name("rdma_requests.yaml").read_text())


@pytest.mark.parametrize("row", REQUESTS)
def test_a_request_is_as_the_kernel_wants_it(row: dict[str, Any]) -> None:
    answer = {"end": ended(NLMSG_DONE, 0), "done": ended(NLMSG_ERROR, 0)}.get(row["answer"])
    kernel = Kernel(answer or message(5 << 10 | row["answer"], b""))
    name, *arguments = row["call"]
    with closing(through(kernel)) as rdma:
        getattr(rdma, name)(*(SAMPLE if each == "device" else each for each in arguments))
    assert kernel.asked == row["request"].replace(" ", "")


def test_a_char_device_is_named() -> None:
    body = attribute(72, struct.pack("=Q", 231 << 8 | 192)) + attribute(70, b"uverbs0\0")
    with closing(through(Kernel(message(5 << 10 | CMD_GET_CHARDEV, body)))) as rdma:
        assert rdma.char_device(SAMPLE, "uverbs") == "uverbs0"


def test_a_list_goes_on_until_its_end() -> None:
    kernel = Kernel(
        message(NLDEV_GET, device(0, "mlx5_0", 1)) + message(NLDEV_GET, device(1, "mlx5_1", 2)),
        message(NLDEV_GET, device(2, "mlx5_2", 0x0C42A10300651234)),
        ended(NLMSG_DONE, 0),
    )
    with closing(through(kernel)) as rdma:
        found = rdma.devices()
    assert [each.name for each in found] == ["mlx5_0", "mlx5_1", "mlx5_2"]
    assert found[2] == RdmaLink(2, "mlx5_2", "0c42:a103:0065:1234")


def test_a_device_that_came_back_under_a_name_that_is_no_text_is_found(tmp_path: Path) -> None:
    """A pod may call its device anything, and no two of these are the same."""
    functions = {b"mlx5_\xff": "0000:3b:00.2", b"mlx5_\xfe": "0000:3b:00.3"}
    packets = [message(NLDEV_GET, device(n, name, n)) for n, name in enumerate(functions)]
    for name, address in functions.items():
        os.makedirs(os.fsencode(tmp_path / "sys/bus/pci/devices" / address / "infiniband") + b"/" + name)
    found = []
    for address in functions.values():
        kernel = Kernel(*packets, ended(NLMSG_DONE, 0))
        with closing(through(kernel)) as rdma, closing(Netlink()) as links:
            machine = Machine(tmp_path, links, PfNetlink(root=tmp_path), GpuMonitor(is_installed=lambda: False), rdma)
            seen = machine.find_rdma(address)
            assert seen is not None
            found.append(seen.index)
            assert seen.name.encode()  # the books take it
    assert found == [0, 1]


@pytest.mark.parametrize(
    ("told", "is_own"),
    [
        (attribute(50, struct.pack("=I", 7)) + attribute(51, b"eth0\0"), True),
        (attribute(3, struct.pack("=I", 1)), False),
    ],
    ids=["the host's", "a pod's"],
)
def test_the_kernel_names_an_interface_to_its_own_namespace_only(told: bytes, is_own: bool) -> None:
    devices = Kernel(message(NLDEV_GET, device(4, "rxe0", 1)), ended(NLMSG_DONE, 0))
    port = Kernel(message(5 << 10 | CMD_PORT_GET, told))
    kernels = iter((devices, port))
    with closing(RdmaNetlink(connect=lambda: next(kernels))) as rdma:
        assert rdma.is_over_own_interface("rxe0") == is_own
    assert port.asked.endswith("0800 0100 04000000 0800 0300 01000000".replace(" ", ""))


def test_a_device_that_is_gone_or_refused_is_over_no_interface_of_the_host() -> None:
    for kernel in (Kernel(ended(NLMSG_DONE, 0)), Kernel(ended(NLMSG_ERROR, errno.EPERM))):
        with closing(through(kernel)) as rdma:
            assert not rdma.is_over_own_interface("rxe0")


def through(kernel: NetlinkSocket) -> RdmaNetlink:
    return RdmaNetlink(connect=lambda: kernel)


def test_a_refusal_says_what_was_tried() -> None:
    moves = pytest.raises(NetlinkFailed, match="move RDMA device rxe0 to another network namespace")
    with closing(through(Kernel(ended(NLMSG_ERROR, errno.EOPNOTSUPP)))) as rdma, moves as caught:
        rdma.move_in(SAMPLE, 0)
    assert caught.value.errno == errno.EOPNOTSUPP


def test_without_rdma_there_is_no_mode() -> None:
    def absent() -> NetlinkSocket:
        raise OSError(errno.EPROTONOSUPPORT, "Protocol not supported")

    rdma = RdmaNetlink(connect=absent)
    assert rdma.mode() is None
    with pytest.raises(DriverUnavailable, match="load the ib_core module"):
        rdma.devices()
    rdma.close()


def test_after_the_end_nobody_takes_a_strange_namespace_for_the_host() -> None:
    rdma = RdmaNetlink()
    rdma.close()
    rdma.close()
    with pytest.raises(HardwareError, match="the agent is ending"):
        rdma.move_out(SAMPLE, 0)


def test_a_step_that_does_not_end_is_waited_for_with_a_limit_and_named() -> None:
    """Its driver may hang in sysfs, and every other pod's device would wait behind it."""
    rdma = RdmaNetlink(wait_seconds=0.05)
    holds, ends = threading.Event(), threading.Event()

    def hang() -> None:
        with rdma.renumbering("0000:3b:02.1"), rdma.renumbering("mlx5_3"):  # the same thread may take it again
            holds.set()
            assert ends.wait(30)

    hanging = threading.Thread(target=hang)
    hanging.start()
    try:
        assert holds.wait(30)
        with pytest.raises(
            DeviceBusy, match=r"0000:3b:02\.2 has waited 0\.05 s .*: 0000:3b:02\.1 is still being moved"
        ):
            rdma.renumbering("0000:3b:02.2").__enter__()
        with pytest.raises(DeviceBusy, match=r"rxe0 has waited 0\.05 s .*: 0000:3b:02\.1 is still being moved"):
            rdma.move_out(SAMPLE, 0)
    finally:
        ends.set()
        hanging.join()
    with rdma.renumbering("0000:3b:02.2"):
        pass
    rdma.close()
