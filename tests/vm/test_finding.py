"""The books lost while pods hold VFs of real adapters: found again, and clean after the pod's end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from agent.model.vf_identity import name_by_place
from tests.agent.reconcile.outside import Answers
from tests.agent.reconcile.scene import reconcile_once, reconciler_of
from tests.live import Live
from tests.vm.adapters import MakePod, MakeVfs, Pf, ip, link, wait_until
from tests.vm.direct import Direct, look, opened

ASKED: dict[str, Any] = {
    "vlan": 123,
    "vlanQoS": 5,
    "mac": "02:00:00:00:00:55",
    "spoofchk": "off",
    "trust": "on",
    "max_tx_rate": 200,
    "mtu": 1400,
}


def reconcile(parts: Direct, pf: Pf) -> list[tuple[str, str]]:
    """Let the reconciler look once, as if all of the PF's VFs were offered to kubelet."""
    outside = Answers(units=dict, ours=pf.vfs)
    reconciler = reconciler_of(parts.ledger, parts.attachments, Live(parts.machine.scan), outside)
    asyncio.run(reconcile_once(reconciler))
    return outside.counted


def lose(folder: Path) -> None:
    for file in folder.glob("ledger.db*"):
        file.unlink()


def without_own(found: dict[str, Any]) -> dict[str, Any]:
    """Leave out what nobody can know any more: the MAC address that the driver had chosen, on either side, and
    the name that the kernel had given: ethN, by the order of their coming."""
    unknown = {"address": None, "ifname": None}
    return {
        key: {**value, **unknown} if key.endswith("on its PF") else ({**value[0], **unknown}, *value[1:])
        for key, value in found.items()
    }


def test_vfs_in_pods_get_rows_again_and_are_clean_after_them(
    pfs: tuple[Pf, ...], vfs: MakeVfs, netns: MakePod, tmp_path: Path
) -> None:
    pf = pfs[0]
    addresses = vfs(pf, 3)
    before = look(pf)
    pods = [netns(), netns()]
    with opened(tmp_path) as parts:
        for number, pod in enumerate(pods):
            parts.add(f"c{number}", pod, addresses[number], **{**ASKED, "mac": f"02:00:00:00:00:5{number}"})
    lose(tmp_path)
    with opened(tmp_path) as parts:
        assert [action for action in reconcile(parts, pf) if action[0] == "adopt"] == [("adopt", "found-in-pod")] * 2
        rows = {row.device: row for row in parts.ledger.attachments()}
        assert set(rows) == set(addresses[:2])
        assert {row.undo.netdev for row in rows.values()} == {name_by_place(a) for a in addresses[:2]}
        # The pods keep what they have.
        assert reconcile(parts, pf) == []
        assert link("net1", pods[0])["address"] == "02:00:00:00:00:50"
        # One pod's DEL comes, and names a container that the rows do not have: what counts is that its namespace ends.
        parts.delete("c0", pods[0])
        counted: list[tuple[str, str]] = []

        def both_are_back() -> bool:
            counted.extend(reconcile(parts, pf))
            return counted == [("detach", "owner-gone")] * 2

        for pod in pods:
            ip("netns", "delete", pod)
        wait_until("both VFs", both_are_back)
        assert without_own(look(pf)) == without_own(before)
        assert (parts.ledger.attachments(), parts.ledger.quarantines()) == ((), ())


def test_a_vf_that_came_back_while_nobody_remembered_it_is_put_back(
    pfs: tuple[Pf, ...], vfs: MakeVfs, netns: MakePod, tmp_path: Path
) -> None:
    pf = pfs[0]
    addresses = vfs(pf, 3)
    before = look(pf)
    pod = netns()
    with opened(tmp_path) as parts:
        parts.add("c1", pod, addresses[1], **ASKED)
    lose(tmp_path)
    ip("netns", "delete", pod)
    with opened(tmp_path) as parts:
        wait_until("the VF in the host", lambda: parts.machine.find_netdev(addresses[1]) is not None)
        counted = reconcile(parts, pf)
        assert counted == [("restore", "strange-name"), ("detach", "half-detaching")]
        assert without_own(look(pf)) == without_own(before)
        assert (parts.ledger.attachments(), parts.ledger.quarantines()) == ((), ())


def test_a_remembered_vf_gets_its_own_mac_address_too(
    pfs: tuple[Pf, ...], vfs: MakeVfs, netns: MakePod, tmp_path: Path
) -> None:
    """Its row is lost, with the last changes before a power cut say, but not what it was called."""
    pf = pfs[0]
    addresses = vfs(pf, 3)
    before = look(pf)
    pod = netns()
    with opened(tmp_path) as parts:
        reconcile(parts, pf)
        parts.add("c1", pod, addresses[1], **ASKED)
        (row,) = parts.ledger.attachments()
        parts.ledger.finish_detach(row)
        ip("netns", "delete", pod)
        wait_until("the VF in the host", lambda: parts.machine.find_netdev(addresses[1]) is not None)
        assert ("restore", "strange-name") in reconcile(parts, pf)
        assert look(pf) == before
