"""The machine's igb adapters, read from sysfs without any code that is under test."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXTRA = Path(os.environ.get("NODEFABRIC_EXTRA_MODULES", "/nonexistent"))
"""Drivers that hack/vm/extra-modules has built."""
PCI_DEVICES = Path("/sys/bus/pci/devices")
SECONDS = 30.0
"""How long to wait for the emulated kernel and its drivers."""


class ProgramFailed(AssertionError):
    """A program ended with an error."""


def run(*argv: str) -> str:
    """Run a program; its words are in the error if it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ProgramFailed(f"{' '.join(argv)}: {done.stdout}{done.stderr}")
    return done.stdout


def ip(*argv: str) -> str:
    return run("ip", *argv)


def wait_until(what: str, condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """Wait for a true result and return it."""
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.05)
    return result


def shows(look: Callable[[], Any], expected: Any) -> bool:
    """Tell whether a look at interfaces shows what is expected; one that a new name disturbed does not, yet."""
    try:
        return bool(look() == expected)
    except ProgramFailed:
        return False


def netdevs(address: str) -> tuple[str, ...]:
    """Interfaces of a PCI function that sit in this namespace."""
    folder = PCI_DEVICES / address / "net"
    return tuple(sorted(os.listdir(folder))) if folder.exists() else ()


def link(ifname: str, netns: str | None = None) -> dict[str, Any]:
    """What `ip` shows of an interface."""
    words = ["-n", netns] if netns else []
    shown: dict[str, Any] = json.loads(ip(*words, "-json", "-details", "link", "show", "dev", ifname))[0]
    return shown


@dataclass(frozen=True)
class Pf:
    address: str
    netdev: str

    @property
    def folder(self) -> Path:
        return PCI_DEVICES / self.address

    def set_vfs(self, count: int) -> None:
        """Make so many VFs and wait for their interfaces. Going from some to others needs 0 in between."""
        current = self.folder / "sriov_numvfs"
        if int(current.read_text()) != count:
            current.write_text(str(count))
        wait_until(f"{count} VFs with interfaces on {self.address}", lambda: len(self._complete()) == count)
        # igb resets its link when VFs come or go, and takes no rate while it does not know the link's speed.
        wait_until(f"carrier on {self.netdev}", lambda: self._carrier() == "1")

    def _carrier(self) -> str:
        return Path("/sys/class/net", self.netdev, "carrier").read_text().strip()

    def _complete(self) -> list[str]:
        return [address for address in self.vfs() if netdevs(address)]

    def vfs(self) -> tuple[str, ...]:
        """PCI addresses of the VFs, by index."""
        links = sorted(self.folder.glob("virtfn*"), key=lambda p: int(p.name.removeprefix("virtfn")))
        return tuple(p.resolve().name for p in links)

    def settings(self, vf_index: int) -> dict[str, Any]:
        """What the PF enforces on a VF, as `ip` reads it."""
        shown: dict[str, Any] = link(self.netdev)["vfinfo_list"][vf_index]
        return shown


MakeVfs = Callable[[Pf, int], tuple[str, ...]]
"""Makes so many VFs of a PF, and returns their addresses."""
MakePod = Callable[[], str]
"""Makes a network namespace, and returns its name."""


def find_pfs() -> tuple[Pf, ...]:
    """The igb adapters, in the order of their interfaces' names."""
    addresses = [p.name for p in Path("/sys/bus/pci/drivers/igb").glob("0000:*")]
    return tuple(sorted((Pf(a, netdevs(a)[0]) for a in addresses), key=lambda pf: pf.netdev))


def cable(number: int, state: str) -> None:
    """Pull an adapter's cable (`off`), or plug it in again: the computer that runs the machine is asked to."""
    with open(os.environ["VMRUN_CONTROL"], "w") as control:
        control.write(f"LINK pf{number} {state}\n")
