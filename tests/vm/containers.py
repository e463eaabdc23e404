"""Containers played in the machine: a process with the variables, files and namespaces that a CDI spec gives to one.

A container is a space of process numbers: with its first process the kernel ends all that it left running.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
EVERYWHERE = ("null", "zero", "full", "random", "urandom", "tty")
"""Device files that a runtime gives to each container."""


@dataclass(frozen=True)
class Container:
    """Runs programs in a pod's network, with what its edits say: no other variable, and no other device of the host."""

    pod: str
    """Name of its network namespace, and of its host."""
    edits: Mapping[str, Any]
    more: tuple[tuple[str, str], ...] = ()
    """Variables of its image."""

    @property
    def env(self) -> dict[str, str]:
        own = {"PATH": PATH, "HOME": "/root", "TMPDIR": f"/run/tmp-{self.pod}", **dict(self.more)}
        return own | dict(entry.split("=", 1) for entry in self.edits.get("env", ()))

    def argv(self, script: str) -> list[str]:
        """Spell what runs a shell script in it. Files of the host come below a new /run/nodefabric."""
        mounts = [
            f"hostname {self.pod}",
            f"mkdir -p /run/nodefabric {self.env['TMPDIR']}",
            "mount -t tmpfs none /run/nodefabric",
            *self._devices(),
        ]
        for mount in self.edits.get("mounts", ()):
            source, target = shlex.quote(mount["hostPath"]), shlex.quote(mount["containerPath"])
            mounts += [f"touch {target}", f"mount --bind {source} {target}", f"mount -o remount,bind,ro {target}"]
        variables = [f"{name}={value}" for name, value in self.env.items()]
        inside = " && ".join((*mounts, f'exec env -i "$@" sh -c {shlex.quote(script)}'))
        spaces = ["--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        apart = ["unshare", *spaces, "sh", "-c", inside, "sh", *variables]
        return ["ip", "netns", "exec", self.pod, *apart]

    def _devices(self) -> Iterator[str]:
        """Put a /dev in place of the host's that has what each container has, and the device nodes of the edits."""
        own = f"/run/dev-{self.pod}"
        yield f"mkdir -p {own} && mount -t tmpfs none {own} && mkdir {own}/shm"
        yield f"cp -a {' '.join(f'/dev/{name}' for name in EVERYWHERE)} {own}"
        for node in self.edits.get("deviceNodes", ()):
            target, status = (
                shlex.quote(own + node["path"].removeprefix("/dev")),
                os.stat(node.get("hostPath", node["path"])),
            )
            number = f"{os.major(status.st_rdev)} {os.minor(status.st_rdev)}"
            # By number: one container may start another, and has not its files.
            yield f"mkdir -p $(dirname {target}) && mknod -m {status.st_mode & 0o777:o} {target} c {number}"
        yield f"mount --bind {own} /dev"

    def start(self, script: str) -> subprocess.Popen[str]:
        """Start a shell script in it."""
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(self.argv(script), start_new_session=True, **out)  # type: ignore[call-overload,no-any-return]

    def run(self, script: str, seconds: float = 120) -> str:
        """Run a shell script in it, and return what it says. Raises AssertionError if it fails."""
        return ended(self.start(script), seconds)


def ended(process: subprocess.Popen[str], seconds: float = 120) -> str:
    """Wait for a program's end, and return what it said. Raises AssertionError if it failed, or takes too long."""
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        raise AssertionError(f"not within {seconds:.0f} s: {said}") from None
    assert process.returncode == 0, f"{process.returncode}: {said}"
    return said
