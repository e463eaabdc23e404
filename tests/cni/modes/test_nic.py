"""Whole adapters and any other interface: moved in, and brought back with the host's addresses and routes."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.errors import AgentError, DeviceBusy, DeviceGone, HardwareError, RequestInvalid
from agent.hardware.host import Link
from cni.call import Observer
from tests.cni.tiny_node import PF, PF_NETDEV, Rig, vf
from tests.waiting import until


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def show(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def lab(rig: Rig) -> Rig:
    """The node, and an interface of it that has no PCI device."""
    ip("link", "add", "name", "lab0", "address", "02:00:00:00:07:07", "type", "veth", "peer", "name", "lab1")
    ip("link", "set", "lab1", "up")
    return rig


def add(rig: Rig, pod: Path, **conf: Any) -> Any:
    with rig.call("c1", pod, {"mode": "nic", **conf}) as call:
        return rig.attachments.add(call)


def seen(rig: Rig, name: str = "lab0") -> Link:
    link = rig.machine.links.find(name)
    assert link is not None
    return replace(link, carrier=False)


def test_a_whole_adapter_goes_by_its_pci_address_and_comes_back(rig: Rig) -> None:
    pod, before = rig.pod(), seen(rig, PF_NETDEV)
    answer = add(rig, pod, deviceID=PF, mtu=1400)
    assert answer["interfaces"] == [
        {"name": "net1", "mac": "02:00:00:00:00:01", "mtu": 1400, "sandbox": str(pod), "pciID": PF}
    ]
    assert rig.machine.find_netdev(PF) is None
    rig.check("c1", pod, mode="nic", deviceID=PF)
    rig.detach("c1", pod)
    assert seen(rig, PF_NETDEV) == before


def test_an_adapter_has_one_row_however_it_is_named(rig: Rig) -> None:
    pod = rig.pod()
    answer = add(rig, pod, master=PF_NETDEV)
    [row] = rig.ledger.attachments()
    assert (row.device, row.undo.mode) == (PF, "nic")
    assert add(rig, pod, master=PF_NETDEV) == answer  # it is in the pod now, and known all the same
    rig.detach("c1", pod)


def test_an_interface_without_pci_device_goes_by_its_name_with_a_mac_and_comes_back(lab: Rig) -> None:
    ip("link", "property", "add", "dev", "lab0", "altname", "laboratory")
    pod, before = lab.pod(), seen(lab)
    answer = add(lab, pod, master="lab0", mac="02:00:00:00:00:77", ipam=lab.ipam())
    assert answer["interfaces"] == [{"name": "net1", "mac": "02:00:00:00:00:77", "mtu": 1500, "sandbox": str(pod)}]
    assert "10.9.0.2/24" in lab.run_in(pod, "ip", "address", "show", "dev", "net1")
    lab.check("c1", pod, mode="nic", master="lab0")
    lab.detach("c1", pod)
    assert seen(lab) == before


@pytest.mark.parametrize(
    ("addresses", "routes"),
    [
        (
            ("192.0.2.5/24", "2001:db8::5/64"),
            ("198.51.100.0/24 via 192.0.2.1", "198.51.101.0/24 metric 7 table 77", "2001:db8:7::/48 via 2001:db8::1"),
        ),
        (("10.1.0.1/24", "10.1.0.9/24"), ("10.98.0.0/16 via 10.1.0.2 src 10.1.0.9",)),
        (("10.1.0.1/24",), ("10.99.0.0/16 via 192.0.2.1 onlink",)),
        # The way to a gateway is listed behind what goes through it.
        (("192.0.2.5/24",), ("203.0.113.1/32", "10.0.0.0/8 via 203.0.113.1")),
    ],
)
def test_the_hosts_addresses_and_routes_on_it_are_given_back(
    lab: Rig, addresses: tuple[str, ...], routes: tuple[str, ...]
) -> None:
    ip("link", "set", "lab0", "up")
    for address in addresses:
        ip("address", "add", address, "dev", "lab0", *(["nodad"] if ":" in address else []))
    for route in routes:
        ip("route", "add", *route.split(), "dev", "lab0")

    def of_host() -> tuple[Any, ...]:
        links = lab.machine.links
        return seen(lab), links.addresses("lab0", None), set(links.routes(None, "lab0"))

    pod, before = lab.pod(), of_host()
    add(lab, pod, master="lab0")
    assert routes[0].split()[0] not in show("route")
    lab.detach("c1", pod)
    assert of_host() == before


@pytest.mark.parametrize("change", ["name other", "address 02:00:00:00:00:99"])
def test_an_interface_that_the_pod_renamed_or_gave_a_mac_is_known_again(lab: Rig, change: str) -> None:
    pod, before = lab.pod(), seen(lab)
    add(lab, pod, master="lab0")
    lab.run_in(pod, "ip", "link", "set", "net1", "down")
    lab.run_in(pod, "ip", "link", "set", "net1", *change.split())
    lab.detach("c1", pod)
    assert seen(lab) == before


def test_what_is_not_ours_in_the_pod_stays_there(lab: Rig) -> None:
    """An ADD that fails for a name that is taken must not take the pod's own interface for the host's."""
    pod, before = lab.pod(), seen(lab)
    lab.run_in(pod, "ip", "link", "add", "name", "net1", "index", str(before.ifindex), "type", "bridge")
    inside = lab.run_in(pod, "ip", "link")
    with pytest.raises(HardwareError, match="an interface of that name is in the pod already"):
        add(lab, pod, master="lab0")
    assert replace(seen(lab), ifindex=0) == replace(before, ifindex=0)
    assert (lab.run_in(pod, "ip", "link"), lab.ledger.attachments()) == (inside, ())


def test_what_shares_the_mac_and_has_the_pods_name_in_the_host_is_left_alone(lab: Rig) -> None:
    """As the parent of a VLAN that goes into a pod by the parent's name."""
    pod, before = lab.pod(), seen(lab)
    ip("link", "add", "name", "net1", "address", before.mac, "type", "bridge")
    ip("link", "set", "net1", "up")
    parent = lab.machine.links.find("net1")
    add(lab, pod, master="lab0")
    lab.detach("c1", pod)
    assert seen(lab) == before
    assert lab.machine.links.find("net1") == parent


def test_software_that_ended_with_its_namespace_leaves_no_row_and_takes_no_namesake(lab: Rig) -> None:
    pod = lab.pod()
    add(lab, pod, master="lab0", mtu=1400)
    lab.remove(pod)
    until(lambda: lab.machine.links.find("lab1") is None)
    ip("link", "add", "name", "lab0", "type", "veth", "peer", "name", "lab1")
    namesake = seen(lab)
    assert lab.attachments.heal("lab0") == "owner-gone"
    assert (seen(lab), lab.ledger.attachments(), lab.ledger.quarantines()) == (namesake, (), ())


def test_software_in_a_namespace_that_cannot_be_seen_from_here_keeps_its_row(lab: Rig) -> None:
    """A plain file is where the runtime bound the namespace: its mount did not reach the agent. The pod may live."""
    pod = lab.pod()
    add(lab, pod, master="lab0")
    [device] = [row.device for row in lab.ledger.attachments()]
    with open(pod):
        lab.remove(pod)
        pod.touch()
        assert lab.attachments.heal(device) is None
        assert [row.device for row in lab.ledger.attachments()] == [device]


def test_an_adapter_whose_vf_a_pod_has_is_refused(rig: Rig) -> None:
    """From another namespace it could not give the VF back what it had."""
    rig.add("c0", rig.pod("other"), vlan=100)
    with pytest.raises(DeviceBusy, match=f"{PF_NETDEV} is needed by {vf(0)}, which pod default/pod-of-c0 has"):
        add(rig, rig.pod(), deviceID=PF)
    assert rig.machine.find_netdev(PF) is not None
    rig.detach("c0", None)
    add(rig, rig.pod("again"), deviceID=PF)


def test_the_interface_of_the_default_route_is_refused(lab: Rig) -> None:
    ip("link", "set", "lab0", "up")
    ip("address", "add", "192.0.2.5/24", "dev", "lab0")
    ip("route", "add", "default", "via", "192.0.2.1")
    with pytest.raises(
        HardwareError, match="lab0 carries the host's default route: without it this node would be cut off"
    ):
        add(lab, lab.pod(), master="lab0")
    assert "default via 192.0.2.1" in show("route")


def test_a_port_of_a_bridge_is_refused(lab: Rig) -> None:
    ip("link", "add", "name", "br7", "type", "bridge")
    ip("link", "set", "lab0", "master", "br7")
    with pytest.raises(HardwareError, match="lab0 is a port of br7"):
        add(lab, lab.pod(), master="lab0")


def test_an_interface_that_carries_others_is_refused(rig: Rig) -> None:
    (rig.machine.root / "sys/class/net" / PF_NETDEV / "upper_ens1f0.7").touch()
    with pytest.raises(HardwareError, match=rf"{PF_NETDEV} carries ens1f0\.7"):
        add(rig, rig.pod(), deviceID=PF)


@pytest.mark.parametrize(
    ("conf", "kind", "words"),
    [
        ({"master": "lo"}, HardwareError, "lo is every namespace's own"),
        ({"master": "nothing"}, DeviceGone, "nothing"),
        ({"deviceID": "0000:99:00.0"}, DeviceGone, "0000:99:00.0"),
        ({"deviceID": PF, "vlan": 7}, RequestInvalid, "vlan has no effect in mode nic"),
        ({}, RequestInvalid, "deviceID"),
    ],
)
def test_what_cannot_be_moved_is_told(lab: Rig, conf: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        add(lab, lab.pod(), **conf)
    assert lab.ledger.attachments() == ()


def test_a_route_that_the_host_takes_no_more_is_told_and_withholds_nothing(lab: Rig) -> None:
    ip("link", "set", "lab0", "up")
    ip("address", "add", "192.0.2.5/24", "dev", "lab0")
    ip("link", "add", "name", "way0", "type", "veth", "peer", "name", "way1")
    for name in ("way0", "way1"):
        ip("link", "set", name, "up")
    ip("route", "add", "198.51.100.0/24", "via", "192.0.2.1")
    ip("route", "add", "203.0.113.0/24", "via", "192.0.2.2", "metric", "7")
    told: list[tuple[str, str]] = []

    class Ears(Observer):
        def not_put_back(self, device: str, what: str) -> None:
            told.append((device, what))

    lab.attachments._node.observer = Ears()
    add(lab, lab.pod(), master="lab0")
    [row] = lab.ledger.attachments()
    gone = {**row.undo.extra["routes"][0], "destination": "10.7.0.0/16", "gateway": "10.200.0.1", "source": None}
    undo = replace(row.undo, extra={**row.undo.extra, "routes": [gone, *row.undo.extra["routes"]]})
    ip("route", "add", "203.0.113.0/24", "dev", "way0", "metric", "7")  # the host goes another way meanwhile
    lab.attachments.detacher.undo(replace(row, undo=undo))
    assert (lab.ledger.attachments(), lab.ledger.quarantines()) == ((), ())
    assert "198.51.100.0/24 via 192.0.2.1 dev lab0" in show("route")
    assert "203.0.113.0/24 dev way0" in show("route")
    assert [device for device, _ in told] == ["lab0", "lab0"]
    assert "ip route add 10.7.0.0/16 via 10.200.0.1 dev lab0" in told[0][1]
    assert "unreachable" in told[0][1]
    assert "203.0.113.0/24 via 192.0.2.2 dev lab0 metric 7" in told[1][1]
    assert "another way" in told[1][1]
    add(lab, lab.pod("next"), master="lab0")  # and it may go out again


def test_a_vf_of_an_adapter_that_another_pod_has_is_refused(rig: Rig) -> None:
    """That pod would rule what the VF may do."""
    add(rig, rig.pod(), deviceID=PF)
    with pytest.raises(DeviceBusy, match=f"{vf(0)} is ruled by {PF}, which pod default/pod-of-c1 has"):
        rig.add("c0", rig.pod("other"))
    assert rig.machine.find_netdev(vf(0)) is not None
    rig.detach("c1", None)
    rig.add("c0", rig.pod("again"))


def test_an_adapter_and_its_vf_that_come_at_once_do_not_both_go_to_pods(rig: Rig) -> None:
    pods = rig.pod("a"), rig.pod("b")
    for _ in range(5):
        with ThreadPoolExecutor(2) as threads:
            ends = [threads.submit(add, rig, pods[0], deviceID=PF), threads.submit(rig.add, "c0", pods[1])]
        assert sorted(isinstance(end.exception(), AgentError) for end in ends) == [False, True]
        for container in ("c0", "c1"):
            rig.detach(container, None)
