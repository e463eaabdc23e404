"""What lay in the books before a reboot, and books that are lost: nobody's device is touched for it."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

from agent.model.allocation import VfSettings
from tests.cni import tiny_node
from tests.cni.reconciled import reconciler_of
from tests.cni.tiny_node import ASKED, PF_NETDEV, open_rig, stub_answer, vf
from tests.waiting import until


def test_a_reboot_voids_attachments_and_returns_their_leases(own_network: None, tmp_path: Path) -> None:
    tiny_node.create(tmp_path)
    with open_rig(tmp_path, boot_id="yesterday") as rig:
        rig.add("c1", rig.pod("one"), ipam=rig.ipam())
        rig.add("c2", rig.pod("two"), deviceID=vf(1), ipam=rig.ipam())
        for pod in ("one", "two"):
            rig.remove(tmp_path / f"{pod}.netns")
    with open_rig(tmp_path, boot_id="today") as rig:
        until(lambda: rig.machine.find_netdev(vf(1)) is not None)
        assert rig.attachments.heal(vf(0)) == "rebooted"
        # The start waits for the devices, not for plugins that may hang.
        assert (len(rig.leases()), len(rig.ledger.owed_leases())) == (4, 1)
        assert rig.attachments.leases.settle()[0] == 1
        assert len(rig.leases()) == 2
        # And an ADD does not wait for anybody who lived before.
        rig.add("c3", rig.pod("three"), deviceID=vf(1))
        assert rig.leases() == []
        assert [row.owner.container_id for row in rig.ledger.attachments()] == ["c3"]


def test_a_lease_that_a_repeated_add_took_over_is_not_given_away(own_network: None, tmp_path: Path) -> None:
    tiny_node.create(tmp_path)
    with open_rig(tmp_path, boot_id="yesterday") as rig:
        pod = rig.pod()
        rig.add("c1", pod, ipam=rig.stub_ipam(stub_answer("10.0.0.2/24")))
        rig.remove(pod)
    with open_rig(tmp_path, boot_id="today") as rig:
        until(lambda: rig.machine.find_netdev(vf(0)) is not None)
        assert rig.attachments.heal(vf(0)) == "rebooted"
        rig.stub_ipam(f"echo $CNI_COMMAND >>{tmp_path}/calls; {stub_answer('10.0.0.2/24')}")
        rig.add("c1", rig.pod("new"), ipam={"type": "stub"})
        assert rig.ledger.owed_leases() == ()
        assert rig.attachments.leases.settle()[0] == 0
        assert (tmp_path / "calls").read_text() == "DEL\nADD\n"


def test_nothing_is_reset_on_a_device_that_has_the_address_after_a_reboot(own_network: None, tmp_path: Path) -> None:
    tiny_node.create(tmp_path)
    with open_rig(tmp_path, boot_id="yesterday") as rig:
        pod = rig.pod()
        rig.add("c1", pod, ipam=rig.ipam(), **ASKED)
        rig.ledger.quarantine(vf(1), "clean-up failed")
        rig.remove(pod)
        until(lambda: rig.machine.find_netdev(vf(0)) is not None)
    with open_rig(tmp_path, boot_id="today") as rig:
        # Another device is there now, under a name of its own, as the administrator has set it up.
        found = rig.machine.find_netdev(vf(0))
        assert found is not None
        subprocess.run(["ip", "link", "set", found.name, "name", "other7", "mtu", "1300"], check=True)
        rig.machine.vf_control.apply(PF_NETDEV, 0, VfSettings(vlan=77, trust=True))
        before = rig.found()
        reconciler, counted = reconciler_of(rig, "today")
        asyncio.run(reconciler.run_once())
        assert rig.found() == before
        assert rig.ledger.attachments() == ()
        assert rig.leases() == []
        assert rig.ledger.quarantines() == ()
        assert counted == [("detach", "rebooted"), ("quarantine-end", "rebooted"), ("lease-return", "owed")]
        asyncio.run(reconciler.run_once())
        assert rig.found() == before


def test_a_vf_that_lost_its_row_and_its_pod_is_clean_after_one_run(own_network: None, tmp_path: Path) -> None:
    """The books are lost, and the pod ends before the next agent begins: nobody's settings stay on the PF."""
    tiny_node.create(tmp_path)
    with open_rig(tmp_path) as rig:
        before = rig.found()
        pod = rig.pod()
        rig.add("c1", pod, **ASKED)
    for file in tmp_path.glob("ledger.db*"):
        file.unlink()
    subprocess.run(["umount", "--lazy", pod], check=True)
    pod.unlink()
    with open_rig(tmp_path) as rig:
        until(lambda: rig.machine.find_netdev(vf(0)) is not None)
        reconciler, counted = reconciler_of(rig)
        asyncio.run(reconciler.run_once())
        name, _, _, up, settings = rig.found()
        assert (name, up, settings) == (before[0], before[3], before[4])
        assert counted == [("restore", "strange-name"), ("detach", "half-detaching")]
        assert rig.ledger.attachments() == ()
