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
from agent.model.device import Gpu, LinkLayer, Netdev, PciDevice, Snapshot
from tests.agent.cluster.topology.adapters import ONE, TWO, adapter

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


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("rails", "2"),
        ("hca-count", "2"),
        ("hca-model", "ConnectX-7"),
        ("hca-firmware", "28.39.3004"),
        ("leaf-switch", "leaf-r17-a"),
        ("leaf-chassis", "00-1c-73-aa-bb-cc"),
        ("node-name", "r17-n03"),
        ("gpu-count", "0"),
    ],
)
def test_a_fact_of_the_node_is_one_label(fact: str, value: str) -> None:
    assert made("example.com/x", fact) == {"example.com/x": value}


def test_a_fact_of_each_nic_is_a_label_for_each() -> None:
    assert made("example.com/guid.{nic}", "node-guid") == {
        "example.com/guid.0000-3b-00.0": "946dae0300003b00",
        "example.com/guid.0000-5e-00.0": "946dae0300005e00",
    }
    assert made("example.com/port.{nic}", "leaf-port") == {"example.com/port.0000-3b-00.0": "Ethernet1-7"}


def test_one_level_has_the_switch_of_the_first_rail_whatever_the_others_say() -> None:
    leaves = {TWO.address: Neighbour("bb", "1", "leaf-b")}
    assert made("example.com/leaf", "leaf-switch", about=known(leaves=leaves)) == {}
    both = {**leaves, **LEAVES}
    assert made("example.com/leaf", "leaf-switch", about=known(leaves=both)) == {"example.com/leaf": "leaf-r17-a"}


def test_a_switch_without_a_name_is_called_by_its_chassis() -> None:
    leaves = {ONE.address: Neighbour("aa:bb", "1")}
    assert made("example.com/leaf", "leaf-switch", about=known(leaves=leaves)) == {"example.com/leaf": "aa-bb"}


def test_what_is_not_known_now_leaves_the_label_as_it_is() -> None:
    about = known(leaves={})
    assert made("example.com/leaf", "leaf-switch", {"example.com/leaf": "leaf-old", "x.y/z": "1"}, about) == {
        "example.com/leaf": "leaf-old"
    }
    absent = replace(ONE, rdma_devices=(replace(ONE.rdma_devices[0], absent=True, fw_version=""),))
    in_a_pod = known(Snapshot(devices=(absent, TWO)))
    assert made("example.com/fw", "hca-firmware", {"example.com/fw": "28.39.3004"}, in_a_pod) == {
        "example.com/fw": "28.39.3004"
    }


def test_adapters_that_differ_are_named_together() -> None:
    other = adapter("0000:9a:00.0", device=0xFFFF)
    about = known(Snapshot(devices=(ONE, other)))
    assert made("example.com/hca", "hca-model", about=about) == {"example.com/hca": "15b3-ffff_ConnectX-7"}


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


def test_an_nvlink_domain_is_that_of_all_gpus() -> None:
    def gpu(n: int, clique: str) -> Gpu:
        return Gpu(f"GPU-{n}", n, n, f"0000:{n:02x}:00.0", "H100 80GB", 0, fabric_clique=clique)

    one = known(Snapshot(gpus=(gpu(1, "c1.0"), gpu(2, "c1.0"))))
    assert made("example.com/nvl", "nvlink-domain", about=one) == {"example.com/nvl": "c1.0"}
    assert made("example.com/gpu", "gpu-model", about=one) == {"example.com/gpu": "H100-80GB"}
    starting = known(Snapshot(gpus=(gpu(1, "c1.0"), gpu(2, ""))))
    assert made("example.com/nvl", "nvlink-domain", {"example.com/nvl": "c1.0"}, starting) == {
        "example.com/nvl": "c1.0"
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


def test_named_interfaces_are_the_adapters_to_the_fabric_in_their_order() -> None:
    def with_netdev(device: PciDevice, name: str) -> PciDevice:
        return replace(device, netdevs=(Netdev(name, 1, "", 1500, "up", True, LinkLayer.ETHERNET, None),))

    snapshot = Snapshot(devices=(with_netdev(ONE, "ens1"), with_netdev(TWO, "ens2")))
    assert [nic.address for nic in fabric_nics(snapshot, ("ens2", "gone", "ens1"))] == [TWO.address, ONE.address]


def test_long_texts_are_cut_and_stay_apart() -> None:
    one, two = label_value("leaf." * 20 + "a"), label_value("leaf." * 20 + "b")
    assert len(one) <= 63
    assert one != two


@given(st.text(max_size=200))
def test_any_text_becomes_a_label_value(text: str) -> None:
    assert re.fullmatch(LABEL, label_value(text))


def test_adapters_of_rails_come_first() -> None:
    snapshot = Snapshot(devices=(ONE, TWO))
    assert [nic.address for nic in fabric_nics(snapshot)] == [ONE.address, TWO.address]
    assert [nic.address for nic in fabric_nics(snapshot, rails={TWO.address: (0, 0)})] == [TWO.address, ONE.address]


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
