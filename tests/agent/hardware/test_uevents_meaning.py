from __future__ import annotations

import pytest

from agent.hardware.uevents import Uevent, change_of
from agent.model.change import EVERYTHING, Change, of_function, of_netdev

BRIDGE = "/devices/pci0000:3a/0000:3a:00.0"


@pytest.mark.parametrize(
    ("event", "change"),
    [
        (Uevent("add", f"{BRIDGE}/0000:3b:00.1", "pci"), of_function("0000:3b:00.1", bus=True)),
        (Uevent("remove", f"{BRIDGE}/0000:3b:00.1", "pci"), of_function("0000:3b:00.1", bus=True)),
        (Uevent("change", f"{BRIDGE}/0000:3b:00.0", "pci"), of_function("0000:3b:00.0", bus=True)),
        (Uevent("bind", f"{BRIDGE}/0000:3b:00.1", "pci"), of_function("0000:3b:00.1")),
        (Uevent("add", "/devices/pci0000:3a/nothing", "pci"), EVERYTHING),
        (Uevent("add", f"{BRIDGE}/0000:3b:00.1/net/eth4", "net"), of_function("0000:3b:00.1")),
        (Uevent("add", f"{BRIDGE}/0000:3b:00.1/virtio0/net/eth4", "net"), of_function("0000:3b:00.1")),
        (Uevent("add", "/devices/platform/soc/net/end0", "net"), of_netdev("end0")),
        (Uevent("add", "/devices/virtual/net/veth0", "net"), None),
        (Uevent("add", f"{BRIDGE}/0000:3b:00.0/infiniband_mad/umad3", "infiniband_mad"), of_function("0000:3b:00.0")),
        (Uevent("add", "/devices/virtual/infiniband/rxe0", "infiniband"), EVERYTHING),
        (Uevent("add", "/devices/virtual/misc/rdma_cm", "misc"), EVERYTHING),
        (Uevent("add", "/devices/virtual/misc/vhost-net", "misc"), EVERYTHING),
        (Uevent("add", "/devices/virtual/misc/tun", "misc"), EVERYTHING),
        (Uevent("add", "/devices/virtual/misc/kvm", "misc"), None),
        (Uevent("add", f"{BRIDGE}/0000:3b:00.1/vdpa0", "vdpa"), of_function("0000:3b:00.1")),
        (Uevent("add", f"{BRIDGE}/0000:3b:00.1/cxi/cxi0", "cxi"), of_function("0000:3b:00.1")),
    ],
)
def test_an_event_says_what_is_to_be_looked_at(event: Uevent, change: Change | None) -> None:
    assert change_of(event) == change


def test_a_pods_veth_counts_on_a_simulated_node() -> None:
    assert change_of(Uevent("add", "/devices/virtual/net/veth0", "net"), virtual_links=True) == of_netdev("veth0")


def test_an_event_can_be_told_to_people() -> None:
    assert str(Uevent("unbind", f"{BRIDGE}/0000:3b:00.1", "pci")) == "pci unbind 0000:3b:00.1"
