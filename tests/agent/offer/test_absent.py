"""What a configuration names and a node does not have, with what is there."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from agent.config import parse
from agent.model.device import Snapshot
from agent.offer.explanation import cautions
from agent.offer.units import plain_offer

Snapshots = Callable[[str], Snapshot]


def told(snapshot: Snapshot, resource: str, more: str = "") -> list[str]:
    config = parse(f"{{resources: [{{name: a/b, {resource}}}], {more}}}", "test")
    return [str(caution) for caution in cautions(config, plain_offer(config.resources, snapshot))]


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
    (found,) = told(node_snapshot("h100-8gpu"), f"kind: {resource}")
    assert re.fullmatch(re.escape(f"resources[0].{where}: no {what} here is called {name}: here are ") + there, found)


def test_the_pfs_of_a_mapping_of_networks_are_looked_for_too(node_snapshot: Snapshots) -> None:
    mapping = "kind: vf, select: {pf: [ens1f0np0]}, network: {ens1f0np0: n, ens1f9: n}"
    (found,) = told(node_snapshot("h100-8gpu"), mapping, "networks: [{name: n}]")
    assert found.startswith("resources[0].network.ens1f9: no PF here is called ens1f9: here are ens1f0np0, ")


def test_names_that_may_be_in_pods_are_not_missed(node_snapshot: Snapshots) -> None:
    snapshot = node_snapshot("h100-8gpu")
    first = next(device for device in snapshot.devices if device.vfs)

    def without_names(address: str) -> Snapshot:
        devices = (replace(d, netdevs=()) if d.address == address else d for d in snapshot.devices)
        return replace(snapshot, devices=tuple(devices))

    assert told(without_names(first.address), "kind: nic, select: {netdevs: [ens1f0np0]}") == []
    assert told(without_names(first.vfs[0]), "kind: vf, select: {netdevs: [ens1f0v0]}") == []
    assert told(without_names(first.address), "kind: vf, select: {pf: [ens1f0np0]}") == []
    assert len(told(without_names(first.address), "kind: vf, select: {pf: ['0000:18:00.7']}")) == 1


def test_a_node_without_any_says_so() -> None:
    (found,) = told(Snapshot(), "kind: vf, select: {pf: [ens1f0]}")
    assert found == "resources[0].select.pf[0]: no PF here is called ens1f0: there is none at all"
