from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cluster.topology.labels import LabelFacts, fabric_nics, label_value, labels, rail_count
from agent.config.topology import LabelRule
from agent.hardware.lldp import Neighbour
from agent.model.device import Gpu, PciDevice, Snapshot
from tests.agent.cluster.topology.nodes import ONE, TWO, adapter
from tests.node import netdev

LABEL = r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?"


def gpu_device(address: str, bus: str) -> PciDevice:
    return adapter(address, pci_class=0x030200, path=(f"pci{bus}", address), rdma_devices=(), vendor=0x10DE)


VF = adapter("0000:3b:00.1", physfn="0000:3b:00.0")
SNAPSHOT = Snapshot(devices=(ONE, VF, TWO))
LEAVES = {ONE.address: Neighbour("00:1c:73:aa:bb:cc", "Ethernet1/7", "leaf-r17-a")}


def known(snapshot: Snapshot = SNAPSHOT, leaves: dict[str, Neighbour] | None = None) -> LabelFacts:
    return LabelFacts(
        "r17-n03",
        snapshot,
        fabric_nics(snapshot),
        (LEAVES if leaves is None else leaves).get,
        lambda path: {"/etc/rack": "rack 17"}.get(str(path)),
    )


def made(key: str, fact: str, kept: dict[str, str] | None = None, about: LabelFacts | None = None) -> dict[str, str]:
    return labels([LabelRule(key, fact)], about or known(), kept or {})


def gpu(n: int, clique: str) -> Gpu:
    return Gpu(f"GPU-{n}", n, n, f"0000:{n:02x}:00.0", "H100 80GB", 0, fabric_clique=clique)


LEAF_B = {TWO.address: Neighbour("bb", "1", "leaf-b")}
ABSENT = replace(ONE, rdma_devices=(replace(ONE.rdma_devices[0], absent=True, fw_version=""),))
ONE_DOMAIN = known(Snapshot(gpus=(gpu(1, "c1.0"), gpu(2, "c1.0"))))
STARTING = known(Snapshot(gpus=(gpu(1, "c1.0"), gpu(2, ""))))
OF_TWO_MODELS = known(Snapshot(devices=(ONE, adapter("0000:9a:00.0", device=0xFFFF))))


@pytest.mark.parametrize(
    ("fact", "about", "kept", "value"),
    [
        ("rails", known(), None, "2"),
        ("hca-count", known(), None, "2"),
        ("hca-model", known(), None, "ConnectX-7"),
        ("hca-model", OF_TWO_MODELS, None, "15b3-ffff_ConnectX-7"),
        ("hca-firmware", known(), None, "28.39.3004"),
        ("hca-firmware", known(Snapshot(devices=(ABSENT, TWO))), "28.39.3004", "28.39.3004"),
        ("leaf-chassis", known(), None, "00-1c-73-aa-bb-cc"),
        # The switch of the first rail, whatever the others say.
        ("leaf-switch", known(), None, "leaf-r17-a"),
        ("leaf-switch", known(leaves=LEAF_B), None, None),
        ("leaf-switch", known(leaves=LEAF_B | LEAVES), None, "leaf-r17-a"),
        ("leaf-switch", known(leaves={ONE.address: Neighbour("aa:bb", "1")}), None, "aa-bb"),
        ("leaf-switch", known(leaves={}), "leaf-old", "leaf-old"),
        ("node-name", known(), None, "r17-n03"),
        ("gpu-count", known(), None, "0"),
        ("gpu-model", ONE_DOMAIN, None, "H100-80GB"),
        ("nvlink-domain", ONE_DOMAIN, None, "c1.0"),
        ("nvlink-domain", STARTING, "c1.0", "c1.0"),
    ],
)
def test_a_fact_of_the_node_is_one_label_and_stays_while_it_is_not_known(
    fact: str, about: LabelFacts, kept: str | None, value: str | None
) -> None:
    present = {"x.y/z": "1"} | ({"example.com/x": kept} if kept else {})
    assert made("example.com/x", fact, present, about) == ({"example.com/x": value} if value else {})


def test_a_fact_of_each_nic_is_a_label_for_each() -> None:
    assert made("example.com/guid.{nic}", "node-guid") == {
        "example.com/guid.0000-3b-00.0": "946dae0300003b00",
        "example.com/guid.0000-5e-00.0": "946dae0300005e00",
    }
    assert made("example.com/port.{nic}", "leaf-port") == {"example.com/port.0000-3b-00.0": "Ethernet1-7"}


def test_configured_facts_come_from_a_text_a_file_or_a_part_of_the_nodes_name() -> None:
    rules = [
        LabelRule("example.com/site", "text", text="ams1"),
        LabelRule("example.com/rack", "node-name", pattern="(r[0-9]+)-n[0-9]+"),
        LabelRule("example.com/row", "node-name", pattern="row([0-9]+)"),
        LabelRule("example.com/place", "file", path=Path("/etc/rack")),
        LabelRule("example.com/nothing", "file", path=Path("/etc/nothing")),
    ]
    assert labels(rules, known(), {}) == {
        "example.com/site": "ams1",
        "example.com/rack": "r17",
        "example.com/place": "rack-17",
    }


def test_rails_are_adapters_next_to_gpus() -> None:
    near, far = adapter("0000:3b:00.0", path=("pci0000:3a", "x")), adapter("0000:9b:00.0", path=("pci0000:9a", "y"))
    gpus = tuple(gpu_device(f"0000:3c:00.{n}", "0000:3a") for n in range(2))
    known_gpus = tuple(Gpu(gpu.address, n, None, gpu.address, "", 0) for n, gpu in enumerate(gpus))
    snapshot = Snapshot(devices=(near, far, *gpus), accelerators=known_gpus)
    assert rail_count(snapshot, fabric_nics(snapshot)) == 1
    assert rail_count(Snapshot(devices=(near, far)), (near, far)) == 2
    assert rail_count(Snapshot(), ()) == 0


def test_gpus_of_other_vendors_are_counted_and_named(node_snapshot: Callable[[str], Snapshot]) -> None:
    about = known(node_snapshot("mi300x-8gpu"))
    told = {fact: made("example.com/x", fact, about=about)["example.com/x"] for fact in ("gpu-count", "gpu-model")}
    assert told == {"gpu-count": "8", "gpu-model": "AMD-Instinct-MI300X-OAM"}
    silent = replace(node_snapshot("h100-8gpu"), gpus=())
    assert made("example.com/x", "gpu-count", about=known(silent)) == {"example.com/x": "8"}
    assert made("example.com/x", "gpu-model", about=known(silent)) == {}, "NVML may tell later"


def test_adapters_to_the_fabric_are_in_the_order_of_named_interfaces_or_of_rails() -> None:
    named = tuple(replace(nic, netdevs=(netdev(name),)) for nic, name in ((ONE, "ens1"), (TWO, "ens2")))
    snapshot = Snapshot(devices=named)
    assert [nic.address for nic in fabric_nics(snapshot, ("ens2", "gone", "ens1"))] == [TWO.address, ONE.address]
    assert [nic.address for nic in fabric_nics(snapshot)] == [ONE.address, TWO.address]
    assert [nic.address for nic in fabric_nics(snapshot, rails={TWO.address: (0, 0)})] == [TWO.address, ONE.address]


def test_long_texts_are_cut_and_stay_apart() -> None:
    one, two = label_value("leaf." * 20 + "a"), label_value("leaf." * 20 + "b")
    assert len(one) <= 63
    assert one != two


@given(st.text(max_size=200))
def test_any_text_becomes_a_label_value(text: str) -> None:
    assert re.fullmatch(LABEL, label_value(text))


@pytest.mark.parametrize(
    ("key", "fact", "expected"),
    [
        ("a.b/leaf.{rail}-{plane}", "leaf-switch", {"a.b/leaf.3-0": "leaf-b", "a.b/leaf.3-1": "leaf-r17-a"}),
        ("a.b/leaf.{rail}", "leaf-switch", {"a.b/leaf.3": "leaf-b"}),
        ("a.b/leaf", "leaf-switch", {"a.b/leaf": "leaf-b"}),
        ("a.b/rails", "rails", {"a.b/rails": "2"}),
        ("a.b/planes", "planes", {"a.b/planes": "2"}),
    ],
)
def test_keys_may_go_by_rail_and_plane(key: str, fact: str, expected: dict[str, str]) -> None:
    other = adapter("0000:9c:00.0")
    rails = {TWO.address: (3, 0), ONE.address: (3, 1)}
    snapshot = Snapshot(devices=(ONE, TWO, other))
    leaves = {**LEAVES, TWO.address: Neighbour("00:1c:73:aa:bb:dd", "Ethernet1/8", "leaf-b")}
    about = replace(known(snapshot, leaves), nics=fabric_nics(snapshot, rails=rails), rails=rails)
    assert made(key, fact, about=about) == expected
