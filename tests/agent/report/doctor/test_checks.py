"""What doctor finds of the node, of claims and of rails, from facts alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from agent.config import parse
from agent.model.device import Snapshot
from agent.model.vf_identity import Rail, identities
from agent.process.startup import network_problems
from agent.report.doctor import CHECKS, checks_hardware, examine
from agent.report.doctor.facts import ClaimFacts, Facts, Result, Severity, as_document, as_text, is_sound
from tests.agent.report.doctor import golden

Snapshots = Callable[[str], Snapshot]


@pytest.mark.parametrize("case", golden.CASES)
def test_what_is_found_is_said_as_it_was_with_its_remedy(case: str) -> None:
    assert golden.findings(case) in golden.FILE.read_text().rstrip().split("\n\n")


def test_every_check_calls_a_sound_node_fine() -> None:
    found = examine(golden.sound())
    assert {finding.severity for finding in found} == {Severity.FINE}, as_text(found)
    assert is_sound(found)
    # Nothing is offered to claims here, and no adapter has a Data Direct function.
    assert {name for name, _ in CHECKS} - {finding.check for finding in found} == {"claims", "data-direct"}
    assert "claims" in {finding.check for finding in examine(Facts(Snapshot(), golden.CLAIMS, claims=ClaimFacts()))}


def test_findings_are_laid_out_worst_first_and_counted_and_none_is_forged() -> None:
    found = [
        Result(Severity.FINE, "well", check="a"),
        Result(Severity.WARNING, "odd\nfine     b            well", "do\x1b[2K this", "b"),
        Result(Severity.ERROR, "broken", "do that", "c"),
        Result(Severity.ERROR, "broken too", "do more", "d"),
    ]
    assert as_text(found).splitlines() == [
        "error    c            broken",
        "                      do that",
        "error    d            broken too",
        "                      do more",
        "warning  b            odd\\nfine     b            well",
        "                      do\\x1b[2K this",
        "fine     a            well",
        "",
        "2 errors, 1 warning, 1 fine",
    ]
    document = json.loads(json.dumps(as_document(found)))
    assert document["sound"] is False
    assert document["findings"][2] == {"check": "c", "severity": "error", "text": "broken", "remedy": "do that"}


def rails_found(
    snapshot: Snapshot, text: str, rails: tuple[Rail, ...] = (), rails_unknown: str = ""
) -> list[tuple[Severity, str]]:
    facts = Facts(snapshot, parse(text, "test"), rails=rails, rails_unknown=rails_unknown)
    found = checks_hardware.rails(facts)
    return [(finding.severity, finding.text) for finding in found]


def by_rail(range_: str, more: str = "") -> str:
    return f"""
resources: [{{name: rdma/vf, kind: vf, network: rails}}]
networks: [{{name: rails, ipam: {{type: whereabouts, range: "{range_}"}}}}]
{more}
"""


def test_the_numbers_are_those_of_the_books_or_it_is_said_that_nobody_knows(node_snapshot: Snapshots) -> None:
    snapshot = node_snapshot("h100-8gpu")
    first, second, *_ = [device for device in snapshot.devices if device.rdma_devices and not device.is_vf]
    identity = identities(snapshot)
    swapped = (
        Rail(0, second.address, identity(second), "ens2f0np0"),
        Rail(1, first.address, identity(first), "ens1f0np0"),
        Rail(8, "0000:ff:00.0", "a card that is away", "ens9f0np0"),
    )
    ((_, text),) = rails_found(snapshot, "resources: []", rails=swapped)
    assert text.startswith("0 ens2f0np0, 1 ens1f0np0, 2 ens3f0np0")
    assert text.endswith(", 8 ens9f0np0 (away)")
    ((_, text),) = rails_found(snapshot, "resources: []", rails_unknown="/x/ledger.db is not there")
    assert text.endswith(", 7 ens8f0np0, as of a first start (/x/ledger.db is not there)")
    assert rails_found(Snapshot(), "resources: []") == [(Severity.FINE, "no adapter here has an RDMA device")]


def test_adapters_without_what_a_network_goes_by_are_named(node_snapshot: Snapshots) -> None:
    text = by_rail("10.{rail}.0.0/16", "topology: {rails: [ens1f0np0, ens2f0np0, ens3f0np0, ens4f0np0, ens5f0np0]}")
    (of_list, warning, _) = rails_found(node_snapshot("h100-8gpu"), text)
    left_out = "leaves out ens6f0np0, ens7f0np0, ens8f0np0, which resources take, so they have no rail"
    assert of_list == (Severity.WARNING, f"topology.rails: {left_out}")
    where = "which these adapters have not: 0000:ba:00.0, 0000:ca:00.0, 0000:da:00.0"
    assert warning == (Severity.WARNING, f"the network rails goes by rail, {where}")


def test_what_the_rails_of_the_node_cannot_use_is_found_by_doctor_and_at_the_start(node_snapshot: Snapshots) -> None:
    snapshot = node_snapshot("h100-8gpu")
    far = replace(snapshot, devices=tuple(replace(d, numa_node=d.numa_node + 4) for d in snapshot.devices))
    text = by_rail("10.{numa*60}.0.0/16")
    assert network_problems(parse(text, "test"), snapshot) == []
    (problem,) = network_problems(parse(text, "test"), far)
    assert problem.startswith("networks[0].ipam.range: for NUMA node 5: cannot be used")
    assert (Severity.ERROR, problem) in rails_found(far, text)
