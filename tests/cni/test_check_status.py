"""STATUS of networks that name an interface of the host."""

from __future__ import annotations

import subprocess

import pytest

from agent.errors import ConnectivityLimited, Unavailable
from tests.cni.tiny_node import PF_NETDEV, Rig


def ask(rig: Rig, **conf: object) -> None:
    with rig.call("", None, conf) as call:
        rig.attachments.status(call)


def test_a_network_that_names_none_is_ready(rig: Rig) -> None:
    ask(rig)


def test_a_network_is_as_ready_as_its_interface(rig: Rig) -> None:
    with pytest.raises(ConnectivityLimited, match=f"the interface {PF_NETDEV} is down: set it up"):
        ask(rig, mode="macvlan", master=PF_NETDEV)
    subprocess.run(["ip", "link", "set", PF_NETDEV, "up"], check=True)
    ask(rig, mode="macvlan", master=PF_NETDEV)


def test_an_interface_that_is_not_there_is_told_of(rig: Rig) -> None:
    with pytest.raises(Unavailable, match="the interface eth77 is not in the host"):
        ask(rig, mode="macvlan", master="eth77")
