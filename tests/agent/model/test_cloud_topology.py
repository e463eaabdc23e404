"""Where devices stand on hosts whose PCI tree does not tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from agent.model.cloud_topology import AS_SHOWN, is_virtual, known_places, nccl_places
from agent.model.device import Snapshot
from agent.placement import Distances

FILE = """<system version="1">
  <!-- <pci busid="none"/> of the host -->
  <cpu numaid="1" affinity="ffff" arch="x86_64">
    <pci busid="ffff:ff:01.0" class="0x060400" link_width="16">
      <pci busid="0001:00:00.0" class="0x030200"/>
      <pci busid="0101:00:00.0" class="0x020700"><nic><net name="mlx5_0"/></nic></pci>
      <pci busid="ffff:ff:02.0" class="0x060400">
        <pci busid="0002:00:00.0" class="0x030200"/>
        <pci busid="ffff:ff:03.0" class="0x060400"><pci busid="0102:00:00.0" class="0x020700"/></pci>
      </pci>
    </pci>
  </cpu>
  <cpu><pci busid="0003:00:00.0"/></cpu>
</system>
"""


def test_a_file_of_nccls_tells_what_hangs_on_one_switch(node_snapshot: Callable[[str], Snapshot]) -> None:
    places = nccl_places(FILE, "/opt/x.xml")
    assert places.of["0001:00:00.0"] == (
        ("ffff:ff:01.0", "ffff:ff:01.0", "ffff:ff:01.0 to 0001:00:00.0", "0001:00:00.0"),
        1,
    )
    assert places.of["0003:00:00.0"] == (("0003:00:00.0",), -1)
    flat = replace(node_snapshot("azure-nd-h100"), places=places)
    distances = Distances(flat)
    near = {
        (gpu, nic): distances.between(distances.gpu(f"{gpu}:00:00.0") or "", f"{nic}:00:00.0").name
        for gpu in ("0001", "0002", "0003")
        for nic in ("0101", "0102", "0103")
    }
    assert near == {
        ("0001", "0101"): "PIX",
        ("0001", "0102"): "PXB",
        ("0001", "0103"): "NODE",
        ("0002", "0101"): "PXB",
        ("0002", "0102"): "PXB",
        ("0002", "0103"): "NODE",
        ("0003", "0101"): "NODE",
        ("0003", "0102"): "NODE",
        ("0003", "0103"): "NODE",
    }
    assert distances.nearest(distances.gpus[1], ["0101:00:00.0", "0102:00:00.0"]) == ("0101:00:00.0", "0102:00:00.0")


def test_a_file_may_have_rows_of_dashes_in_comments_and_more_around_its_system() -> None:
    dressed = f"\n<?xml version='1.0'?>\n<!-- ---- made by hand ---- -->\n<graphs>{FILE}</graphs>"
    assert nccl_places(dressed, "x") == nccl_places(FILE, "x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no element found"),
        (
            "<system><cpu>" + '<pci busid="0000:01:00.0">' * 3000 + "</pci>" * 3000 + "</cpu></system>",
            "within each other",
        ),
        ("<topology/>", "has no <system>"),
        ("<system/>", "names no PCI device"),
        ('<system><cpu><pci busid="x"/></cpu></system>', "'x', which is no address"),
    ],
)
def test_what_is_no_such_file_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        nccl_places(text, "")


def test_the_table_of_a_known_instance_pairs_its_gpus_and_nics(node_snapshot: Callable[[str], Snapshot]) -> None:
    snapshot = node_snapshot("azure-nd-h100")
    distances = Distances(snapshot)
    assert snapshot.places.source == "Standard_ND96isr_H100_v5"
    nics = [f"{0x101 + n:04x}:00:00.0" for n in range(8)]
    assert [distances.nearest(gpu, nics) for gpu in distances.gpus] == [(nic,) for nic in nics]
    assert distances.between(distances.gpus[0], nics[1]).name == "NODE"
    assert distances.between(distances.gpus[0], nics[7]).name == "SYS"


def test_a_host_with_bridges_or_other_gpus_or_such_of_two_instances_is_none_of_the_known_ones() -> None:
    gpus = [f"{n:04x}:00:00.0" for n in (0x3, 0x4, 0x1, 0x2, 0xD, 0xE, 0xB, 0xC)]
    assert known_places(gpus, gpus).source == "Standard_ND96asr_v4"
    assert known_places([*gpus, "0005:00:00.0"], [*gpus, "0005:00:00.0"]) is AS_SHOWN
    assert known_places(gpus, gpus[1:]) is AS_SHOWN
    assert known_places((), ()) is AS_SHOWN
    of_two_instances = [f"{n:04x}:00:00.0" for n in (0x1, 0x2, 0x3, 0xB, 0xC)]
    assert known_places(of_two_instances, of_two_instances) is AS_SHOWN
    assert known_places(gpus[1:], gpus[1:]).source == "Standard_ND96asr_v4", "one is broken"
    assert known_places(gpus[:4], gpus[:4]) is AS_SHOWN, "half of one"


@pytest.mark.parametrize(
    ("machine", "virtual"),
    [
        ("Microsoft Corporation Virtual Machine", True),
        ("Microsoft Corporation Surface", False),
        ("Amazon EC2 p5.48xlarge", True),
        ("Amazon EC2 m7i.metal-24xl", False),
        ("QEMU Standard PC (Q35 + ICH9, 2009)", True),
        ("Supermicro AS-8125GS-TNMR2", False),
        ("", False),
    ],
)
def test_virtual_machines_are_known_by_what_they_are_called(machine: str, virtual: bool) -> None:
    assert is_virtual(machine) is virtual
