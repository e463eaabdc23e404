"""CHECK as a comparison with what really is, and GC that frees, goes on, and tells."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from agent.errors import AttachmentError, ConnectivityLimited, RequestInvalid
from agent.model.allocation import VfSettings
from tests.cni import tiny_node
from tests.cni.tiny_node import PF_NETDEV, Rig, stub_answer, vf

ROUTES = [{"dst": "10.7.0.0/16", "gw": "10.0.0.9"}, {"dst": "10.8.0.0/16"}, {"dst": "fd07::/64", "gw": "FD00:0::1"}]


def routed(rig: Rig) -> dict[str, Any]:
    return rig.stub_ipam(stub_answer("10.0.0.2/24", "fd00::2/64", routes=ROUTES))


def differences(rig: Rig, pod: Any, **conf: Any) -> list[str]:
    with pytest.raises(AttachmentError) as caught:
        rig.check("c1", pod, **conf)
    return str(caught.value).split("; ")


def test_check_of_a_device_that_is_not_attached_is_an_error(rig: Rig) -> None:
    pod = rig.pod()
    with pytest.raises(AttachmentError, match="is not attached for container c1"):
        rig.check("c1", pod, deviceID=vf(0))
    for mode in ("nic", "macvlan", "ipoib"):
        with pytest.raises(AttachmentError, match="lab0 is not attached for container c1"):
            rig.check("c1", pod, mode=mode, master="lab0")
    rig.check("c1", pod)  # chained, in a pod without our devices


def test_check_of_a_half_done_attachment_is_an_error(rig: Rig) -> None:
    pod = rig.pod()
    rig.add("c1", pod)
    (row,) = rig.ledger.attachments()
    rig.ledger.begin_detach([row.attachment_id])
    with pytest.raises(AttachmentError, match=r"0000:3b:00\.2 is detaching"):
        rig.check("c1", pod)


def test_addresses_and_routes_of_the_result_are_found_however_they_are_written(rig: Rig) -> None:
    pod = rig.pod()
    answer = rig.add("c1", pod, ipam=routed(rig))
    rig.check("c1", pod)
    rig.check("c1", pod, deviceID=vf(0), prevResult=answer)


def test_a_route_by_another_gateway_is_none(rig: Rig) -> None:
    pod = rig.pod()
    rig.add("c1", pod, ipam=routed(rig))
    rig.run_in(pod, "ip", "route", "replace", "10.7.0.0/16", "via", "10.0.0.8")
    assert differences(rig, pod) == ["the route to 10.7.0.0/16 via 10.0.0.9 is missing"]


def test_what_prev_result_says_counts_and_not_what_was_answered_once(rig: Rig) -> None:
    """A plugin later in the chain may have given the interface more, and says so in prevResult."""
    pod = rig.pod()
    answer = dict(rig.add("c1", pod, ipam=routed(rig)))
    answer["ips"] = [*answer["ips"], {"interface": 0, "address": "10.0.0.77/24"}]
    answer["routes"] = [{"dst": "10.99.0.0/16"}]
    assert differences(rig, pod, deviceID=vf(0), prevResult=answer) == [
        "net1 lacks address 10.0.0.77/24",
        "the route to 10.99.0.0/16 is missing",
    ]
    del answer["interfaces"]
    assert "prevResult has no interface net1" in differences(rig, pod, deviceID=vf(0), prevResult=answer)


def test_every_difference_is_named_at_once(rig: Rig) -> None:
    pod = rig.pod()
    rig.add("c1", pod, vlan=100, trust="on", mac="02:00:00:00:00:77", ipam=routed(rig))
    rig.run_in(pod, "ip", "link", "set", "net1", "down", "mtu", "1300")
    rig.run_in(pod, "ip", "address", "flush", "dev", "net1")
    rig.machine.vf_control.apply(PF_NETDEV, 0, VfSettings(vlan=7))
    assert differences(rig, pod) == [
        "net1 is down",
        "net1 has MTU 1300, not 1500",
        "the PF ens1f0 has vlan 7, not 100",
        "net1 lacks address 10.0.0.2/24",
        "net1 lacks address fd00::2/64",
        "the route to 10.7.0.0/16 via 10.0.0.9 is missing",
        "the route to 10.8.0.0/16 is missing",
        "the route to fd07::/64 via FD00:0::1 is missing",
    ]


def test_a_mac_and_an_mtu_that_nobody_asked_for_count_too(rig: Rig) -> None:
    pod = rig.pod()
    rig.add("c1", pod)
    rig.run_in(pod, "ip", "link", "set", "net1", "mtu", "1300", "address", "02:00:00:00:00:99")
    own = tiny_node.mac_of(0)
    assert differences(rig, pod) == ["net1 has MTU 1300, not 1500", f"net1 has MAC 02:00:00:00:00:99, not {own}"]


def test_the_mac_that_a_plugin_later_in_the_chain_gave_counts(rig: Rig) -> None:
    """As tuning does, which says so in its result."""
    pod = rig.pod()
    answer = dict(rig.add("c1", pod))
    rig.run_in(pod, "ip", "link", "set", "net1", "address", "02:00:00:00:00:99")
    assert differences(rig, pod, deviceID=vf(0), prevResult=answer) == [
        f"net1 has MAC 02:00:00:00:00:99, not {tiny_node.mac_of(0)}"
    ]
    (entry,) = answer["interfaces"]
    rig.check("c1", pod, deviceID=vf(0), prevResult={**answer, "interfaces": [{**entry, "mac": "02:00:00:00:00:99"}]})


def test_another_namespace_than_that_of_the_add_is_told(rig: Rig) -> None:
    rig.add("c1", rig.pod())
    assert "was attached to namespace" in differences(rig, rig.pod("other"))[0]


# ------------------------------------------------------------------------------ GC


def test_gc_frees_only_what_is_stale_and_of_its_own_network(rig: Rig) -> None:
    pods = [rig.pod(f"p{index}") for index in range(3)]
    for index, pod in enumerate(pods):
        rig.add(f"c{index}", pod, deviceID=vf(index), name="other" if index == 2 else "rails", ipam=rig.ipam())
    rig.collect(("c0", "net1"), ("c1", "net2"))  # c1 has no net2
    assert [row.owner.container_id for row in rig.ledger.attachments()] == ["c0", "c2"]
    assert rig.machine.find_netdev(vf(1)) is not None
    assert rig.in_pod(pods[1]) is None  # though that pod's namespace lives
    rig.collect(name="other")
    assert [row.owner.container_id for row in rig.ledger.attachments()] == ["c0"]


def test_gc_goes_on_past_what_fails(rig: Rig) -> None:
    for index in range(3):
        rig.add(f"c{index}", rig.pod(f"p{index}"), deviceID=vf(index), vlan=100 + index)
    (rig.machine.root / "sys/bus/pci/devices" / vf(1) / "physfn").unlink()  # its PF cannot be found
    rig.collect()
    assert [row.device for row in rig.ledger.attachments()] == [vf(1)]
    assert [entry.device for entry in rig.ledger.quarantines()] == [vf(1)]
    rig.machine.root.joinpath("sys/bus/pci/devices", vf(1), "physfn").symlink_to(f"../{tiny_node.PF}")
    rig.collect()  # a repeated GC finishes it
    assert (rig.ledger.attachments(), rig.ledger.quarantines()) == ((), ())


def test_gc_without_the_list_of_what_is_valid_frees_nothing(rig: Rig) -> None:
    rig.add("c1", rig.pod())
    with rig.call("", None, {}) as call, pytest.raises(RequestInvalid, match="valid-attachments"):
        rig.attachments.collect(call)
    assert len(rig.ledger.attachments()) == 1


# -------------------------------------------------------------------------- STATUS


def status(rig: Rig, **conf: object) -> None:
    with rig.call("", None, conf) as call:
        rig.attachments.status(call)


def test_a_network_is_as_ready_as_its_interface(rig: Rig) -> None:
    with pytest.raises(ConnectivityLimited, match=f"the interface {PF_NETDEV} is down: set it up"):
        status(rig, mode="macvlan", master=PF_NETDEV)
    subprocess.run(["ip", "link", "set", PF_NETDEV, "up"], check=True)
    status(rig, mode="macvlan", master=PF_NETDEV)
