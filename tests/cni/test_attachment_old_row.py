"""Rows of a version that wrote nulls for settings that say nothing: they are read as if these were left out."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from agent.errors import AttachmentError
from agent.model.allocation import VfSettings
from tests.cni.tiny_node import ASKED, PF_NETDEV, Rig, vf

REQUEST = """{
    "name": "rails",
    "settings": {
        "mac": "02:00:00:00:00:77", "vlan": 100, "vlan_qos": null, "vlan_proto": null, "min_tx_rate": null,
        "max_tx_rate": null, "spoofchk": null, "trust": true, "link_state": null
    },
    "mtu": 1400, "altnames": [], "device_info_file": null, "network": null, "cni_args": "", "cni_path": "/opt/cni/bin"
}"""
UNDO = """{
    "netdev": "ens1f0v0", "mac": "02:00:00:00:01:00", "mtu": 1500, "up": false, "pf_netdev": "ens1f0", "vf_index": 0,
    "settings": {
        "mac": "00:00:00:00:00:00", "vlan": 0, "vlan_qos": 0, "vlan_proto": "802.1q", "min_tx_rate": null,
        "max_tx_rate": null, "spoofchk": null, "trust": false, "link_state": null
    },
    "mode": "vf", "rdma": null, "extra": {}
}"""


def write_old(rig: Rig, request: str, undo: str | None = None) -> None:
    """Have the only row say what an older agent wrote, and start the agent anew."""
    rig.close()
    with closing(sqlite3.connect(rig.folder / "ledger.db", isolation_level=None)) as db:
        assert db.execute("UPDATE attachments SET request = ?", (request,)).rowcount == 1
        if undo is not None:
            db.execute("UPDATE attachments SET undo = ?", (undo,))
    rig.ledger, rig.attachments = rig.open_parts()


def test_check_compares_what_was_asked_and_passes_over_nulls(rig: Rig) -> None:
    pod = rig.pod()
    rig.add("c1", pod, **ASKED)
    write_old(rig, REQUEST, UNDO)
    rig.check("c1", pod, deviceID=vf(0))
    rig.machine.vf_control.apply(PF_NETDEV, 0, VfSettings(vlan=7, vlan_qos=3, vlan_proto="802.1ad", trust=True))
    with pytest.raises(AttachmentError, match=r"^the PF ens1f0 has vlan 7, not 100$"):
        rig.check("c1", pod, deviceID=vf(0))


def test_del_puts_back_what_the_row_says_and_nothing_that_is_null(rig: Rig) -> None:
    pod, before = rig.pod(), rig.found()
    rig.add("c1", pod, **ASKED)
    write_old(rig, REQUEST, UNDO)
    rig.machine.vf_control.apply(PF_NETDEV, 0, VfSettings(link_state="enable"))  # by somebody else, meanwhile
    rig.delete("c1", pod)
    rig.await_back(0)
    assert rig.settings().link_state == "enable"
    rig.machine.vf_control.apply(PF_NETDEV, 0, VfSettings(link_state="auto"))
    assert rig.found() == before
    assert rig.ledger.quarantines() == ()
