"""Settings of IPv6 in a pod: they are files, which the agent's container has read-only but for those of the host."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from agent.config.routing import SYSCTLS
from agent.errors import HardwareError
from agent.hardware import netns as namespaces
from agent.hardware.netlink import configuring
from tests import sandbox


def value(name: str) -> str:
    return Path(f"/proc/sys/net/ipv6/conf/v0/{name}").read_text().strip()


def test_the_hosts_files_are_those_of_whichever_namespace_a_thread_is_in(own_network: None, tmp_path: Path) -> None:
    """Also where an interface of the host has the same name. The container's own files are read-only."""
    make = ("ip", "link", "add", "v0", "type", "veth", "peer", "name", "p0")
    subprocess.run(make, check=True)
    pod, mounted = tmp_path / "pod", tmp_path / "host"
    pod.touch()
    mounted.mkdir()
    subprocess.run(["unshare", f"--net={pod}", *make], check=True)
    netns = os.open(pod, os.O_RDONLY | os.O_CLOEXEC)
    with sandbox.mounts():
        for words in (("--bind", "/proc/sys/net", mounted), ("--bind", "/proc/sys", "/proc/sys")):
            subprocess.run(["mount", *words], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", "/proc/sys"], check=True)
        folders = mounted, Path("/proc/sys/net")
        namespaces.run_in(netns, lambda: configuring.write_settings(folders, "v0", {"accept_ra": 0}))
        with pytest.raises(HardwareError, match=r"cannot set accept_ra of v0 to 2: Read-only .*writableSysctls"):
            namespaces.run_in(netns, lambda: configuring.write_settings(folders[1:], "v0", {"accept_ra": 2}))
    assert (namespaces.run_in(netns, lambda: value("accept_ra")), value("accept_ra")) == ("0", "1")
    os.close(netns)


def test_a_kernel_without_ipv6_has_nothing_to_turn_off(tmp_path: Path) -> None:
    configuring.write_settings((tmp_path,), "v0", {"disable_ipv6": 1})


def test_every_setting_that_a_network_may_name_can_be_set_and_read() -> None:
    assert set(SYSCTLS) == {*configuring.IPV4_SETTINGS, *configuring.IPV6_SETTINGS}


@pytest.mark.parametrize("text", ["10.1.2/24", "10.1.2.3/33", "nonsense"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        configuring.encode_address(1, text)
