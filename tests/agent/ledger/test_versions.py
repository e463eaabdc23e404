"""What earlier versions left is taken over: real files of theirs, cut off as a power cut leaves them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agent.errors import ClaimConflict
from agent.ledger import Ledger
from agent.ledger.database import read_books
from agent.model.allocation import (
    Attachment,
    AttachmentState,
    Binding,
    Claim,
    ClaimDevice,
    ClaimRef,
    ClaimState,
    Grant,
    NetnsId,
    Owner,
    PodRef,
    Quarantine,
    Undo,
    VfSettings,
)
from agent.model.vf_identity import KnownDevice
from tests import versions
from tests.node import open_books

POD, OTHER = PodRef("default", "trainer", "uid-1"), PodRef("default", "worker", "uid-2")
PLAIN = VfSettings(vlan=0, vlan_qos=0, vlan_proto="802.1q", trust=False)
IPAM = {"type": "host-local", "ranges": [[{"subnet": "10.9.0.0/24"}]]}
NETWORK = {"cniVersion": "1.0.0", "name": "rails", "ipam": IPAM}
REQUEST = {"name": "rails", "network": NETWORK, "cni_args": "", "cni_path": "/opt/cni/bin"}
ANSWER = {"cniVersion": "1.0.0", "interfaces": [{"name": "net1"}]}
EDITS = {"deviceNodes": [{"path": "/dev/infiniband/uverbs4"}]}


def states(books: Ledger) -> dict[str, tuple[str, str]]:
    """Tell each attachment's state, and whose it is, by its device."""
    return {row.device: (row.state.value, row.owner.container_id) for row in books.attachments()}


def test_the_first_version_left_grants_attachments_and_a_quarantine(tmp_path: Path) -> None:
    versions.unpack(versions.FIRST, tmp_path)
    with open_books(tmp_path, "boot-1") as books:
        assert books.recovered_from is None
        assert not books.is_new
        assert [(g.unit_id, g.pod) for g in books.grants()] == [("0000:3b:00.2", POD), ("0000:3b:00.3", None)]
        assert states(books) == {
            "0000:3b:00.2": ("attached", "c0"),
            "0000:3b:00.3": ("attaching", "c1"),
            "0000:3b:00.4": ("detaching", "c2"),
        }
        row = books.attachments()[0]
        assert row.owner == Owner("c0", "net1", POD, NetnsId(4, 4026531840))
        assert row.undo == Undo(
            "ens1f0v0", "02:00:00:00:01:00", 1500, up=False, pf_netdev="ens1f0", vf_index=0, settings=PLAIN
        )
        assert (row.netns_path, row.result, row.boot_id) == ("/run/netns/c0", ANSWER, "boot-1")
        (withheld,) = books.quarantines()
        assert (withheld.device, withheld.reason) == ("0000:3b:00.7", "clean-up failed: it hangs")
        assert (books.owed_leases(), books.bindings(), books.known_devices()) == ((), (), ())
        books.owe_lease("c2", "net1", "/run/netns/c2", REQUEST)
        books.finish_detach(row)
    with open_books(tmp_path, "boot-1") as books:
        assert len(books.attachments()) == 2
        assert len(books.owed_leases()) == 1


def test_the_version_with_a_journal_left_all_that_the_books_know(tmp_path: Path) -> None:
    versions.unpack(versions.WITH_JOURNAL, tmp_path)
    with open_books(tmp_path, "boot-1") as books:
        assert books.recovered_from is None
        assert {g.unit_id: (g.resource_name, g.device, g.pod) for g in books.grants()} == {
            "0000:3b:00.2": ("rdma/vf", "0000:3b:00.2", POD),
            "0000:3b:00.3": ("rdma/vf", "0000:3b:00.3", None),
            "slot-late-0-0": ("rdma/late", "0000:3b:00.6", OTHER),
            "slot-late-0-1": ("rdma/late", "", None),
        }
        assert states(books) == {
            "0000:3b:00.2": ("attached", "c0"),
            "0000:3b:00.4": ("detaching", "c2"),
            "0000:3b:00.3": ("attached", "c1"),  # only the journal has it
            "0000:3b:00.6": ("attaching", "c4"),  # and this
        }
        late = books.attachment_on("0000:3b:00.3")
        assert late == Attachment(
            attachment_id=4,
            owner=Owner("c1", "net1", POD, NetnsId(4, 4026531841)),
            ifname="net1",
            device="0000:3b:00.3",
            resource_name="rdma/vf",
            state=AttachmentState.ATTACHED,
            undo=Undo("ens1f0v1", "02:00:00:00:01:01", 1500, up=False, pf_netdev="ens1f0", vf_index=1, settings=PLAIN),
            boot_id="boot-1",
            netns_path="/run/netns/c1",
            request=REQUEST,
            result=ANSWER,
            since=late.since if late is not None else 0.0,
        )
        (binding,) = books.bindings()
        assert binding == Binding(
            unit_id="slot-late-0-0",
            resource_name="rdma/late",
            kind="vf",
            device="0000:3b:00.6",
            container="main",
            container_id="c9",
            cni_ifname="eth0",
            pod=OTHER,
            edits=EDITS,
            boot_id="boot-1",
            since=binding.since,
        )
        owed = [(lease.container_id, lease.ifname, lease.netns_path, lease.problem) for lease in books.owed_leases()]
        assert owed == [
            ("c5", "net1", "/run/netns/c5", "host-local did not answer"),
            ("c8", "net2", "/run/netns/c8", ""),
        ]
        assert [lease.request for lease in books.owed_leases()] == [REQUEST, REQUEST]
        (withheld,) = books.quarantines()
        expected = Quarantine("0000:3b:00.9", "clean-up failed: it hangs", withheld.since, "boot-1")
        assert withheld == expected
        known = KnownDevice("0000:3b:00.3", "guid/1", "ens1f0v1", "02:00:00:00:01:01", 1500, "boot-1")
        assert books.known_devices() == (known,)


def test_a_reboot_after_it_voids_the_bindings_alone(tmp_path: Path) -> None:
    versions.unpack(versions.WITH_JOURNAL, tmp_path)
    with open_books(tmp_path, "boot-2") as books:
        assert books.bindings() == ()
        assert [g.device for g in books.grants() if g.unit_id == "slot-late-0-0"] == [""]
        assert {row.boot_id for row in books.attachments()} == {"boot-1"}
        assert len(books.owed_leases()) == 2


def test_the_last_version_without_claims_left_books_that_take_claims(tmp_path: Path) -> None:
    versions.unpack(versions.BEFORE_CLAIMS, tmp_path)
    taken = ClaimDevice("nic", "node", "vf", "rdma/vf", "vf", "0000:3b:00.4", "name")
    free = replace(taken, device="0000:3b:00.5")
    with open_books(tmp_path, "boot-1") as books:
        assert (books.recovered_from, books.claims()) == (None, ())
        assert {g.unit_id: (g.device, g.pod) for g in books.grants()} == {
            "0000:3b:00.2": ("0000:3b:00.2", POD),
            "0000:3b:00.3": ("0000:3b:00.3", None),
            "slot-late-0-0": ("0000:3b:00.6", OTHER),
            "slot-late-0-1": ("", None),
        }
        assert states(books) == {"0000:3b:00.2": ("attached", "c0"), "0000:3b:00.4": ("detaching", "c2")}
        assert {row.claim_uid for row in books.attachments()} == {""}
        assert [(b.device, b.edits) for b in books.bindings()] == [("0000:3b:00.6", EDITS)]
        assert [lease.container_id for lease in books.owed_leases()] == ["c5"]
        assert [entry.device for entry in books.quarantines()] == ["0000:3b:00.9"]
        assert [known.netdev for known in books.known_devices()] == ["ens1f0v1"]
        claim = Claim(ClaimRef("uid-c", "default", "c"), ClaimState.PREPARING, (taken,), (OTHER,), OTHER.uid)
        with pytest.raises(ClaimConflict, match=r"pod default/trainer .*on its way back"):
            books.prepare_claim(claim)
        books.prepare_claim(replace(claim, devices=(free,)))
    with open_books(tmp_path, "boot-1") as books:
        assert [c.devices for c in books.claims()] == [(free,)]


def test_another_process_reads_what_each_version_left_without_the_agent(tmp_path: Path) -> None:
    for version in (versions.FIRST, versions.WITH_JOURNAL, versions.WITH_PODS, versions.BEFORE_CLAIMS):
        folder = tmp_path / version
        folder.mkdir()
        found = read_books(versions.unpack(version, folder) / "ledger.db")
        assert Grant("0000:3b:00.2", "rdma/vf", "0000:3b:00.2", found.grants[0].granted_at, POD) in found.grants
        row = found.attachments[0]
        assert (row.device, row.state, row.claim_uid) == ("0000:3b:00.2", AttachmentState.ATTACHED, "")
        assert found.claims == ()
