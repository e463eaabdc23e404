"""A node whose sysfs changes as a kernel would change it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from agent.hardware import recorded
from agent.model.change import NOTHING, Change, of_function, of_netdev
from hack.node_tree import Ids, NodeTree, guid, mac

PORT = Ids("060400", "8086", "a110", driver="pcieport")
NIC = Ids("020000", "15b3", "1021", "15b3:0023", "mlx5_core")
VF = Ids("020000", "15b3", "101e", "15b3:0023", "mlx5_core")
USB = Ids("0c0330", "8086", "a12f", driver="xhci_hcd")
PORT_UP: dict[str, object] = {
    "link_layer": "InfiniBand",
    "lid": "0x1",
    "phys_state": "5: LinkUp",
    "state": "4: ACTIVE",
    "rate": "200",
}


def tiny() -> NodeTree:
    """Two PFs with two VFs each, all with interface and RDMA device, and a controller of no interest."""
    node = NodeTree("tiny", "for tests")
    node.numa(["0-3"], 1 << 10)
    root = node.pci("pci0000:3a", "0000:3a:00.0", PORT, 0)
    node.pci(root, "0000:3c:00.0", USB, 0)
    number = 0
    for function in (0, 1):
        pf = node.pci(root, f"0000:3b:00.{function}", NIC, 0)
        below = node.vfs(pf, VF, 0, total=4, count=2, offset=2 + function)
        for address in (pf, *below):
            node.netdev(address, f"eth{number}", mac("02:00:00", number), up=True, speed=1000)
            node.rdma(address, f"mlx5_{number}", guid("946d:ae03:00", number), [PORT_UP], issm=True)
            number += 1
    return node


PFS = ("0000:3b:00.0", "0000:3b:00.1")
FUNCTIONS = (*PFS, "0000:3b:00.2", "0000:3b:00.3", "0000:3b:00.4", "0000:3b:00.5")


class Node:
    """A node's sysfs that changes as a kernel would change it. Every step returns what its events name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        recorded.unpack(recorded.parse(tiny().document(), "test"), root)
        self.away = root / "away"
        self.away.mkdir()
        self.last = 100

    def folder(self, address: str) -> Path:
        return self.root / "sys/devices/pci0000:3a/0000:3a:00.0" / address

    def entries(self, family: str, address: str) -> list[Path]:
        """Links of a class that lead below a function."""
        folder = self.root / "sys/class" / family
        return sorted(e for e in folder.iterdir() if f"/{address}/" in os.readlink(e)) if folder.is_dir() else []

    def here(self, address: str) -> bool:
        return self.folder(address).is_dir()

    # ------------------------------------------------------------------ steps

    def set_carrier(self, address: str, value: str) -> Change:
        changed = NOTHING
        for entry in self.entries("net", address):
            (entry / "carrier").write_text(f"{value}\n")
            changed |= of_netdev(entry.name)
        return changed

    def set_mtu(self, address: str, value: str) -> Change:
        for entry in self.entries("net", address):
            (entry / "mtu").write_text(f"{value}\n")
        return of_function(address)

    def set_port(self, address: str, value: str) -> Change:
        for entry in self.entries("infiniband", address):
            (entry / "ports/1/state").write_text(f"{value}\n")
        return of_function(address)

    def rename_netdev(self, address: str, value: str) -> Change:
        for entry in self.entries("net", address):
            if not (entry.parent / value).is_symlink():
                self._rename(entry, value)
        return of_function(address)

    def swap_netdevs(self, address: str, _: str) -> Change:
        """Two interfaces change names, and only what one of them is about was told so far."""
        other = next((f for f in FUNCTIONS if f != address and self.entries("net", f)), None)
        mine = self.entries("net", address)
        if other is None or not mine:
            return NOTHING
        theirs = self.entries("net", other)[0]
        names = mine[0].name, theirs.name
        third = self._rename(mine[0], "swapping")
        self._rename(theirs, names[0])
        self._rename(third, names[1])
        return of_function(address)

    def move_netdev(self, address: str, _: str) -> Change:
        """Into a pod, or back."""
        return self._move("net", address, self.away / address)

    def move_rdma(self, address: str, _: str) -> Change:
        """Into a pod, or back: its character devices stay."""
        return self._move("infiniband", address, self.away / f"rdma-{address}")

    def _move(self, family: str, address: str, kept: Path) -> Change:
        if kept.exists():
            name = next(kept.iterdir()).name
            if self.here(address) and not (self.root / "sys/class" / family / name).is_symlink():
                (self.folder(address) / family).mkdir(exist_ok=True)
                shutil.move(kept / name, self.folder(address) / family / name)
                self._link(family, name, self.folder(address) / family / name)
                kept.rmdir()
        else:
            for entry in self.entries(family, address)[:1]:
                kept.mkdir()
                shutil.move(os.path.realpath(entry), kept / entry.name)
                entry.unlink()
        return of_function(address)

    def rename_rdma(self, address: str, value: str) -> Change:
        taken = {entry.name for kept in self.away.glob("rdma-*") for entry in kept.iterdir()}  # unique on the node
        for entry in self.entries("infiniband", address):
            if not (entry.parent / value).is_symlink() and value not in taken:
                before = entry.name
                self._rename(entry, value)
                for family in ("infiniband_verbs", "infiniband_mad"):
                    for char in self.entries(family, address):
                        if (char / "ibdev").read_text().strip() == before:
                            (char / "ibdev").write_text(f"{value}\n")
        return of_function(address)

    def drop_char_devices(self, address: str, _: str) -> Change:
        """The module ib_umad goes: nothing but its own events tell it."""
        for char in self.entries("infiniband_mad", address):
            shutil.rmtree(os.path.realpath(char))
            char.unlink()
        return of_function(address)

    def add_char_device(self, address: str, _: str) -> Change:
        owners = self.entries("infiniband", address)
        if owners:
            self.last += 1
            folder = self.folder(address) / "infiniband_mad" / f"umad{self.last}"
            folder.mkdir(parents=True)
            (folder / "ibdev").write_text(f"{owners[0].name}\n")
            (folder / "port").write_text("1\n")
            self._link("infiniband_mad", folder.name, folder)
        return of_function(address)

    def bind(self, address: str, value: str) -> Change:
        """To another driver, or to none."""
        if self.here(address):
            link = self.folder(address) / "driver"
            link.unlink(missing_ok=True)
            if value:
                link.symlink_to(f"../../../../bus/pci/drivers/{value}")
        return of_function(address)

    def remove(self, address: str, _: str) -> Change:
        """A VF goes, with all that hangs on it."""
        if not self.here(address) or address in PFS:
            return NOTHING
        for family in ("net", "infiniband", "infiniband_verbs", "infiniband_mad"):
            for entry in self.entries(family, address):
                entry.unlink()
        pf = (self.folder(address) / "physfn").resolve()
        for link in pf.glob("virtfn*"):
            if os.path.basename(os.readlink(link)) == address:
                link.unlink()
        (self.root / "sys/bus/pci/devices" / address).unlink()
        shutil.move(self.folder(address), self.away / f"vf-{address}")
        return of_function(address, bus=True)

    def bring_back(self, address: str, value: str) -> Change:
        """A VF comes again, maybe as another one's number, with nothing bound to it yet."""
        kept = self.away / f"vf-{address}"
        if kept.exists():
            shutil.move(kept, self.folder(address))
            for family in ("net", "infiniband", "infiniband_verbs", "infiniband_mad"):
                shutil.rmtree(self.folder(address) / family, ignore_errors=True)
            (self.root / "sys/bus/pci/devices" / address).symlink_to(
                f"../../../devices/pci0000:3a/0000:3a:00.0/{address}"
            )
            pf = (self.folder(address) / "physfn").resolve()
            link = pf / f"virtfn{int(value) % 4}"
            if not link.is_symlink():
                link.symlink_to(f"../{address}")
        return of_function(address, bus=True)

    def break_attribute(self, address: str, _: str) -> Change:
        for entry in self.entries("net", address):
            (entry / "mtu").write_text("many\n")
        return of_function(address)

    def mend_attribute(self, address: str, _: str) -> Change:
        return self.set_mtu(address, "1500")

    def hide_identity(self, address: str, _: str) -> Change:
        """A device that is left out, and named as a problem; and one that is complete again."""
        path = self.folder(address) / "vendor"
        if path.exists():
            path.unlink()
        elif self.here(address):
            path.write_text("0x15b3\n")
        return of_function(address)

    def add_foreign_netdev(self, _: str, value: str) -> Change:
        """Some pod's veth: no event that counts names it."""
        folder = self.root / "sys/devices/virtual/net" / f"veth{value}"
        if not folder.exists():
            folder.mkdir(parents=True)
            (folder / "ifindex").write_text("99\n")
            self._link("net", folder.name, folder)
        return NOTHING

    def add_usb_netdev(self, _: str, __: str) -> Change:
        """An interface below a controller that was of no interest makes it one."""
        folder = self.folder("0000:3c:00.0") / "usb1/1-1/net/enx1"
        if not folder.exists():
            folder.mkdir(parents=True)
            for name, text in (("ifindex", "77"), ("address", "02:00:00:00:00:99"), ("mtu", "1500")):
                (folder / name).write_text(f"{text}\n")
            self._link("net", "enx1", folder)
        return of_netdev("enx1")

    def _rename(self, entry: Path, name: str) -> Path:
        real = Path(os.path.realpath(entry))
        real.rename(real.with_name(name))
        entry.unlink()
        self._link(entry.parent.name, name, real.with_name(name))
        return entry.with_name(name)

    def _link(self, family: str, name: str, folder: Path) -> None:
        link = self.root / "sys/class" / family / name
        link.symlink_to(os.path.relpath(folder, link.parent))
