"""An ADD that fails at any step leaves no trace; a DEL that cannot be carried out yet loses nothing."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent.errors import (
    AgentError,
    DeviceGone,
    EnvironmentInvalid,
    HardwareError,
    IpamFailed,
    RequestInvalid,
    Unavailable,
)
from agent.model.allocation import AttachmentState
from tests.cni import tiny_node
from tests.cni.tiny_node import ASKED, Rig, netdev, stub_answer, vf
from tests.waiting import until


@contextmanager
def leaves_no_trace(rig: Rig, pod: Path) -> Iterator[None]:
    before, links = rig.found(), rig.run_in(pod, "ip", "link")
    yield
    assert rig.found() == before
    assert rig.run_in(pod, "ip", "link") == links
    assert rig.ledger.attachments() == ()
    assert rig.ledger.quarantines() == ()
    assert rig.ledger.owed_leases() == ()


@pytest.mark.parametrize(
    ("answer", "more", "error", "called"),
    [
        ("false", {}, "ADD failed", ["ADD", "DEL"]),
        ("", {"ipam": {"type": "absent"}}, "is not in CNI_PATH", []),
        ("", {}, None, ["ADD", "DEL"]),
        (stub_answer("10.0.0.2/24", routes=[{"dst": "10.7.0.0/16", "gw": "192.168.99.1"}]), {}, None, ["ADD", "DEL"]),
        (stub_answer("10.0.0.2/24", "10.0.0.255/33"), {}, None, ["ADD", "DEL"]),
        (stub_answer("fd00::2/64"), {"mtu": 68}, None, ["ADD", "DEL"]),
    ],
    ids=["plugin fails", "no plugin", "no answer", "gateway", "address", "mtu"],
)
def test_what_plugin_kernel_or_driver_refuse_undoes_the_add(
    rig: Rig, answer: str, more: dict[str, Any], error: str | None, called: list[str]
) -> None:
    pod, calls = rig.pod(), rig.folder / "calls"
    ipam = rig.stub_ipam(f"echo $CNI_COMMAND >>{calls}; [ $CNI_COMMAND = DEL ] && exit; {answer}")
    with leaves_no_trace(rig, pod), pytest.raises((HardwareError, IpamFailed), match=error):
        rig.add("c1", pod, **{**ASKED, "ipam": ipam, **more})
    assert (calls.read_text().split() if calls.exists() else []) == called


def test_a_vf_that_vanishes_meanwhile_leaves_no_row_and_no_lease(rig: Rig) -> None:
    file = rig.machine.root / "sys/bus/pci/devices" / vf(0)
    ipam = rig.stub_ipam(f"echo $CNI_COMMAND >>{rig.folder}/calls; rm -f {file}; [ $CNI_COMMAND = DEL ]")
    with pytest.raises(IpamFailed):
        rig.add("c1", rig.pod(), ipam=ipam, **ASKED)
    assert rig.ledger.attachments() == ()
    assert rig.ledger.quarantines() == ()
    assert (rig.folder / "calls").read_text() == "ADD\nDEL\n"


def test_a_vf_without_an_interface_is_not_attached(rig: Rig) -> None:
    """Its driver is not bound, or it sits in a namespace that nobody told us of."""
    pod = rig.pod()
    subprocess.run(["ip", "link", "set", netdev(0), "netns", pod], check=True)
    with pytest.raises(HardwareError, match=r"has no interface in the host \(driver mlx5_core\)"):
        rig.add("c1", pod)
    assert rig.ledger.attachments() == ()


def test_a_pf_never_leaves_the_host(rig: Rig) -> None:
    """It may be the one that the node's own network is on."""
    with pytest.raises(HardwareError, match="is not a VF"):
        rig.add("c1", rig.pod(), deviceID=tiny_node.PF)
    assert rig.machine.find_netdev(tiny_node.PF) is not None
    assert rig.ledger.attachments() == ()


def test_a_vf_that_cannot_be_put_back_is_withheld_until_it_can(rig: Rig) -> None:
    pod, before = rig.pod(), rig.found()
    rig.add("c1", pod, ipam=rig.ipam(), **ASKED)
    settings = rig.folder / "vf-settings.json"
    readable = settings.read_text()
    settings.write_text("{")  # the PF's driver refuses
    rig.delete("c1", pod)
    assert "clean-up failed" in rig.await_withheld()
    assert [entry.device for entry in rig.ledger.quarantines()] == [vf(0)]
    assert [row.state for row in rig.ledger.attachments()] == [AttachmentState.DETACHING]
    with pytest.raises(AgentError):
        rig.add("c2", pod)
    with pytest.raises(AgentError):
        rig.attachments.heal(vf(0))
    settings.write_text(readable)
    assert rig.attachments.heal(vf(0)) == "half-detaching"
    assert rig.found() == before
    assert rig.ledger.quarantines() == ()
    assert rig.leases() == []


def test_a_vf_that_the_pod_has_under_another_interface_is_refused_for_good(rig: Rig) -> None:
    pod = rig.pod()
    rig.add("c1", pod)
    with pytest.raises(RequestInvalid, match="in this pod already"):
        rig.add("c1", pod, ifname="net9")
    rig.detach("c1", pod)


def test_a_del_during_a_slow_add_wins(rig: Rig) -> None:
    """The runtime gave up on the ADD; nothing of it may stay."""
    pod, before = rig.pod(), rig.found()
    ipam = rig.stub_ipam(
        f"[ $CNI_COMMAND = DEL ] && exit; touch {rig.folder}/asked; while [ ! -e {rig.folder}/go ]; do sleep 0.01;"
        f" done; {stub_answer('10.0.0.2/24')}"
    )
    with ThreadPoolExecutor(1) as threads:
        adding = threads.submit(rig.add, "c1", pod, ipam=ipam, **ASKED)
        until((rig.folder / "asked").exists)
        rig.delete("c1", pod)
        assert isinstance(adding.exception(), AgentError)  # the plugin is killed, and may have leased something
    rig.await_back()
    assert rig.found() == before
    assert rig.attachments.leases.settle() == (1, 0)
    assert rig.ledger.owed_leases() == ()


def test_add_that_names_no_device_and_is_not_chained_is_invalid(rig: Rig) -> None:
    with rig.call("c1", rig.pod(), {}) as call, pytest.raises(RequestInvalid, match="deviceID is missing"):
        rig.attachments.add(call)


def test_a_node_whose_pf_went_away_frees_its_vfs_without_settings(rig: Rig) -> None:
    """A PF that is reset takes its VFs with it: nothing is left to put back."""
    pod = rig.pod()
    rig.add("c1", pod, **ASKED)
    rig.unplug()
    rig.detach("c1", pod)
    assert rig.ledger.quarantines() == ()
    with pytest.raises((DeviceGone, HardwareError)):
        rig.add("c2", rig.pod("two"))


def test_a_device_that_no_thread_could_be_started_for_is_brought_back_later(rig: Rig) -> None:
    pod, before = rig.pod(), rig.found()
    rig.add("c1", pod)
    former = threading.stack_size(1 << 46)  # more than there is
    try:
        for bring_back in (partial(rig.delete, "c1", pod), partial(rig.attachments.heal, vf(0))):
            with pytest.raises(Unavailable, match="can't start new thread"):
                bring_back()
    finally:
        threading.stack_size(former)
    assert rig.attachments.heal(vf(0)) == "half-detaching"
    assert (rig.found(), rig.ledger.attachments(), rig.ledger.quarantines()) == (before, (), ())


def test_nothing_is_brought_into_the_namespace_of_the_host(rig: Rig) -> None:
    """A path such as /proc/4711/ns/net names another process's once the pod's has ended."""
    before = rig.found()
    with pytest.raises(EnvironmentInvalid, match="is the namespace of the host"):
        rig.add("c1", Path("/proc/thread-self/ns/net"))
    assert (rig.found(), rig.ledger.attachments()) == (before, ())


def test_a_vf_that_is_a_port_of_a_bridge_of_the_host_is_refused(rig: Rig) -> None:
    for words in ("add name br7 type bridge", f"set {netdev(0)} master br7"):
        subprocess.run(["ip", "link", *words.split()], check=True)
    with pytest.raises(HardwareError, match=f"{netdev(0)} is a port of a bond, bridge or the like: take it out first"):
        rig.add("c1", rig.pod())
    subprocess.run(["ip", "link", "set", netdev(0), "nomaster"], check=True)
    rig.add("c1", rig.pod("again"))


@pytest.mark.parametrize("way", [netdev(0), "storage.7"])
def test_a_vf_that_is_the_hosts_only_way_out_itself_or_below_a_vlan_is_refused(
    own_network: None, tmp_path: Path, way: str
) -> None:
    tiny_node.create(tmp_path)
    table, vlan = tmp_path / "root/proc/net/route", tmp_path / "root/sys/class/net/storage.7"
    table.parent.mkdir(parents=True, exist_ok=True)
    columns = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"
    table.write_text(f"{columns}\n{way} 00000000 0100A8C0 0003 0 0 0 00000000 0 0 0\n")
    vlan.mkdir()
    (vlan / f"lower_{netdev(0)}").symlink_to(f"../{netdev(0)}")
    with tiny_node.open_rig(tmp_path) as rig:
        with pytest.raises(HardwareError, match=f"{netdev(0)} carries the host's default route"):
            rig.add("c1", rig.pod())
        rig.add("c1", rig.pod("other"), deviceID=vf(1))
