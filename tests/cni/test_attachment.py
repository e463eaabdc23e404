"""ADD and DEL of VFs on real links: what a pod gets, and what the host gets back."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent.errors import AgentError, DeviceBusy, DeviceGone
from agent.model.allocation import AttachmentState, VfSettings
from cni.call import STEPS
from tests.cni.tiny_node import PF, TIMEOUT_SECONDS, Rig, mac_of, open_rig, stub_answer, vf
from tests.waiting import soon, until

SETTINGS: dict[str, Any] = {
    "vlan": 100,
    "vlanQoS": 2,
    "trust": "on",
    "spoofchk": "off",
    "max_tx_rate": 500,
    "link_state": "enable",
}
MAC = "02:00:00:00:00:77"


def test_add_puts_the_vf_into_the_pod_as_configured(rig: Rig) -> None:
    pod = rig.pod()
    answer = rig.add("c1", pod, mac=MAC, mtu=1400, **SETTINGS)
    link = rig.link(pod)
    assert (link.name, link.mac, link.mtu, link.up, link.carrier) == ("net1", MAC, 1400, True, True)
    assert rig.machine.find_netdev(vf(0)) is None
    assert rig.settings() == VfSettings(
        mac=MAC,
        vlan=100,
        vlan_qos=2,
        vlan_proto="802.1q",
        min_tx_rate=0,
        max_tx_rate=500,
        spoofchk=False,
        trust=True,
        link_state="enable",
    )
    assert answer == {
        "cniVersion": "1.1.0",
        "interfaces": [{"name": "net1", "mac": MAC, "mtu": 1400, "sandbox": str(pod), "pciID": vf(0)}],
        "dns": {},
    }
    (row,) = rig.ledger.attachments()
    assert (row.state, row.device, row.owner.container_id) == (AttachmentState.ATTACHED, vf(0), "c1")


def test_add_gives_the_addresses_and_routes_of_the_ipam_plugin(rig: Rig) -> None:
    pod = rig.pod()
    answer = rig.add("c1", pod, ipam=rig.ipam())
    assert [ip["address"] for ip in answer["ips"]] == ["10.9.0.2/24", "fd09::2/64"]
    found = json.loads(rig.run_in(pod, "ip", "-j", "address", "show", "net1"))[0]["addr_info"]
    assert {(a["local"], a["prefixlen"]) for a in found if a["scope"] == "global"} == {
        ("10.9.0.2", 24),
        ("fd09::2", 64),
    }
    assert not any("tentative" in a for a in found if a["scope"] == "global")
    (route,) = json.loads(rig.run_in(pod, "ip", "-j", "route", "show", "10.10.0.0/16"))
    assert (route["gateway"], route["dev"]) == ("10.9.0.1", "net1")
    (route,) = json.loads(rig.run_in(pod, "ip", "-j", "-6", "route", "show", "fd10::/64"))
    assert (route["gateway"], route["dev"]) == ("fd09::77", "net1")
    assert rig.leases() == ["10.9.0.2", "fd09::2"]


def test_the_ipam_plugin_gets_the_configuration_that_the_call_came_with(rig: Rig, tmp_path: Path) -> None:
    """As the specification has it: nv-ipam wants the device, plugins of cluster networks what tells of the API."""
    pod, kept = rig.pod(), f"cat >{tmp_path}/$CNI_COMMAND; {stub_answer('10.9.0.2/24')}"
    conf: dict[str, Any] = {
        "type": "sriov",
        "deviceID": vf(0).upper(),
        "vlan": 5,
        "kubernetes": {"k8s_api_root": "x"},
        "dns": None,
    }
    rig.add("c1", pod, ipam=rig.stub_ipam(kept), **conf)
    rig.detach("c1", pod)
    told = [json.loads((tmp_path / command).read_text()) for command in ("ADD", "DEL")]
    known = {"cniVersion": "1.0.0", "name": "rails", "type": "sriov", "ipam": {"type": "stub"}, "deviceID": vf(0)}
    assert told == [{**known, "vlan": 5, "kubernetes": {"k8s_api_root": "x"}}] * 2


def test_del_answers_at_once_and_everything_comes_back(rig: Rig) -> None:
    pod, before = rig.pod(), rig.found()
    rig.add("c1", pod, mac=MAC, mtu=1400, ipam=rig.ipam(), **SETTINGS)
    assert rig.leases()
    rig.delete("c1", pod)
    assert [row.state for row in rig.ledger.attachments()] in ([AttachmentState.DETACHING], [])
    rig.await_back()
    assert rig.found() == before
    assert rig.leases() == []
    assert rig.ledger.quarantines() == ()
    assert rig.in_pod(pod) is None


def test_del_of_what_was_never_added_is_success_and_an_add_after_it_is_a_new_one(rig: Rig) -> None:
    pod = rig.pod()
    rig.delete("c1", None)
    rig.delete("c1", pod)
    assert rig.ledger.attachments() == ()
    rig.add("c1", pod)
    rig.check("c1", pod)


def test_del_touches_only_the_interface_it_names(rig: Rig) -> None:
    pod = rig.pod()
    rig.add("c1", pod)
    rig.add("c1", pod, ifname="net2", deviceID=vf(1))
    rig.delete("c1", pod, ifname="net2")
    rig.await_back(1)
    assert [row.device for row in rig.ledger.attachments()] == [vf(0)]
    assert rig.in_pod(pod, "net1") is not None


def test_the_same_add_again_answers_the_same_and_changes_nothing(rig: Rig) -> None:
    pod = rig.pod()
    first = rig.add("c1", pod, mac=MAC, ipam=rig.ipam())
    rows, leases = rig.ledger.attachments(), rig.leases()
    assert rig.add("c1", pod, mac=MAC, ipam=rig.ipam()) == first
    assert (rig.ledger.attachments(), rig.leases()) == (rows, leases)


def test_an_add_of_the_same_name_in_another_namespace_is_busy(rig: Rig) -> None:
    rig.add("c1", rig.pod("one"))
    with pytest.raises(DeviceBusy, match="an earlier ADD of c1 net1"):
        rig.add("c1", rig.pod("two"))


def test_a_device_that_another_live_pod_holds_is_busy(rig: Rig) -> None:
    one, two = rig.pod("one"), rig.pod("two")
    rig.add("c1", one)
    with pytest.raises(DeviceBusy, match=r"0000:3b:00\.2 is still held by pod default/pod-of-c1 \(container c1\)"):
        rig.add("c2", two)
    assert rig.in_pod(one) is not None
    assert rig.in_pod(two) is None


def test_add_waits_for_the_del_of_the_former_owner(own_network: None, tmp_path: Path) -> None:
    with open_rig(tmp_path, busy_seconds=TIMEOUT_SECONDS) as rig:
        one, two = rig.pod("one"), rig.pod("two")
        rig.add("c1", one, mac=MAC, ipam=rig.ipam())
        with soon(0.1, rig.delete, "c1", one):
            answer = rig.add("c2", two, ipam=rig.ipam())
        assert rig.in_pod(one) is None
        link = rig.link(two)
        assert link.mac == mac_of(0)
        assert answer["interfaces"][0]["sandbox"] == str(two)
        assert len(rig.leases()) == 2


def test_add_cleans_up_after_an_owner_whose_namespace_is_gone(rig: Rig) -> None:
    one, two = rig.pod("one"), rig.pod("two")
    before = rig.settings()
    rig.add("c1", one, mac=MAC, ipam=rig.ipam(), **SETTINGS)
    rig.remove(one)
    until(lambda: rig.machine.find_netdev(vf(0)) is not None)
    rig.add("c2", two)
    link = rig.link(two)
    assert link.mac == mac_of(0)
    assert rig.settings() == before
    assert rig.leases() == []
    assert [row.owner.container_id for row in rig.ledger.attachments()] == ["c2"]


def test_two_containers_that_want_the_same_vf_at_once_get_it_once(rig: Rig) -> None:
    pods = {f"c{i}": rig.pod(f"p{i}") for i in range(4)}
    with ThreadPoolExecutor(4) as threads:
        ends = {container: threads.submit(rig.add, container, pod).exception for container, pod in pods.items()}
    refused = {container: error for container, end in ends.items() if (error := end()) is not None}
    assert [type(error) for error in refused.values()] == [DeviceBusy] * 3
    assert [c for c, pod in pods.items() if rig.in_pod(pod) is not None] == [c for c in pods if c not in refused]


def test_a_device_that_the_node_does_not_have_is_gone(rig: Rig) -> None:
    with pytest.raises(DeviceGone, match=r"0000:99:00\.0 is gone: not found among the node's PCI devices"):
        rig.add("c1", rig.pod(), deviceID="0000:99:00.0")
    assert rig.ledger.attachments() == ()


def test_the_steps_of_an_add_are_timed(rig: Rig) -> None:
    taken = dict[str, float]()
    rig.attachments._node.timed = taken.update
    before = time.perf_counter()
    rig.add("c1", rig.pod(), ipam=rig.stub_ipam(f"sleep 0.2; {stub_answer('10.0.0.2/24')}"))
    assert set(taken) == set(STEPS)
    assert 0.2 <= taken["ipam"] < sum(taken.values()) <= time.perf_counter() - before


# ------------------------------------------------------------------------- the device-info file that a call asks for

ATTACHED = "k8s.cni.cncf.io/devinfo/cni"


def asked(path: Path) -> dict[str, Any]:
    """Ask for a file, as Multus does, whose folder is there."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    return {"runtimeConfig": {"CNIDeviceInfoFile": str(path)}}


def test_it_is_there_after_add_and_gone_after_del_but_what_multus_has_written_stays(rig: Rig, tmp_path: Path) -> None:
    file, multus = (tmp_path / ATTACHED / f"rails-c1_net{number}" for number in (1, 2))
    pod = rig.pod()
    with pytest.raises(AgentError):
        rig.add("c1", pod, **asked(file), ipam=rig.stub_ipam("exit 1"))
    assert not file.exists()
    rig.add("c1", pod, **asked(file))
    document = {"type": "pci", "version": "1.1.0", "pci": {"pci-address": vf(0), "pf-pci-address": PF}}
    assert json.loads(file.read_text()) == document
    rig.detach("c1", pod)
    assert not file.exists()
    multus.write_text(json.dumps({"type": "pci", "pci": {"pci-address": vf(0)}}))
    before = multus.read_text()
    rig.add("c1", pod, **asked(multus))
    assert multus.read_text() == before


def test_a_place_that_cannot_be_written_keeps_no_pod_from_starting(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "k8s.cni.cncf.io").write_text("a file")
    pod = rig.pod()
    rig.add("c1", pod, **asked(tmp_path / ATTACHED / "x"))
    rig.detach("c1", pod)


@pytest.mark.parametrize("path", ["relative", "/var/../etc/x", 5, "/x\0y"])
def test_a_place_that_is_no_plain_path_is_refused(rig: Rig, path: object) -> None:
    with pytest.raises(AgentError, match=r"runtimeConfig\.CNIDeviceInfoFile must be an absolute path without '\.\.'"):
        rig.add("c1", rig.pod(), runtimeConfig={"CNIDeviceInfoFile": path})
