"""Real kernel links for a simulated node: each PF and VF is one end of a veth pair.

The other ends are ports of one bridge in a network namespace of its own, the fabric; so pods that
hold VFs really talk to each other, and moving a VF is the kernel's real move. A link's alias holds
the PCI address it stands for. Unlike a VF, a veth end dies with the namespace it is in; `revive`
then does what the kernel does for hardware: the device is in the host again, under another name.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agent.errors import AgentError
from agent.hardware import netns as namespaces
from agent.hardware.netlink.rtnetlink import IFLA_ADDRESS, IFLA_IFALIAS, LinkMessage, NetlinkSocket
from agent.model.device import LinkLayer, Netdev, Snapshot

if TYPE_CHECKING:
    from pyroute2 import IPRoute

BRIDGE = "fabric"
MOST_PORTS = 1023
"""What a bridge of the kernel joins: BR_MAX_PORTS in net/bridge/br_private.h, without port 0."""


def device_of(message: LinkMessage) -> str | None:
    """Return the PCI address that a link of the simulation stands for."""
    return message.text(IFLA_IFALIAS)


@dataclass(frozen=True, slots=True)
class Port:
    """One simulated device's place in the fabric."""

    device: str
    netdev: str
    mac: str
    mtu: int
    port: str
    """Name of the peer in the fabric's namespace."""


def revived_name(port: Port) -> str:
    """Name a link that was made anew, as the kernel would name it: after its number, not as it was."""
    return f"dev{port.port.removeprefix('port')}"


class Fabric:
    """The links of one simulated node, described by files in its folder."""

    def __init__(self, folder: Path) -> None:
        self._netns_path = folder / "fabric.netns"
        document = json.loads((folder / "links.json").read_text())
        self.ports: Mapping[str, Port] = {device: Port(**port) for device, port in document.items()}

    @classmethod
    def build(cls, folder: Path, snapshot: Snapshot) -> Fabric:
        """Make the fabric and a link for every Ethernet interface of the snapshot. Raises AgentError for too many."""
        ports = {
            device.address: Port(device.address, netdev.name, netdev.mac, netdev.mtu, f"port{number}")
            for number, device in enumerate(snapshot.devices)
            if (netdev := device.netdev) is not None and _can_be_simulated(netdev)
        }
        if len(ports) > MOST_PORTS:
            raise AgentError(
                f"a node with {len(ports)} Ethernet interfaces is too large to be simulated on real links: "
                f"the kernel joins {MOST_PORTS} at most"
            )
        (folder / "fabric.netns").touch()
        subprocess.run(
            ["/usr/bin/unshare", f"--net={folder / 'fabric.netns'}", "true"], check=True, stdin=subprocess.DEVNULL
        )
        (folder / "links.json").write_text(json.dumps({d: asdict(p) for d, p in ports.items()}, indent=1))
        fabric = cls(folder)
        with fabric._open() as netns:
            namespaces.run_in(netns, _make_bridge)
            with _socket() as ipr:
                for port in ports.values():
                    _make_link(ipr, netns, port, port.netdev)
            namespaces.run_in(netns, _plug_all)
        return fabric

    @staticmethod
    def destroy(folder: Path) -> None:
        """Unpin the fabric's namespace; its links end with it, and so do their other ends."""
        subprocess.run(["/usr/bin/umount", "--lazy", str(folder / "fabric.netns")], capture_output=True, check=False)

    def cut(self, device: str) -> None:
        """End a device's link, wherever it is. `revive` makes it anew."""
        port = self.ports.get(device)
        if port is not None:
            with self._open() as netns:
                namespaces.run_in(netns, partial(_remove, port.port))

    def revive(self, devices: Collection[str]) -> bool:
        """Make those links anew that died with a namespace. Tell whether there were any."""
        ports = [self.ports[device] for device in devices if device in self.ports]
        if not ports or not (self._dead(ports) or _unmarked(ports)):
            return False
        # Other threads and processes may have seen the same.
        with open(self._netns_path.with_suffix(".lock"), "w") as lock, self._open() as netns:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with _socket() as ipr:
                # Hardware does this at one stroke. Here whoever did it may have been killed before the alias was set.
                for index, port in _unmarked(ports):
                    ipr.link("set", index=index, ifalias=port.device)
                for port in self._dead(ports):
                    _make_link(ipr, netns, port, revived_name(port))
            namespaces.run_in(netns, _plug_all)
        return True

    def _dead(self, ports: Collection[Port]) -> list[Port]:
        with self._open() as netns, NetlinkSocket(netns) as links:
            return [port for port in ports if links.find(port.port) is None]

    @contextmanager
    def _open(self) -> Iterator[int]:
        netns = os.open(self._netns_path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield netns
        finally:
            os.close(netns)


def _socket() -> IPRoute:
    # Its import is slow, and an agent on a node that was laid out earlier makes no link.
    from pyroute2 import IPRoute

    return IPRoute()


def _can_be_simulated(netdev: Netdev) -> bool:
    """An Ethernet interface; or one that says it is IPoIB but was given a MAC of Ethernet's length, for a test."""
    return netdev.link_layer is LinkLayer.ETHERNET or (
        netdev.link_layer is LinkLayer.INFINIBAND and len(netdev.mac) == len("00:00:00:00:00:00")
    )


def _remove(name: str) -> None:
    from pyroute2.netlink.exceptions import NetlinkError

    with _socket() as ipr:
        for index in ipr.link_lookup(ifname=name):
            try:
                ipr.link("del", index=index)
            except NetlinkError as error:
                if error.code != errno.ENODEV:  # ended just now, with a namespace
                    raise


def _make_bridge() -> None:
    with _socket() as ipr:
        ipr.link("add", ifname=BRIDGE, kind="bridge", br_forward_delay=0)
        ipr.link("set", index=_index(ipr, BRIDGE), state="up")


def _make_link(ipr: IPRoute, fabric: int, port: Port, name: str) -> None:
    ipr.link(
        "add",
        ifname=name,
        kind="veth",
        address=port.mac,
        mtu=port.mtu,
        peer={"ifname": port.port, "net_ns_fd": fabric, "mtu": 65535},
    )
    ipr.link("set", index=_index(ipr, name), ifalias=port.device)


def _unmarked(ports: Collection[Port]) -> list[tuple[int, Port]]:
    """Find links that were made, with the MAC of their device, and not yet told which device they stand for."""
    by_mac = {bytes.fromhex(port.mac.replace(":", "")): port for port in ports}
    with NetlinkSocket() as links:
        found = [(link, by_mac.get(link.attributes.get(IFLA_ADDRESS, b""))) for link in links.chosen(lambda link: link)]
    return [(link.ifindex, port) for link, port in found if port is not None and link.text(IFLA_IFALIAS) is None]


def _plug_all() -> None:
    """Join all loose ports to the bridge."""
    with _socket() as ipr:
        bridge = _index(ipr, BRIDGE)
        for link in list(ipr.link("dump")):
            name = link.get_attr("IFLA_IFNAME")
            if name.startswith("port") and link.get_attr("IFLA_MASTER") is None:
                ipr.link("set", index=link["index"], master=bridge, state="up")


def _index(ipr: IPRoute, name: str) -> int:
    return int(ipr.link_lookup(ifname=name)[0])
