"""Run by the image's own Python, with nothing but the image's files: loads what the agent loads, listens where it does.

Says `listening` when it waits for a link nf0, which `tests.daemonset.test_image` makes; then a line for each thing that
fails.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from agent.hardware import netns
from agent.hardware.lldp import LldpSockets
from agent.hardware.netlink.links import Netlink
from agent.hardware.netlink.rdma_netlink import RdmaNetlink
from agent.hardware.nvml.library import Nvml, is_installed
from agent.hardware.uevents import Uevents
from agent.kubelet.podresources import PodResources
from agent.ledger import Ledger
from agent.model.allocation import Hold
from hack.sim.kubelet import Kubelet

DEADLINE = 30.0
FOLDER = Path("/tmp")


def kernel_events() -> None:
    """Uevents (libudev) and link messages."""
    wanted = {"net add nf0", "link nf0 changed"}
    all_heard = threading.Event()

    def hear(what: str, change: object) -> None:
        wanted.discard(what)
        if not wanted:
            all_heard.set()

    watch = Uevents(hear, virtual_links=True)
    try:
        assert not watch.unheard, watch.unheard
        print("listening", flush=True)
        assert all_heard.wait(DEADLINE), f"not heard: {wanted}"
    finally:
        watch.close()


def links() -> None:
    """rtnetlink, by our own codec and by pyroute2; and the way into a network namespace."""
    links = Netlink()
    try:
        assert links.find("nf0") is not None
        links.configure("nf0", None, ("192.0.2.1/24",), ())
        assert links.addresses("nf0", None) == ("192.0.2.1/24",)
        own = os.open("/proc/self/ns/net", os.O_RDONLY)
        assert netns.run_in(own, lambda: links.find("nf0")) is not None
    finally:
        links.close()


def rdma() -> None:
    """RDMA netlink, as far as the kernel has it."""
    rdma = RdmaNetlink()
    rdma.mode()
    rdma.close()


def lldp() -> None:
    """Packet sockets."""
    sockets = LldpSockets()
    sockets.follow({"nf0": (socket.if_nametoindex("nf0"), "nf0")})
    sockets.close()


def gpus() -> None:
    """libnvidia-ml, which no machine here has: its absence must be told as such."""
    assert not is_installed()
    nvml = Nvml()
    assert nvml.read().unavailable, "nobody says that the library is not there"
    nvml.close()


def ledger() -> None:
    """SQLite"""
    with_books = Ledger.open(FOLDER / "ledger.db", "boot")
    with_books.grant([Hold("a", "rdma/vf", ("0000:3b:00.1",))])
    assert [hold.key for hold in with_books.holds()] == ["a"]
    with_books.close()


def kubelet() -> None:
    """gRPC over a Unix socket"""

    async def ask() -> None:
        served = Kubelet(FOLDER, netns_dir=FOLDER / "netns")
        await served.start()
        client = PodResources.of_kubelet(FOLDER)
        assert await client.list() == ()
        await client.close()
        await served.close()

    asyncio.run(ask())


def tls() -> None:
    """OpenSSL, for the API server"""
    ssl.create_default_context()


CHECKS: tuple[Callable[[], None], ...] = (*(kernel_events, links, rdma, lldp, gpus, ledger, kubelet, tls),)


def main() -> int:
    failed = 0
    for check in CHECKS:
        try:
            check()
        except Exception as error:  # and the others are tried all the same
            print(f"{check.__name__}: {type(error).__name__}: {error}", flush=True)
            failed += 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
