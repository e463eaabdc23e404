"""Settings of IPv6 in a pod: they are files, which the agent's container has read-only but for those of the host."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from agent.config.routing import SYSCTLS
from agent.errors import HardwareError
from agent.hardware import netns as namespaces
from agent.hardware.host import Route
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


HEADER = b"\0" * 16


def decoded(kind: type[Any], body: bytes) -> Any:
    """Have pyroute2 read a message body."""
    message = kind(len(HEADER + body).to_bytes(4, "little") + HEADER[4:] + body)
    message.decode()
    return message


def test_an_ipv4_address_says_its_network_and_broadcast() -> None:
    body = configuring.encode_address(7, "10.1.2.3/24")
    message = decoded(ifaddrmsg, body)
    assert (message["family"], message["prefixlen"], message["index"], message["flags"]) == (2, 24, 7, 0)
    assert {kind: message.get_attr(kind) for kind in ("IFA_LOCAL", "IFA_ADDRESS", "IFA_BROADCAST")} == {
        "IFA_LOCAL": "10.1.2.3",
        "IFA_ADDRESS": "10.1.2.3",
        "IFA_BROADCAST": "10.1.2.255",
    }
    assert body.hex() == "0218000007000000080002000a010203080001000a010203080004000a0102ff"


@pytest.mark.parametrize("cidr", ["10.1.2.3/31", "10.1.2.3/32", "fd00::2/64"])
def test_what_has_no_broadcast_gets_none(cidr: str) -> None:
    assert decoded(ifaddrmsg, configuring.encode_address(7, cidr)).get_attr("IFA_BROADCAST") is None


def test_an_ipv6_address_may_be_used_at_once() -> None:
    message = decoded(ifaddrmsg, configuring.encode_address(7, "fd00::2/64"))
    assert (message["family"], message["prefixlen"], message["flags"]) == (10, 64, configuring.IFA_F_NODAD)
    assert message.get_attr("IFA_LOCAL") == "fd00::2"


@pytest.mark.parametrize(
    ("route", "header", "attributes"),
    [
        (
            Route("0.0.0.0/0", "10.0.0.1"),
            {"family": 2, "dst_len": 0, "table": 254, "proto": 4, "scope": 0, "type": 1, "flags": 0},
            {"RTA_GATEWAY": "10.0.0.1", "RTA_TABLE": 254, "RTA_OIF": 9, "RTA_DST": None, "RTA_PRIORITY": None},
        ),
        (Route("10.9.0.0/16", None), {"dst_len": 16, "scope": 253}, {"RTA_DST": "10.9.0.0", "RTA_GATEWAY": None}),
        (Route("10.9.0.1/16", None), {"dst_len": 16}, {"RTA_DST": "10.9.0.0"}),
        (Route("fd01::/48", None), {"family": 10, "scope": 0}, {"RTA_DST": "fd01::"}),
        (
            Route("10.9.0.0/16", "10.0.0.1", priority=50, table=1000, source="10.0.0.2", onlink=True, protocol=3),
            {"table": 252, "proto": 3, "flags": 4},
            {"RTA_PRIORITY": 50, "RTA_TABLE": 1000, "RTA_PREFSRC": "10.0.0.2"},
        ),
        (Route("10.9.0.0/16", "10.0.0.1", scope=200), {"scope": 200}, {}),
    ],
)
def test_a_route_says_what_is_known_of_it(route: Route, header: dict[str, int], attributes: dict[str, object]) -> None:
    message = decoded(rtmsg, configuring.encode_route(9, route))
    assert {key: message[key] for key in header} == header
    assert {key: message.get_attr(key) for key in attributes} == attributes


def test_the_metrics_of_a_route_are_nested() -> None:
    metrics = decoded(rtmsg, configuring.encode_route(9, Route("10.9.0.0/16", None, mtu=1400, advmss=1360)))
    found = metrics.get_attr("RTA_METRICS")
    assert (found.get_attr("RTAX_MTU"), found.get_attr("RTAX_ADVMSS")) == (1400, 1360)


def test_a_gateway_of_the_other_family_is_told_with_its_family() -> None:
    message = decoded(rtmsg, configuring.encode_route(9, Route("10.9.0.0/16", "fe80::1")))
    assert message.get_attr("RTA_GATEWAY") is None
    assert message.get_attr("RTA_VIA") == {"family": 10, "addr": "fe80::1"}


@pytest.mark.parametrize("text", ["10.1.2/24", "10.1.2.3/33", "nonsense"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        configuring.encode_address(1, text)
