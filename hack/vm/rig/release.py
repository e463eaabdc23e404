"""Which distribution this is, and from which Debian suites QEMU and the kernel are taken."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rig.errors import Impossible

DEBIAN_MIRROR = "http://deb.debian.org/debian"


@dataclass(frozen=True)
class Release:
    """A Linux distribution, in the words of /etc/os-release."""

    distribution: str
    number: float
    codename: str

    @property
    def is_debian(self) -> bool:
        return self.distribution == "debian"

    @property
    def tool_suites(self) -> tuple[str, ...]:
        """Suites that programs are installed from; none means the computer's own apt sources.

        `igb` came with QEMU 8.0, which Debian 12 has in its backports only.
        """
        if self.codename == "bookworm":
            return ("bookworm", "bookworm-updates", "bookworm-backports")
        return ()

    @property
    def kernel_suite(self) -> str:
        """Debian suite of the kernel: 6.12, the series that all was measured on."""
        return "bookworm-backports" if self.codename == "bookworm" else "trixie"


def parse(os_release: str) -> Release:
    """Read /etc/os-release. Raises Impossible for a distribution the rig does not know."""
    fields = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', os_release, re.MULTILINE))
    name = fields.get("PRETTY_NAME", "this distribution")
    number = re.match(r"\d+(?:\.\d+)?", fields.get("VERSION_ID", ""))
    release = Release(
        fields.get("ID", ""), float(number[0]) if number else float("inf"), fields.get("VERSION_CODENAME", "")
    )
    oldest = {"debian": 12.0, "ubuntu": 24.04}.get(release.distribution)
    if oldest is None:
        raise Impossible(f"{name} is not supported: Debian 12 or later is needed (Ubuntu 24.04 or later may do)")
    if release.number < oldest:
        raise Impossible(f"{name} is too old: its QEMU has no igb adapter; Debian 12 or Ubuntu 24.04 is needed")
    return release
