"""Node files made of rdma_topo's dump and of hwloc's XML, and the nearness that they show."""

from __future__ import annotations

import json
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any
from zlib import compress

import pytest

from agent.__main__ import main
from agent.errors import ConfigError
from agent.hardware.adapter_ids import write_adapter_id
from hack import node_file
from hack.dumps import from_hwloc, from_rdma_topo

ROOT = Path(__file__).parents[2]
ADAPTER = "1fa2c3d4-0000-11f0-8000-a088c2aaaaaa"


def packed(content: bytes) -> str:
    return b64encode(compress(content)).decode()


def function(path: str, ids: str, pci_class: str, **more: Any) -> dict[str, Any]:
    """One entry as `rdma_topo dump` writes it."""
    vendor, device = (part.upper() for part in ids.split(":"))
    classes = f"bc{pci_class[:2]}sc{pci_class[2:4]}i{pci_class[4:]}"
    return {
        "realpath": f"/sys/devices/{path}",
        "config": packed(bytes.fromhex(vendor)[::-1] + bytes.fromhex(device)[::-1]),
        "modalias": f"pci:v0000{vendor}d0000{device}sv000015B3sd00000033{classes}",
        "numa_node": 0,
        "subsystems": {},
    } | more


def gb300_dump() -> list[dict[str, Any]]:
    """One GPU, its adapter's PF with a VF on another segment, and the Data Direct function beside the GPU."""
    vpd = packed(write_adapter_id(ADAPTER))
    pf, above = "pci0000:00/0000:00:00.0/0000:03:00.0", "pci0009:00/0009:00:00.0/0009:01:00.0"
    names = {"infiniband": ["ibp3s0"], "net": ["ibp3s0"]}
    return [
        function("pci0000:00/0000:00:00.0", "10de:22b8", "060400"),
        function(pf, "15b3:1023", "020700", vpd=vpd, subsystems=names),
        function(f"{pf[:-1]}1", "15b3:101e", "020700", config=packed(b"\xff" * 4)),
        function("pci0002:00/0002:00:00.0", "10de:22b8", "060400"),
        function("pci0002:00/0002:00:00.0/0002:03:00.0", "15b3:1023", "020700", vpd=packed(write_adapter_id("other"))),
        function("pci0009:00/0009:00:00.0", "10de:22b8", "060400"),
        function(above, "15b3:197c", "060400"),
        function(f"{above}/0009:02:00.0", "15b3:197c", "060400"),
        function(f"{above}/0009:02:00.0/0009:03:00.0", "15b3:2100", "080100", vpd=vpd),
        function(f"{above}/0009:02:01.0", "15b3:197c", "060400"),
        function(f"{above}/0009:02:01.0/0009:06:00.0", "10de:31c2", "030200", subsystems={"drm": ["card2"]}),
    ]


HWLOC = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
 <object type="Machine" os_index="0" cpuset="0x000000ff" nodeset="0x00000003">
  <object type="Package" os_index="0" cpuset="0x0000000f" nodeset="0x00000001">
   <object type="NUMANode" os_index="0" cpuset="0x0000000f" nodeset="0x00000001" local_memory="1024"/>
   <object type="Bridge" bridge_type="0-1" depth="0" bridge_pci="0000:[44-48]">
    <object type="Bridge" bridge_type="1-1" depth="1" bridge_pci="0000:[45-48]" pci_busid="0000:44:00.0"
      pci_type="0604 [8086:352a] [0000:0000] 00" pci_link_speed="63.0">
     <object type="PCIDev" pci_busid="0000:45:00.0" pci_type="0302 [10de:2330] [10de:16c1] a1" pci_link_speed="63.0"/>
     <object type="PCIDev" pci_busid="0000:46:00.0" pci_type="0200 [15b3:1021] [15b3:0023] 00" pci_link_speed="63.0">
      <info name="PCIDevice" value="MT2910 Family [ConnectX-7]"/>
      <object type="OSDev" name="ens1np0" osdev_type="2"><info name="Address" value="94:6d:ae:00:00:01"/></object>
      <object type="OSDev" name="mlx5_0" osdev_type="3"/>
     </object>
     <object type="PCIDev" pci_busid="0000:46:00.1" pci_type="0200 [15b3:101e] [15b3:0023] 00" pci_link_speed="63.0">
      <info name="PCIDevice" value="ConnectX Family mlx5Gen Virtual Function"/>
     </object>
    </object>
   </object>
  </object>
  <object type="Package" os_index="1" cpuset="0x000000f0" nodeset="0x00000002">
   <object type="NUMANode" os_index="1" cpuset="0x000000f0" nodeset="0x00000002" local_memory="1024"/>
   <object type="Bridge" bridge_type="0-1" depth="0" bridge_pci="0000:[84-85]">
    <object type="PCIDev" pci_busid="0000:84:00.0" pci_type="0200 [15b3:1021] [15b3:0023] 00" pci_link_speed="63.0">
     <object type="OSDev" name="ens2np0" osdev_type="2"/>
     <object type="OSDev" name="mlx5_1" osdev_type="3"/>
    </object>
   </object>
  </object>
 </object>
</topology>
"""


@pytest.mark.parametrize(
    ("option", "text", "expected"),
    [
        (
            "--from-rdma-topo",
            json.dumps(gb300_dump()),
            ["GPU0  PIX   NIC0", "NIC0  0000:03:00.0  ibp3s0 ibp3s0  towards GPUs where 0009:03:00.0 is (Data Direct)"],
        ),
        ("--from-hwloc", HWLOC, ["GPU0  PIX   NIC0", "NIC1  SYS", "NIC0  0000:46:00.0  mlx5_0 ens1np0"]),
    ],
)
def test_what_a_user_sends_becomes_a_node_whose_nearness_can_be_looked_at(
    tmp_path: Path, option: str, text: str, expected: list[str]
) -> None:
    source, made = tmp_path / "source", tmp_path / "sent.json"
    source.write_text(text)
    tool = ROOT / "hack/record-node"
    command: list[str | Path] = [sys.executable, tool, option, source, "--name", "sent", "-o", made]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "VFs" in done.stderr
    assert ADAPTER not in made.read_text()
    command = [sys.executable, "-m", "agent", "topology", "--node", made]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert [line for line in expected if line not in shown.stdout] == [], shown.stdout


def test_an_adapter_that_is_offered_and_unhealthy_is_not_said_to_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node, config = tmp_path / "sent.json", tmp_path / "config.yaml"
    node.write_text(node_file.dump(from_rdma_topo(json.dumps(gb300_dump()), "sent", "")))
    config.write_text("resources: [{name: a/hca, kind: hca, select: {netdevs: [ibp3s0]}}]")
    main(["check-config", "--node", str(node), str(config)])
    shown = capsys.readouterr().out
    assert "\n  unhealthy: 1 adapter (ibp3s0): offered, and unhealthy: " in shown


def test_vfs_are_left_out_and_what_joins_an_adapters_functions_stays() -> None:
    node = from_rdma_topo(json.dumps(gb300_dump()), "sent", "")
    assert node.vpd == {"0000:03:00.0": ADAPTER, "0002:03:00.0": "other", "0009:03:00.0": ADAPTER}
    assert "0000:03:00.1" not in node_file.dump(node)
    assert "0000:46:00.1" not in node_file.dump(from_hwloc(HWLOC, "sent", ""))


@pytest.mark.parametrize(
    ("read", "text", "problem"),
    [
        (from_rdma_topo, "{", "is not JSON"),
        (from_rdma_topo, "{}", "not `rdma_topo topo -j`"),
        (from_rdma_topo, "[1]", "must have a realpath: 1"),
        (from_rdma_topo, json.dumps([{"realpath": "/sys/devices/x", "modalias": "x"}]), "must be a PCI function"),
        (from_rdma_topo, json.dumps([gb300_dump()[0] | {"config": "?"}]), "must be zlib in base64"),
        (from_hwloc, "topology", "is not XML"),
        (from_hwloc, "<system/>", "lstopo --of xml"),
        (from_hwloc, "<topology/>", "names no PCI device"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_the_remedy(read: Any, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text, "sent", "")
    assert problem in caught.value.problems[0]
