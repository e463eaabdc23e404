"""Rails of a node, and networks that go by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from agent.config import parse
from agent.model.device import Snapshot
from agent.model.vf_identity import Rail, identities
from agent.process.startup import network_problems
from agent.report.doctor import checks_hardware
from agent.report.doctor.facts import Facts
from agent.report.doctor.results import Severity

Snapshots = Callable[[str], Snapshot]


def told(
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


def test_the_rails_are_listed_by_number(node_snapshot: Snapshots) -> None:
    ((severity, text),) = told(node_snapshot("h100-8gpu"), "resources: []")
    assert severity is Severity.FINE
    assert text.startswith("0 ens1f0np0, 1 ens2f0np0, 2 ens3f0np0")
    assert told(Snapshot(), "resources: []") == [(Severity.FINE, "no adapter here has an RDMA device")]


def test_an_adapter_that_is_listed_and_not_there_is_named(node_snapshot: Snapshots) -> None:
    found = told(node_snapshot("h100-8gpu"), "topology: {rails: [ens1f0np0, gone0]}")
    assert found == [
        (Severity.WARNING, "topology.rails[1]: no adapter here is called gone0"),
        (Severity.FINE, "0 ens1f0np0"),
    ]


def test_the_numbers_are_those_of_the_books_or_it_is_said_that_nobody_knows(node_snapshot: Snapshots) -> None:
    snapshot = node_snapshot("h100-8gpu")
    first, second, *_ = [device for device in snapshot.devices if device.rdma_devices and not device.is_vf]
    identity = identities(snapshot)
    swapped = (
        Rail(0, second.address, identity(second), "ens2f0np0"),
        Rail(1, first.address, identity(first), "ens1f0np0"),
        Rail(8, "0000:ff:00.0", "a card that is away", "ens9f0np0"),
    )
    ((_, text),) = told(snapshot, "resources: []", rails=swapped)
    assert text.startswith("0 ens2f0np0, 1 ens1f0np0, 2 ens3f0np0")
    assert text.endswith(", 8 ens9f0np0 (away)")
    ((_, text),) = told(snapshot, "resources: []", rails_unknown="/x/ledger.db is not there")
    assert text.endswith(", 7 ens8f0np0, as of a first start (/x/ledger.db is not there)")


def test_what_surprises_of_the_configuration_is_a_warning(node_snapshot: Snapshots) -> None:
    (warning, _) = told(node_snapshot("mi300x-8gpu"), "resources: [{name: a/rail, kind: rail, nic: {kind: nic}}]")
    assert warning == (
        Severity.WARNING,
        "resources[0].gpu: this node has no GPU that NVML shows, and rails are made of those",
    )


def test_adapters_that_only_the_configuration_joins_as_planes_are_offered(node_snapshot: Snapshots) -> None:
    planes = [[f"rdma{i}np0", f"rdma{i + 1}np1"] for i in range(0, 16, 2)]
    resource = "{name: a/rail, kind: rail, nic: {kind: nic, count: planes}}"
    config = parse(f"{{resources: [{resource}], topology: {{rails: {planes}}}}}", "test")
    found = checks_hardware.not_offered(Facts(node_snapshot("oci-h100-8gpu"), config))
    assert [finding.text.partition(":")[0] for finding in found] == ["1 adapter (eth0), by a/rail"]


def test_adapters_without_what_a_network_goes_by_are_named(node_snapshot: Snapshots) -> None:
    text = by_rail("10.{rail}.0.0/16", "topology: {rails: [ens1f0np0, ens2f0np0, ens3f0np0, ens4f0np0, ens5f0np0]}")
    (of_list, warning, _) = told(node_snapshot("h100-8gpu"), text)
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
    assert (Severity.ERROR, problem) in told(far, text)
