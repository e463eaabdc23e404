"""CDI specs of units, slots and claims: one file for each, as the books have it, and nothing of others is touched."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from agent.edits.cdi import SpecFiles, read_spec
from agent.edits.specs import Specs, file_of
from agent.edits.unit_specs import UnitSpecs
from agent.errors import Unavailable
from agent.ledger import Ledger
from agent.model.allocation import ClaimState, Hold, Spec
from agent.state import Latest
from tests.node import bound_slot, claimed, prepare

EDITS = {"env": ["PCIDEVICE_RDMA_VF=0000:3b:00.2"], "deviceNodes": [{"path": "/dev/infiniband/uverbs3"}]}
OTHER_EDITS = {"env": ["PCIDEVICE_RDMA_VF=0000:3b:00.3"]}
UNIT = Hold("0000:3b:00.2", "rdma/vf", ("0000:3b:00.2",), spec=Spec("vf", EDITS))
SLOT = bound_slot("slot-rdma:vf-0-3", "rdma/vf", "vf", "0000:3b:00.3", "main", "sandbox", "net1", None, EDITS)
RESULT = claimed("nic", "node", "vf-1", "rdma/vf", "vf", "0000:3b:00.4", "uid-nics-0-vf-1", edits=EDITS)
HOLDS = (UNIT, SLOT, replace(RESULT, claim_uid="uid-nics"))
NAMES = ("unit-0000:3b:00.2", "slot-rdma:vf-0-3", "claim-uid-nics")
of_each = pytest.mark.parametrize("hold", HOLDS, ids=["unit", "slot", "claim"])


@dataclass
class Rig:
    ledger: Ledger
    specs: Specs
    folder: Path

    def record(self, hold: Hold) -> str:
        """Put a hold into the books, and name its file."""
        if hold.claim_uid:
            prepare(self.ledger, "nics", hold)
        elif hold.is_bound:
            self.ledger.bind_slots([hold])
        else:
            self.ledger.grant([hold])
        return file_of(hold)

    def write(self, *holds: Hold) -> None:
        self.specs.sync([self.record(hold) for hold in holds])

    def change(self, hold: Hold) -> None:
        """Have it say something else, as an ADD does."""
        self.specs.change(lambda: {hold.key: Spec("vf", OTHER_EDITS)})

    def end(self, hold: Hold) -> None:
        """Let go of it, as its owners do."""
        if hold.claim_uid:
            self.ledger.set_claim_state(hold.claim_uid, ClaimState.UNPREPARING)
            self.specs.remove(file_of(hold))
        elif hold.is_bound:
            self.specs.let_go([hold])
        else:
            self.ledger.release([hold.key])
            UnitSpecs(self.ledger, self.specs, Latest(True)).tidy()

    def path(self, hold: Hold) -> Path:
        return self.folder / f"nodefabric-{file_of(hold)}.json"

    def there(self) -> set[str]:
        """Name all files but those copies that have a spec."""
        files = set(self.folder.iterdir())
        return {
            path.name for path in files if path.suffix in (".json", ".yaml") or path.with_suffix(".json") not in files
        }


@pytest.fixture
def rig(books: Ledger, tmp_path: Path) -> Rig:
    (tmp_path / "cdi").mkdir()
    return Rig(books, Specs(books, tmp_path / "cdi"), tmp_path / "cdi")


@of_each
def test_a_spec_names_the_hold_and_what_its_container_gets(rig: Rig, hold: Hold) -> None:
    name = rig.record(hold)
    assert rig.specs.sync([name]) == [name]
    assert rig.specs.sync([name]) == []
    file = rig.path(hold)
    assert rig.there() == {file.name}
    kind = "claim" if hold.claim_uid else "vf"
    assert json.loads(file.read_text()) == {
        "cdiVersion": "0.5.0",
        "kind": f"nodefabric.io/{kind}",
        "devices": [{"name": hold.key, "containerEdits": EDITS}],
    }
    assert file == rig.path(hold)
    assert file.stat().st_mode & 0o777 == 0o644
    assert read_spec(file) == (f"nodefabric.io/{kind}", frozenset({hold.key}))


@of_each
def test_a_spec_says_what_the_books_do_from_then_on(rig: Rig, hold: Hold) -> None:
    rig.write(hold)
    news = {hold.key: Spec("vf", OTHER_EDITS), "strange": Spec("vf", EDITS)}  # one that is released meanwhile
    rig.specs.change(lambda: news)
    assert not rig.specs.rewrite()
    (device,) = json.loads(rig.path(hold).read_text())["devices"]
    assert device["containerEdits"] == OTHER_EDITS
    assert len(rig.there()) == 1


@of_each
def test_a_spec_is_written_again_if_somebody_removes_or_changes_it(rig: Rig, hold: Hold) -> None:
    rig.write(*HOLDS)
    text = rig.path(hold).read_text()
    for damage in (Path.unlink, lambda path: path.write_text("{}")):
        damage(rig.path(hold))
        assert rig.specs.rewrite() == [file_of(hold)]
        assert rig.path(hold).read_text() == text
        assert not rig.specs.rewrite()


@of_each
def test_a_spec_goes_with_its_device_also_if_the_agent_is_killed_before_that(rig: Rig, hold: Hold) -> None:
    rig.write(hold)
    rig.ledger.set_specs({hold.key: Spec("vf")})
    assert rig.specs.rewrite() == [file_of(hold)]
    assert not rig.path(hold).exists()
    assert not rig.specs.rewrite()


@of_each
def test_specs_of_nobody_stay_until_they_are_removed_for_books_may_be_lost(rig: Rig, hold: Hold) -> None:
    rig.write(hold)
    if hold.claim_uid:
        rig.ledger.remove_claim(hold.claim_uid)
    elif hold.is_bound:
        rig.ledger.unbind([hold])
    else:
        rig.ledger.release([hold.key])
    rig.specs.rewrite()
    rig.specs.sync([file_of(hold)])
    assert rig.specs.names() == {file_of(hold)}
    rig.specs.remove(file_of(hold))
    rig.specs.remove(file_of(hold))
    assert rig.there() == set()


@of_each
@pytest.mark.parametrize("is_over", [False, True])
def test_a_spec_that_changes_while_specs_are_looked_at_is_as_it_was_changed(
    rig: Rig, hold: Hold, is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside: list[threading.Thread] = []
    look = SpecFiles.says

    def says(files: SpecFiles, *args: Any) -> bool:
        if not beside:
            beside.append(threading.Thread(target=rig.end if is_over else rig.change, args=(hold,)))
            beside[0].start()
            beside[0].join(0.3)  # as far as it comes before the spec is written
        return look(files, *args)

    name = rig.record(hold)
    monkeypatch.setattr(SpecFiles, "says", says)
    rig.specs.sync([name])
    beside[0].join()
    monkeypatch.undo()
    assert rig.path(hold).exists() is not is_over
    assert not rig.specs.rewrite()


def test_a_claim_has_one_file_for_all_of_its_devices_but_those_that_containers_get_nothing_for(rig: Rig) -> None:
    second = replace(RESULT, key="second", request="second", devices=("0000:3b:00.5",))
    bare = replace(RESULT, key="bare", request="bare", devices=("0000:3b:00.6",), spec=None)
    prepare(rig.ledger, "nics", RESULT, second, bare)
    rig.specs.sync([NAMES[2]])
    found = json.loads(rig.path(HOLDS[2]).read_text())["devices"]
    assert [device["name"] for device in found] == [RESULT.key, "second"]


def test_specs_do_not_see_each_other_nor_those_of_others(rig: Rig) -> None:
    rig.write(*HOLDS)
    ours = {f"nodefabric-{name}.json" for name in NAMES}
    others = {"nvidia.json", "slot-rdma:vf-0-3.json", f"nodefabric-{SLOT.key}.yaml", ".nodefabric"}
    for name in others:
        (rig.folder / name).write_text("{}")
    assert rig.specs.names() == set(NAMES)
    assert [*rig.specs.names("unit-"), *rig.specs.names("claim-")] == [NAMES[0], NAMES[2]]
    for name in NAMES:
        assert rig.there() == ours | others
        rig.specs.remove(name)
        ours.discard(f"nodefabric-{name}.json")
    assert rig.specs.names() == frozenset()


def test_what_a_killed_process_left_half_written_is_no_spec_and_goes(rig: Rig) -> None:
    halves = [rig.folder / f".nodefabric-{name}.json.{pid}" for name in NAMES for pid in (1, os.getpid())]
    halves.append(rig.folder / f".nodefabric-{NAMES[2]}.claim.1")
    for half in halves:  # in a container all processes are 1
        half.write_text("{")
    assert rig.specs.names() == frozenset()
    assert rig.there() == set()


@of_each
def test_a_folder_that_cannot_be_written_is_named_with_a_remedy(rig: Rig, tmp_path: Path, hold: Hold) -> None:
    (tmp_path / "file").write_text("")
    specs = Specs(rig.ledger, tmp_path / "file")
    remedy = rf"nodefabric-{file_of(hold)}\.\w+ cannot be written.*no container.*cdiDir"
    with pytest.raises(Unavailable, match=remedy):
        specs.sync([rig.record(hold)])
    assert specs.names() == frozenset()


def test_a_spec_that_cannot_be_written_keeps_none_from_being_removed(rig: Rig) -> None:
    rig.write(UNIT, SLOT)
    rig.path(UNIT).unlink()
    rig.path(UNIT).mkdir()  # in the way
    with pytest.raises(Unavailable):
        rig.specs.change(lambda: {UNIT.key: Spec("vf", EDITS), SLOT.key: Spec("vf")})
    assert not rig.path(SLOT).exists()


def test_specs_of_pools_are_exactly_those_that_are_wanted(rig: Rig) -> None:
    texts, stray = {"pool-a": "a", "pool-b": "b"}, rig.folder / "nodefabric-pool-old.json"
    stray.write_text("{}")
    rig.write(UNIT)
    assert rig.specs.rewrite() == []
    assert stray.exists()  # until somebody says what pools there are
    rig.specs.keep_pools(texts)
    assert rig.there() == {rig.path(UNIT).name, "nodefabric-pool-a.json", "nodefabric-pool-b.json"}
    (rig.folder / "nodefabric-pool-a.json").unlink()
    (rig.folder / "nodefabric-pool-b.json").write_text("{}")
    assert rig.specs.rewrite() == ["pool-a", "pool-b"]
    assert (rig.folder / "nodefabric-pool-b.json").read_text() == "b"
    rig.specs.keep_pools({"pool-a": "c"})
    assert rig.there() == {rig.path(UNIT).name, "nodefabric-pool-a.json"}
    assert (rig.folder / "nodefabric-pool-a.json").read_text() == "c"


def test_specs_of_pools_that_could_not_be_written_are_written_later(rig: Rig, tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("")
    specs = Specs(rig.ledger, folder)
    with pytest.raises(Unavailable, match="cannot be written"):
        specs.keep_pools({"pool-a": "a"})
    folder.unlink()
    assert specs.rewrite() == ["pool-a"]
    assert specs.rewrite() == []
