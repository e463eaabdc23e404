"""LLDP through the receive filters of a real adapter: it drops groups that nobody has asked for."""

from __future__ import annotations

import select
import socket
import time
from contextlib import closing

import pytest

from agent.hardware.lldp import GROUPS, LldpSockets, parse_frame
from tests.agent.hardware.frames import announcement, send
from tests.vm.adapters import Pf


@pytest.mark.parametrize("group", GROUPS)
def test_what_another_port_of_the_switch_says_comes_in(pfs: tuple[Pf, ...], group: bytes) -> None:
    speaking, listening = pfs
    with closing(LldpSockets()) as sockets:
        sockets.follow({listening.netdev: (socket.if_nametoindex(listening.netdev), listening.address)})
        deadline = time.monotonic() + 30
        found: list[tuple[str, bytes]] = []
        while not found:
            assert time.monotonic() < deadline
            send(speaking.netdev, announcement("leaf-vm", group))
            select.select([sockets.fileno()], [], [], 0.2)
            found = list(sockets.read())
        nic, frame = found[0]
        assert nic == listening.address
        assert parse_frame(frame)[0].system_name == "leaf-vm"
