"""What of a configuration comes to less on a node than was meant."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from agent.config import parse
from agent.model.device import Snapshot
from agent.offer.explanation import cautions
from agent.offer.units import plain_offer
from tests.node import change, node, split

Snapshots = Callable[[str], Snapshot]
PAIR = "networks: [{name: pair, bond: active-backup}]"


def told(snapshot: Snapshot, text: str) -> list[str]:
    config = parse(text, "test")
    offer = plain_offer(config.resources, snapshot, named_rails=config.topology.rails)
    return [str(caution) for caution in cautions(config, offer)]


PLANES = split(node(vfs=0))
HCAS = "resources: [{name: rdma/hca, kind: hca%s}]\n"
LEFT_OUT = (
    "topology.rails: leaves out rail1p1, rail2p0, rail2p1, rail3p0 and 1 more, which resources take, so they have no"
    " rail: list them too, or narrow the selectors"
)
HERE = "correct its name; here are rail0p0, rail0p1, rail1p0, rail2p0, rail3p0, rail1p1, rail2p1, rail3p1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("topology: {rails: [[rail0p0, rail0p1], rail1p0]}", []),
        (
            HCAS % "" + "topology: {rails: [[rail0p0, rail0p1], rail1p0]}",
            [LEFT_OUT],
        ),
        (HCAS % ", select: {pf: [rail0p0]}" + "topology: {rails: [rail0p0]}", []),
        (
            "topology: {rails: [[rail0p0, gone0], [rail1p0, rail1p1, '0000:12:00.0']]}",
            [
                f"topology.rails[0][1]: no adapter here is called gone0: plug the adapter in, or {HERE}",
                "topology.rails[1][2]: 0000:12:00.0 is the adapter that rail0p0 (rail 0) is: name each adapter once",
            ],
        ),
        (HCAS % "", []),
    ],
    ids=[
        "no resource",
        "some left out",
        "all that are taken listed",
        "away and twice",
        "no list",
    ],
)
def test_rails_that_are_others_than_was_meant(text: str, expected: list[str]) -> None:
    assert told(PLANES, text) == expected


def test_a_mapping_of_pfs_that_leaves_out_some_that_are_selected(node_snapshot: Snapshots) -> None:
    snapshot = node_snapshot("h100-8gpu")

    def of(mapping: str, select: str = "{}") -> list[str]:
        vfs = f"{{name: rdma/vf, kind: vf, binding: late, network: {mapping}, select: {select}}}"
        return told(snapshot, f"{{resources: [{vfs}], networks: [{{name: a}}]}}")

    (found,) = of('{ens1f0np0: a, "0000:3A:00.0": a}')
    assert found == (
        "resources[0].network: has no network for ens3f0np0, ens4f0np0, ens5f0np0, ens6f0np0 and 2 more, and an ADD"
        " with a device of such an adapter fails: name one for each, or select fewer adapters"
    )
    assert of('{ens1f0np0: a, "0000:3A:00.0": a}', "{pf: [ens1f0np0, ens2f0np0]}") == []
    assert of("a") == []


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (
            "{pf: [ens1f0np0]}",
            "resources[0].network: 'pair' joins VFs of two PFs, and all that are selected here are of ens1f0np0: ",
        ),
        ("{pf: [ens1f0np0, ens2f0np0]}", None),
        ("{pf: [elsewhere0]}", "resources[0].select.pf[0]: no PF here is called elsewhere0: "),
    ],
    ids=["one", "two", "none, for there is no such PF"],
)
def test_a_bond_of_vfs_that_are_all_of_one_pf(node_snapshot: Snapshots, select: str, expected: str | None) -> None:
    text = f"resources: [{{name: rdma/vf, kind: vf, network: pair, select: {select}}}]\n{PAIR}"
    found = told(node_snapshot("h100-8gpu"), text)
    assert len(found) == (expected is not None)
    assert all(one.startswith(str(expected)) for one in found)


def test_claims_cannot_match_gpus_that_nvml_does_not_show(node_snapshot: Snapshots) -> None:
    snapshot = node_snapshot("h100-8gpu")
    text = "resources: [{name: rdma/vf, kind: vf, offer: dra}, {name: rdma/hca, kind: hca}]"
    assert told(snapshot, text) == []
    (found,) = told(replace(snapshot, gpus=()), text)
    assert found.startswith("resources[0].offer: NVML does not show 0000:1b:00.0, 0000:3d:00.0, ")
    assert "and 4 more here, and no claim can match gpu.nvidia.com/uuid with them: load their driver" in found
    assert told(node_snapshot("mi300x-8gpu"), text) == []  # another vendor's have no such UUID


def test_rails_where_nvml_shows_no_gpu(node_snapshot: Snapshots) -> None:
    text = "resources: [{name: rdma/rail, kind: rail, nic: {kind: nic}}]"
    (found,) = told(node_snapshot("mi300x-8gpu"), text)
    assert found.startswith("resources[0].gpu: this node has no GPU that NVML shows, and rails are made of those: let")
    assert "binding: late" in found
    assert told(node_snapshot("h100-8gpu"), text) == []


def test_adapters_of_which_it_is_not_known_how_near_they_are_and_a_file_for_nccl_that_is_not_made(
    node_snapshot: Snapshots,
) -> None:
    snapshot = node_snapshot("gb300-4gpu")
    text = "{resources: [{name: rdma/vf, kind: vf, network: a, environment: [ncclTopo]}], networks: [{name: a}]}"
    (of_nccl,) = told(snapshot, text)
    assert of_nccl.startswith("resources[0].environment: no topology file is made for NCCL here")
    ids = tuple(each for each in snapshot.adapter_ids if each[0] != "0000:03:00.0")
    of_select, _ = told(replace(snapshot, adapter_ids=ids), text)
    assert of_select.startswith("resources[0].select: how near 0000:03:00.0 is to GPUs is not known here")


def missed(snapshot: Snapshot, resource: str, more: str = "") -> list[str]:
    return told(snapshot, f"{{resources: [{{name: a/b, {resource}}}], {more}}}")


@pytest.mark.parametrize(
    ("resource", "where", "what", "name", "there"),
    [
        ("vf, select: {pf: [ens1f0]}", "select.pf[0]", "PF", "ens1f0", "ens1f0np0, .* and 2 more"),
        ("vf, select: {pf: ['0000:18:00.7#0-3']}", "select.pf[0]", "PF", "0000:18:00.7", "0000:18:00.0, .* more"),
        ("vf, select: {rootDevices: ['0000:aa:00.0']}", "select.rootDevices[0]", "PF", "0000:aa:00.0", "0000:.* more"),
        (
            *("hca, select: {rdmaDevices: [mlx5_0, mlx5_99]}", "select.rdmaDevices[1]"),
            *("RDMA device of this kind", "mlx5_99", "mlx5_.*"),
        ),
        ("nic, select: {netdevs: [eno12]}", "select.netdevs[0]", "interface of this kind", "eno12", "eno1, eno2, .*"),
        (
            *("vf, select: {pciAddresses: ['0000:18:00.1', '0000:18:1f.1']}", "select.pciAddresses[1]"),
            *("device", "0000:18:1f.1", "0000:18:.* and 56 more"),
        ),
        (
            *("gpu, select: {pciAddresses: ['0000:1b:00.1']}", "select.pciAddresses[0]"),
            *("device", "0000:1b:00.1", "0000:1b:00.0, .*"),
        ),
        ("vf, select: [{pf: [ens1f0np0]}, {pf: [gone0]}]", "select[1].pf[0]", "PF", "gone0", ".*"),
        ("rail, nic: {select: {pf: [ens9]}}", "nic.select.pf[0]", "PF", "ens9", "ens.*"),
    ],
)
def test_what_is_not_there_is_named_with_what_is_the_most_alike_first(
    node_snapshot: Snapshots, resource: str, where: str, what: str, name: str, there: str
) -> None:
    (found,) = missed(node_snapshot("h100-8gpu"), f"kind: {resource}")
    assert re.fullmatch(re.escape(f"resources[0].{where}: no {what} here is called {name}: here are ") + there, found)


def test_the_pfs_of_a_mapping_of_networks_are_looked_for_too(node_snapshot: Snapshots) -> None:
    mapping = "kind: vf, select: {pf: [ens1f0np0]}, network: {ens1f0np0: n, ens1f9: n}"
    (found,) = missed(node_snapshot("h100-8gpu"), mapping, "networks: [{name: n}]")
    assert found.startswith("resources[0].network.ens1f9: no PF here is called ens1f9: here are ens1f0np0, ")


def test_names_that_may_be_in_pods_are_not_missed(node_snapshot: Snapshots) -> None:
    snapshot = node_snapshot("h100-8gpu")
    first = next(device for device in snapshot.devices if device.vfs)

    def without_names(address: str) -> Snapshot:
        return change(snapshot, address, netdevs=())

    assert missed(without_names(first.address), "kind: nic, select: {netdevs: [ens1f0np0]}") == []
    assert missed(without_names(first.vfs[0]), "kind: vf, select: {netdevs: [ens1f0v0]}") == []
    assert missed(without_names(first.address), "kind: vf, select: {pf: [ens1f0np0]}") == []
    assert len(missed(without_names(first.address), "kind: vf, select: {pf: ['0000:18:00.7']}")) == 1


def test_a_node_without_any_says_so() -> None:
    (found,) = missed(Snapshot(), "kind: vf, select: {pf: [ens1f0]}")
    assert found == "resources[0].select.pf[0]: no PF here is called ens1f0: there is none at all"
