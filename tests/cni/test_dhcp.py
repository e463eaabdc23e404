"""Addresses from the real dhcp plugin: its daemon, and a small DHCP server behind the fabric."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cni.desk import PLUGINS
from tests.cni.tiny_node import Rig, mac_of, vf
from tests.waiting import until

SERVER = """
import socket, struct, sys
ADDRESS, MASK, ME = (socket.inet_aton(text) for text in ("10.77.0.9", "255.255.255.0", "10.77.0.1"))
NAMES = {1: "DISCOVER", 3: "REQUEST", 4: "DECLINE", 7: "RELEASE"}
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
server.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"fabric")
server.bind(("", 67))
print("READY", flush=True)
while True:
    packet = server.recv(2048)
    options, at = {}, 240
    while packet[at] != 255:
        if packet[at] == 0:
            at += 1
            continue
        options[packet[at]] = packet[at + 2 : at + 2 + packet[at + 1]]
        at += 2 + packet[at + 1]
    kind = options[53][0]
    print(NAMES.get(kind, kind), packet[28:34].hex(":"), flush=True)
    if kind in (1, 3):
        head = struct.pack("!4B4sHH4s4s4s4s", 2, 1, 6, 0, packet[4:8], 0, 0x8000, bytes(4), ADDRESS, ME, bytes(4))
        told = [(53, bytes([2 if kind == 1 else 5])), (54, ME), (51, struct.pack("!I", 3600)), (1, MASK), (3, ME)]
        body = b"".join(bytes([code, len(value)]) + value for code, value in told) + bytes([255])
        server.sendto(head + packet[28:44] + bytes(192) + b"\\x63\\x82\\x53\\x63" + body, ("255.255.255.255", 68))
"""


class Dhcp:
    """The plugin's daemon and the server that it asks."""

    def __init__(self, rig: Rig) -> None:
        self._log, self.socket = rig.folder / "dhcp.log", rig.folder / "dhcp.sock"
        enter = ["nsenter", f"--net={rig.folder / 'fabric.netns'}"]
        subprocess.run([*enter, "ip", "address", "add", "10.77.0.1/24", "dev", "fabric"], check=True)
        with self._log.open("w") as log:
            self._processes = [subprocess.Popen([*enter, sys.executable, "-c", SERVER], stdout=log)]
        program = shutil.which("dhcp", path=PLUGINS)
        assert program is not None
        self._said = rig.folder / "daemon.log"
        with self._said.open("w") as said:
            command = [program, "daemon", "-socketpath", str(self.socket)]
            self._processes.append(subprocess.Popen(command, stderr=said))
        until(lambda: self.socket.exists() and "READY" in self._log.read_text())

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    @property
    def ipam(self) -> dict[str, Any]:
        return {"type": "dhcp", "daemonSocketPath": str(self.socket)}

    def heard(self, kind: str) -> set[str]:
        """List the MACs that the server has heard something from, maybe more than once."""
        lines = (line.split() for line in self._log.read_text().splitlines())
        return {words[1] for words in lines if words[0] == kind}

    def await_release(self, mac: str) -> None:
        """Wait until the server has heard that an address is free. A failure shows what each of the three did.

        Nobody acknowledges a DHCPRELEASE (RFC 2131, 4.4.6): whether the interface was still in the pod when the daemon
        sent it shows in its log alone.
        """
        try:
            until(lambda: self.heard("RELEASE") == {mac})
        except AssertionError as error:
            raise AssertionError(f"server:\n{self._log.read_text()}daemon:\n{self._said.read_text()}") from error


@pytest.fixture
def dhcp(rig: Rig) -> Iterator[Dhcp]:
    if shutil.which("dhcp", path=PLUGINS) is None:
        pytest.skip("the standard plugins are not installed (Debian: containernetworking-plugins)")
    made = Dhcp(rig)
    yield made
    made.close()


def test_an_address_comes_from_the_server_and_goes_back_to_it(rig: Rig, dhcp: Dhcp) -> None:
    pod, before = rig.pod(), rig.found()
    answer = rig.add("c1", pod, ipam=dhcp.ipam)
    assert [ip["address"] for ip in answer["ips"]] == ["10.77.0.9/24"]
    assert "10.77.0.9/24" in rig.run_in(pod, "ip", "address", "show", "dev", "net1")
    assert dhcp.heard("REQUEST") == {mac_of(0)}
    rig.check("c1", pod)
    rig.detach("c1", pod)
    dhcp.await_release(mac_of(0))
    assert (rig.found(), rig.ledger.quarantines(), rig.ledger.owed_leases()) == (before, (), ())


def test_the_daemon_keeps_no_vf_in_a_namespace_whose_pod_has_gone(rig: Rig, dhcp: Dhcp) -> None:
    """A thread of its sits in the namespace for as long as it has the lease, and so does the VF."""
    pod, before = rig.pod(), rig.found()
    rig.add("c1", pod, ipam=dhcp.ipam)
    rig.remove(pod)
    rig.delete("c1", None)
    rig.await_healed()
    assert (rig.found()[1:], rig.ledger.quarantines(), rig.ledger.owed_leases()) == (before[1:], (), ())
    assert rig.machine.find_netdev(vf(0)) is not None
