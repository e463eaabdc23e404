"""What earlier versions left is taken over as a whole or not at all: real files, as a power cut leaves them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from agent.errors import ClaimConflict, LedgerError
from agent.ledger import SCHEMA_VERSION, Ledger, schema
from agent.ledger.database import read_books
from agent.model.allocation import (
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
from agent.model.vf_identity import KnownDevice, Rail
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


def test_an_early_version_left_all_that_the_books_know(tmp_path: Path) -> None:
    versions.unpack(versions.EARLY, tmp_path)
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
        }
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
    versions.unpack(versions.EARLY, tmp_path)
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
    for version in (versions.FIRST, versions.EARLY, versions.WITH_PODS, versions.BEFORE_CLAIMS):
        folder = tmp_path / version
        folder.mkdir()
        found = read_books(versions.unpack(version, folder) / "ledger.db")
        assert Grant("0000:3b:00.2", "rdma/vf", "0000:3b:00.2", found.grants[0].granted_at, POD) in found.grants
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
        for version in range(1, 8):
            db.executescript(schema.STEPS[version])
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


def test_every_earlier_format_has_a_step_to_the_next() -> None:
    assert list(schema.STEPS) == list(range(1, SCHEMA_VERSION))


def test_a_step_that_fails_changes_nothing_and_is_taken_later(tmp_path: Path) -> None:
    first_version(tmp_path)
    with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as db:
        db.execute("CREATE TABLE known_devices (x)")  # in the way of what the step does last
    before = tables(tmp_path / "ledger.db")
    with pytest.raises(LedgerError, match="known_devices already exists"):
        Ledger.open(tmp_path / "ledger.db", "boot")
    assert tables(tmp_path / "ledger.db") == before
    with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
        db.execute("DROP TABLE known_devices")
    with open_books(tmp_path) as books:
        assert len(books.attachments()) == 3
