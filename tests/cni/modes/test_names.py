"""Names that are taken, on the way into a pod and on the way back: in real namespaces, on a real kernel."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.errors import NetlinkFailed
from agent.hardware.host import Link
from agent.model.vf_identity import name_by_place
from tests.cni.modes.test_leftovers import LONG
from tests.cni.tiny_node import Rig, netdev, vf

HOST_NAME = netdev(0)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def make(name: str) -> None:
    """Make an interface of that name in the host."""
    ip("link", "add", name, "type", "bridge")


def seen(rig: Rig, index: int = 0) -> Link:
    """All of a VF's interface that stays the same over a way into a pod and back."""
    link = rig.home(index)
    return replace(link, ifindex=0, carrier=False)


def there(rig: Rig, pod: Path, name: str = "net1") -> Link:
    link = rig.link(pod, name)
    assert link.device == vf(0)
    return link


def back(rig: Rig, pod: Path | None, ifname: str = "net1") -> None:
    rig.detach("c1", pod, ifname)
    assert rig.ledger.quarantines() == ()


@pytest.mark.parametrize("taken", ["host-name", "bystander"])
def test_a_pod_whose_interface_has_the_host_name_takes_the_vf_all_the_same(rig: Rig, taken: str) -> None:
    """The kernel moves under the new name where the old one is taken."""
    pod, before = rig.pod(), seen(rig)
    rig.run_in(pod, "ip", "link", "add", HOST_NAME if taken == "host-name" else "eth9", "type", "bridge")
    rig.add("c1", pod)
    assert there(rig, pod).up
    back(rig, pod)
    assert seen(rig) == before


@pytest.mark.parametrize("namespace_ends", [False, True], ids=["moved", "left alone"])
@pytest.mark.parametrize("also_taken", [(), ("net1",)], ids=["", "both names"])
def test_a_vf_whose_name_was_taken_in_the_host_keeps_one_of_its_own(
    rig: Rig, also_taken: tuple[str, ...], namespace_ends: bool
) -> None:
    pod, before = rig.pod(), seen(rig)
    rig.add("c1", pod)
    for name in (HOST_NAME, *also_taken):
        make(name)
    if namespace_ends:
        rig.remove(pod)
    back(rig, None if namespace_ends else pod)
    assert seen(rig) == replace(before, name=name_by_place(vf(0)))
    assert name_by_place(vf(0)) == "vf00003b002"
    rig.add("c2", rig.pod("next"))  # and may go on from there


def test_a_name_that_is_taken_in_the_pod_is_told_and_undone(rig: Rig) -> None:
    pod, before = rig.pod(), seen(rig)
    rig.run_in(pod, "ip", "link", "add", "net1", "type", "bridge")
    with pytest.raises(NetlinkFailed, match="an interface of that name is in the pod already"):
        rig.add("c1", pod)
    rig.run_in(pod, "ip", "link", "add", HOST_NAME, "type", "bridge")  # now it cannot even be moved
    with pytest.raises(NetlinkFailed, match="an interface of that name is in the pod already"):
        rig.add("c1", pod)
    assert (seen(rig), rig.ledger.attachments()) == (before, ())


@pytest.mark.parametrize("what", ["name", "altname"])
def test_an_altname_that_is_taken_in_the_pod_stays_behind_and_comes_again(rig: Rig, what: str) -> None:
    """The kernel refuses the whole move for one alternative name that is taken there."""
    ip("link", "property", "add", "dev", HOST_NAME, "altname", "enp59s0v0", "altname", LONG)
    pod, before = rig.pod(), seen(rig)
    assert before.altnames == ("enp59s0v0", LONG)
    if what == "name":
        rig.run_in(pod, "ip", "link", "add", "enp59s0v0", "type", "bridge")
    else:
        rig.run_in(pod, "ip", "link", "add", "name", "elsewhere", "type", "bridge")
        rig.run_in(pod, "ip", "link", "property", "add", "dev", "elsewhere", "altname", "enp59s0v0")
    rig.add("c1", pod)
    assert there(rig, pod).altnames == (LONG,)
    rig.check("c1", pod)
    back(rig, pod)
    assert set(seen(rig).altnames) == {"enp59s0v0", LONG}
    assert replace(seen(rig), altnames=()) == replace(before, altnames=())


def test_an_altname_that_was_taken_in_the_host_is_given_up(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    ip("link", "property", "add", "dev", HOST_NAME, "altname", "enp59s0v0")
    pod, before = rig.pod(), seen(rig)
    rig.add("c1", pod)
    make("enp59s0v0")
    back(rig, pod)
    assert seen(rig) == replace(before, altnames=())
    assert "does not get its name enp59s0v0 again: another interface has it" in caplog.text


def test_altnames_that_a_vf_brings_home_by_itself_are_taken_from_it(rig: Rig) -> None:
    """As real VFs do that the kernel brings back: here somebody moves it by hand."""
    pod, before = rig.pod(), seen(rig)
    rig.add("c1", pod)
    rig.run_in(pod, "ip", "link", "property", "add", "dev", "net1", "altname", "strange")
    rig.run_in(pod, "ip", "link", "set", "net1", "netns", str(os.getpid()))
    assert seen(rig).altnames == ("strange",)
    back(rig, pod)
    assert seen(rig) == before


def test_asked_altnames_are_in_the_pod_only(rig: Rig) -> None:
    make("fabric0")  # the host's is no obstacle
    pod, before = rig.pod(), seen(rig)
    asked: dict[str, Any] = {"altNames": ["fabric0", "rail-0"]}
    rig.add("c1", pod, **asked)
    assert set(there(rig, pod).altnames) == {"fabric0", "rail-0"}
    rig.check("c1", pod, **asked)
    rig.run_in(pod, "ip", "link", "property", "del", "dev", "net1", "altname", "rail-0")
    with pytest.raises(Exception, match="net1 lacks the alternative name rail-0"):
        rig.check("c1", pod, **asked)
    back(rig, pod)
    assert seen(rig) == before
