"""The programs the rig needs on this computer, installed when they are missing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rig import programs
from rig.apt import Apt
from rig.errors import Impossible
from rig.progress import Deadline, say, step
from rig.release import Release

QEMU = "qemu-system-x86_64"
PACKAGES = {
    "busybox": "busybox-static",
    "depmod": "kmod",
    "zstd": "zstd",
    "ip": "iproute2",
    "rdma": "iproute2",
    "setpriv": "util-linux",
}
"""Program → package. `ip` and `rdma` are for the guest, which has this computer's programs."""


def ensure(release: Release, cache: Path, deadline: Deadline) -> None:
    """Install what is missing. Raises Impossible without root, without apt, or if QEMU stays too old."""
    missing = sorted({package for tool, package in PACKAGES.items() if not shutil.which(tool)})
    qemu = [] if has_igb(deadline) else ["qemu-system-x86", "ipxe-qemu"]
    keyring = [] if release.is_debian else _keyring()
    wanted = missing + qemu + keyring
    if not wanted:
        return
    if not shutil.which("apt-get"):
        raise Impossible(f"apt-get is missing, and so are {' '.join(wanted)}")
    if os.geteuid() != 0:
        raise Impossible(f"{' '.join(wanted)} must be installed, which needs root")
    say(f"this computer lacks {' '.join(wanted)}: installing")
    with step(f"installing {' '.join(wanted)}", quiet_seconds=5):
        apt = Apt(cache / "apt-tools", release.tool_suites, deadline)
        if missing + keyring:
            apt.install(missing + keyring, release.codename if release.tool_suites else None)
        if qemu:
            apt.install(qemu, release.tool_suites[-1] if release.tool_suites else None)
    if not has_igb(deadline):
        raise Impossible(f"the installed {QEMU} has no igb adapter: version 8.0 or later is needed")


def _keyring() -> list[str]:
    return [] if Path("/usr/share/keyrings/debian-archive-keyring.gpg").exists() else ["debian-archive-keyring"]


def has_igb(deadline: Deadline) -> bool:
    """Tell whether QEMU is there and can emulate an SR-IOV adapter."""
    if not shutil.which(QEMU):
        return False
    try:
        return 'name "igb"' in programs.run([QEMU, "-device", "help"], deadline)
    except programs.ProgramFailed:
        return False
