"""The status document, what it says of claims, and its layout for people; what is counted of the same node."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.ledger.database import Books
from agent.model.allocation import AttachmentState, ClaimState, Quarantine
from agent.model.device import Problem, Snapshot
from agent.model.health import text_of
from agent.report import status, status_text
from agent.report.facts import DriverState, Facts
from tests.agent.ledger.test_claims import claim, of_share
from tests.agent.report import golden
from tests.agent.report.golden import OTHER, ROW, document
from tests.node import owner


@pytest.mark.parametrize("name", golden.REPORTED)
def test_what_is_reported_of_a_whole_node_is_as_it_was(name: str) -> None:
    assert f"{golden.REPORTED[name]()}\n" == (golden.FOLDER / name).read_text()


def test_many_units_with_one_reason_are_one_line() -> None:
    units = tuple(golden.unit(f"vf-{n}", "", golden.LINK_DOWN) for n in range(20))
    lines = status_text.text(document(Facts(Snapshot(), {"rdma/vf": units})), 10.0).splitlines()
    (line,) = [line for line in lines if "LinkDown" in line]
    assert line.startswith("vf-0 and 19 more  rdma/vf   LinkDown")
    assert line.endswith(text_of("LinkDown"))


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """List the keys of a document that hold no further keys, as docs/status-json.md spells them."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        for inner in value:
            yield from leaves(inner, f"{path}[]")
    else:
        yield path


def test_every_key_is_described_and_no_other() -> None:
    # Deeper branches of the tree are like the first; reasons are by word.
    found = {re.sub(r"(\.below\[\])(\.below\[\])+", r"\1\2", path) for path in leaves(golden.document())}
    found = {path.partition(".")[0] if path.startswith(("reasons.", "obstacles.")) else path for path in found}
    found = {path for path in found if not any(other.startswith(f"{path}[]") for other in found)}
    found = {path for path in found if not path.startswith("hardware.tree[].below[].below[].b")}
    text = (Path(__file__).parents[3] / "docs/status-json.md").read_text()
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)} == found


def test_an_idle_node_is_ready_and_told_in_few_lines() -> None:
    made = document(Facts(Snapshot()), publishing="the API server is away")
    assert status_text.text(made, 10.0).splitlines() == [
        "node n1  nodefabric 1.2  ready",
        "  publishing: the API server is away",
        "",
        "no pod has a device",
    ]
    assert made.keys().isdisjoint({"dra", "claims"})
    assert status_text.events_text([], 1.0) == "nothing has happened yet"


def test_the_books_alone_tell_what_is_where_while_no_agent_runs() -> None:
    facts = golden.facts()
    found = Books(facts.holds, facts.attachments, facts.quarantines, facts.owed_leases, facts.claims)
    made = json.loads(json.dumps(status.without_agent(found, node="n1", version="1.2", problem="does not run")))
    with_agent = json.loads(json.dumps(golden.document()))
    assert made.keys() == with_agent.keys() - {"snapshot", "dra"}
    for key in ("attachments", "quarantine", "owedLeases", "claims"):
        assert made[key] == with_agent[key]
    lines = status_text.text(made, 10.0).splitlines()
    assert lines[:2] == ["node n1  nodefabric 1.2  NOT READY", "  agent: does not run"]
    assert not any("RESOURCE  KIND" in line for line in lines)


def test_time_is_told_in_its_largest_unit() -> None:
    told = [status_text.ago(seconds) for seconds in (-5, 0, 59.9, 60, 3599, 7200, 200_000)]
    assert told == ["0s", "0s", "59s", "1m", "59m", "2h", "2d"]


def test_what_comes_from_outside_forges_no_row() -> None:
    def told(text: str) -> str:
        (lease, *_), snapshot = golden.facts().owed_leases, Snapshot(problems=(Problem("/sys/x", text),))
        facts = Facts(
            snapshot, quarantines=(Quarantine(OTHER, text, 1.0),), owed_leases=(replace(lease, problem=text),)
        )
        return status_text.text(document(facts, ledger=text), 10.0)

    forged = told("failed\nrdma/vf  vf  64  64  0  0\x1b[2K")
    assert len(forged.splitlines()) == len(told("failed").splitlines())
    assert forged.replace("\n", "").isprintable()
    assert forged.count("failed\\nrdma/vf  vf  64  64  0  0\\x1b[2K") == 4


def test_a_claim_on_its_way_back_says_so_though_its_device_is_still_in_the_pod() -> None:
    leaving = replace(claim(), state=ClaimState.UNPREPARING)
    row = replace(ROW, claim_uid="uid-c", state=AttachmentState.DETACHING)
    (told,) = document(Facts(Snapshot(), claims=(leaving,), attachments=(row,)))["claims"]
    assert told["devices"][0]["state"] == "unpreparing"


def test_a_claims_adapter_is_attached_as_long_as_any_pod_has_a_part_of_it() -> None:
    prepared = replace(claim("c", of_share()), state=ClaimState.PREPARED)
    adapter = prepared.devices[0].device
    first, second = (replace(ROW, device=f"{adapter}/c{n}/net1", claim_uid="uid-c") for n in (1, 2))
    leaving = replace(second, attachment_id=2, owner=owner("c2", "eth0"), state=AttachmentState.DETACHING)
    for rows in ((first, leaving), (leaving, first)):
        (told,) = document(Facts(Snapshot(), claims=(prepared,), attachments=rows))["claims"]
        assert told["devices"][0]["state"] == "attached"


def test_a_driver_that_kubelet_does_not_know_is_told_in_one_line() -> None:
    made = document(Facts(Snapshot(), driver=DriverState("d.io", "not found", None)))
    told = "NOT REGISTERED with kubelet: not found; slices not known yet; 0 devices, 0 healthy"
    assert status_text.text(made, 0.0).splitlines()[1] == f"DRA driver d.io: {told}"
