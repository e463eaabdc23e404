"""An interface on its way to the host while the agent ends."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from agent.errors import HardwareError
from agent.hardware.host import LinkChange
from agent.hardware.netlink.links import Netlink


def namespace(path: Path) -> int:
    """Make a network namespace and open it."""
    path.touch()
    subprocess.run(["unshare", f"--net={path}", "true"], check=True)
    return os.open(path, os.O_RDONLY)


def test_a_late_detach_takes_no_other_namespace_for_the_host(own_network: None, tmp_path: Path) -> None:
    subprocess.run(["ip", "link", "add", "v0", "type", "veth", "peer", "name", "p0"], check=True)
    pod, witness = namespace(tmp_path / "pod"), Netlink()
    ending = Netlink()
    link = ending.find("v0")
    assert link is not None
    ending.move_in(link, pod, LinkChange())
    ending.close()
    reused = [namespace(tmp_path / f"other{n}") for n in range(8)]  # one of them has the number of the host's
    with pytest.raises(HardwareError):
        ending.move_out(link, pod, LinkChange())
    assert witness.find("v0", pod) is not None
    witness.close()
    for descriptor in [pod, *reused]:
        os.close(descriptor)
