"""What earlier versions left is taken over as a whole or not at all: real files, as a power cut leaves them."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from agent.errors import LedgerError
from agent.ledger import Ledger
from agent.ledger.database import read_books
from agent.model.allocation import (
    AttachmentState,
    ClaimRef,
    ClaimState,
    Hold,
    NetnsId,
    Owner,
    PodRef,
    Quarantine,
    Spec,
    Undo,
    VfSettings,
)
from agent.model.vf_identity import KnownDevice, Rail
from tests import sandbox, versions
from tests.node import bound_slot, claimed, open_books

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
        assert [(g.key, g.pod) for g in books.holds()] == [("0000:3b:00.2", POD), ("0000:3b:00.3", None)]
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
        assert (books.owed_leases(), books.bound_slots(), books.known_devices()) == ((), (), ())
        books.owe_lease("c2", "net1", "/run/netns/c2", REQUEST)
        books.finish_detach(row)
    with open_books(tmp_path, "boot-1") as books:
        assert len(books.attachments()) == 2
        assert len(books.owed_leases()) == 1


def test_an_early_version_left_all_that_the_books_know(tmp_path: Path) -> None:
    versions.unpack(versions.EARLY, tmp_path)
    with open_books(tmp_path, "boot-1") as books:
        assert books.recovered_from is None
        assert {g.key: (g.resource_name, g.device, g.pod) for g in books.holds()} == {
            "0000:3b:00.2": ("rdma/vf", "0000:3b:00.2", POD),
            "0000:3b:00.3": ("rdma/vf", "0000:3b:00.3", None),
            "slot-late-0-0": ("rdma/late", "0000:3b:00.6", OTHER),
            "slot-late-0-1": ("rdma/late", "", None),
        }
        assert states(books) == {
            "0000:3b:00.2": ("attached", "c0"),
            "0000:3b:00.4": ("detaching", "c2"),
        }
        (bound,) = books.bound_slots()
        assert replace(bound, since=0.0) == bound_slot(
            key="slot-late-0-0",
            resource_name="rdma/late",
            kind="vf",
            device="0000:3b:00.6",
            container="main",
            container_id="c9",
            cni_ifname="eth0",
            pod=OTHER,
            edits=EDITS,
            boot_id="boot-1",
            since=bound.bound_at,
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


def test_grants_bindings_and_devices_of_claims_became_holds(tmp_path: Path) -> None:
    versions.unpack(versions.BEFORE_HOLDS, tmp_path)
    node = {"path": "/dev/infiniband/uverbs4", "permissions": "rw"}
    edits = {"env": ["PCIDEVICE_RDMA_LATE=0000:3b:00.6"], "deviceNodes": [node]}
    hca = Spec(
        "hca",
        {"env": ["NCCL_IB_HCA==mlx5_0"], "deviceNodes": [node]},
        {"env": ["NCCL_IB_GID_INDEX=3"]},
        ("hca-1", "hca-2"),
    )
    rail = Spec("rail", {"env": []}, beside=("rail-GPU-1",)).with_nodes("0000:3d:00.0", [node])
    vf, late = "0000:3b:00.2", "slot-rdma:late-0"
    with open_books(tmp_path, "boot-1") as books:
        assert books.recovered_from is None
        assert {replace(hold, since=0.0, bound_at=0.0) for hold in books.holds() if hold.spec is None} == {
            Hold(vf, "rdma/vf", (vf,), 0.0, POD),
            Hold(f"{late}-1", "rdma/late"),
        }
        found = {hold.key: replace(hold, since=0.0, bound_at=0.0) for hold in books.holds() if hold.spec is not None}
        assert found == {
            "hca-1": Hold("hca-1", "rdma/hca", ("0000:5e:00.0",), spec=hca),
            "rail-GPU-1": Hold("rail-GPU-1", "rdma/rail", ("0000:3c:00.0", "0000:3d:00.0"), spec=rail),
            f"{late}-0": bound_slot(
                f"{late}-0", "rdma/late", "vf", "0000:3b:00.6", "main", "c9", "eth0", OTHER, edits, "boot-1"
            ),
            f"{late}-7": bound_slot(f"{late}-7", "rdma/late", "vf", "0000:3b:00.7", "", "", "", None, edits, "boot-1"),
        }
        assert all(hold.since > 0 for hold in books.holds())
        (claim,) = books.claims()
        assert (claim.ref, claim.state, claim.pods) == (
            ClaimRef("uid-c", "default", "c"),
            ClaimState.PREPARED,
            (POD,),
        )
        nic = claimed("nic", "node-1", "vf-1", "rdma/vf", "vf", "0000:3b:01.1", "uid-c-0-vf-1", edits=edits)
        share = claimed("share", "node-1", "hca-1", "rdma/hca", "hca", "0000:5e:00.0", "uid-c-1-hca-1", "s1")
        look = claimed("look", "node-1", "vf-2", "rdma/vf", "vf", "0000:3b:01.1", "uid-c-2-vf-2")
        named = Spec("claim", {"env": ["NODEFABRIC_CLAIM=default/c"]})
        assert [replace(hold, claim_uid="") for hold in claim.devices] == [
            replace(nic, identity="card/1", network={"mtu": 9000}, ifname="rail0"),
            replace(share, exclusive=False, shares=3, spec=named),
            replace(look, exclusive=False, admin=True, spec=named),
        ]
        assert books.claim_on("0000:3b:01.1") == claim
    with open_books(tmp_path, "boot-2") as books:
        assert books.bound_slots() == ()
        assert books.claims() == (claim,)


def test_a_slot_bound_in_an_earlier_boot_stands_in_the_way_of_no_claim_or_new_grant(tmp_path: Path) -> None:
    versions.unpack(versions.BEFORE_HOLDS, tmp_path)
    slot, claimed_since = "slot-rdma:late-0-0", "0000:3b:01.1"
    with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as db:
        db.execute("UPDATE bindings SET device = ?, boot_id = 'boot-0' WHERE unit_id = ?", (claimed_since, slot))
        db.execute("UPDATE grants SET device = '', pod_name = NULL WHERE unit_id = ?", (slot,))
    with open_books(tmp_path, "boot-1") as books:
        assert books.recovered_from is None
        assert [hold.claim_uid for hold in books.holds_on(claimed_since)] == ["uid-c"]
        hold = books.hold(slot)
        assert hold is not None
        assert (hold.devices, hold.pod) == ((), None)


def test_a_slot_whose_grant_alone_names_a_device_of_an_earlier_boot_has_none(tmp_path: Path) -> None:
    """The first slot that was bound in a boot took away all bindings of the boots before, and left their grants."""
    versions.unpack(versions.BEFORE_HOLDS, tmp_path)
    with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as db:
        db.execute("UPDATE grants SET device = '0000:3b:00.6' WHERE unit_id = 'slot-rdma:late-0-1'")
    with open_books(tmp_path, "boot-1") as books:
        assert [hold.key for hold in books.holds_on("0000:3b:00.6")] == ["slot-rdma:late-0-0"]


@pytest.mark.usefixtures("own_network")
def test_books_are_brought_up_to_date_where_no_temporary_file_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TMPDIR", "SQLITE_TMPDIR"):
        monkeypatch.delenv(variable, raising=False)
    with sandbox.mounts():
        subprocess.run(["mount", "--bind", tmp_path, "/mnt"], check=True)
        for place in ("/var/tmp", "/tmp"):
            subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", place], check=True)
        os.chdir("/tmp")
        versions.unpack(versions.BEFORE_HOLDS, Path("/mnt"))
        with closing(sqlite3.connect("/mnt/ledger.db", isolation_level=None)) as db:
            edits = {"env": ["A=" + "x" * 999_999]}  # more than SQLite keeps in memory by itself
            db.execute("UPDATE bindings SET edits = :edits", {"edits": json.dumps(edits)})
            db.execute("UPDATE claim_devices SET edits = :edits", {"edits": json.dumps(edits)})
        found = read_books(Path("/mnt/ledger.db"))
        for _ in range(2):
            with open_books(Path("/mnt"), "boot-1") as books:
                assert {hold.key: hold for hold in books.holds()} == {hold.key: hold for hold in found.holds}
                assert books.claims() == found.claims


def test_another_process_reads_what_each_version_left_without_the_agent(tmp_path: Path) -> None:
    for version in (versions.FIRST, versions.EARLY, versions.WITH_PODS):
        folder = tmp_path / version
        folder.mkdir()
        found = read_books(versions.unpack(version, folder) / "ledger.db")
        assert Hold("0000:3b:00.2", "rdma/vf", ("0000:3b:00.2",), found.holds[0].since, POD) in found.holds
        row = found.attachments[0]
        assert (row.device, row.state, row.claim_uid) == ("0000:3b:00.2", AttachmentState.ATTACHED, "")
        assert found.claims == ()


# ---------------------------------------------------------------------------------------------------------- each step


def tables(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Tell what the tables and indices of a file look like."""
    with closing(sqlite3.connect(path)) as db:
        names = [n for (n,) in db.execute("SELECT name FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'")]
        found: dict[str, list[tuple[object, ...]]] = {}
        for name in sorted(names):
            found[name] = list(db.execute(f"PRAGMA table_info({name})")) or list(
                db.execute(f"PRAGMA index_xinfo({name})")
            )
            found[f"{name} strict"] = list(db.execute("SELECT strict FROM pragma_table_list WHERE name = ?", (name,)))
        return found


def first_version(folder: Path) -> Path:
    """Put what the first version left into a folder, and return its ledger."""
    return versions.unpack(versions.FIRST, folder) / "ledger.db"


def test_a_file_brought_up_to_date_looks_like_a_new_one(tmp_path: Path) -> None:
    first_version(tmp_path)
    (tmp_path / "new").mkdir()
    for folder in (tmp_path, tmp_path / "new"):
        with open_books(folder):
            pass
    assert tables(tmp_path / "ledger.db") == tables(tmp_path / "new/ledger.db")


def test_rails_of_before_planes_keep_their_numbers_as_those_that_resources_take(tmp_path: Path) -> None:
    first_version(tmp_path)
    with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as db:
        db.execute("CREATE TABLE rails (number INTEGER PRIMARY KEY, device, identity, netdev, is_named)")
        db.execute("INSERT INTO rails VALUES (3, '0000:3b:00.0', 'card', 'ens1', 0), (5, '0000:5d:00.0', '', '', 1)")
        db.execute("PRAGMA user_version = 8")
    with open_books(tmp_path) as books:
        assert books.rails() == (
            Rail(3, "0000:3b:00.0", "card", "ens1", is_named=False, plane=0, is_settled=True),
            Rail(5, "0000:5d:00.0", "", "", is_named=True, plane=0, is_settled=True),
        )
        planes = tuple(replace(books.rails()[0], plane=plane, device=f"0000:3b:00.{plane}") for plane in (0, 1))
        books.keep_rails(planes)
    with open_books(tmp_path) as books:
        assert books.rails() == planes


def test_a_step_that_fails_changes_nothing_and_is_taken_later(tmp_path: Path) -> None:
    first_version(tmp_path)
    with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as db:
        db.execute("CREATE TABLE hold_devices_exclusive (x)")  # in the way of an index
    before = tables(tmp_path / "ledger.db")
    with pytest.raises(LedgerError, match="already a table named hold_devices_exclusive"):
        Ledger.open(tmp_path / "ledger.db", "boot")
    assert tables(tmp_path / "ledger.db") == before
    with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
        db.execute("DROP TABLE hold_devices_exclusive")
    with open_books(tmp_path) as books:
        assert len(books.attachments()) == 3
