"""The DRA benchmark: a short play of each of its parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from measure.dra import __main__ as bench
from measure.dra import locality

from tests.deviceplugin.dra.nodes import recorded_node

PURE = ("--only", "locality", "--only", "slices", "--only", "stall")
WAYS = {way.figure.removesuffix("_attained_pct"): way for way in locality.WAYS}


@pytest.mark.parametrize("name", ["h100-8gpu", "v100-16gpu", "one-numa-node", "gb200-4gpu"])
def test_nics_matched_by_their_gpu_and_those_chosen_on_the_node_are_the_nearest(name: str) -> None:
    for way in ("near_gpu", "late_dra"):
        assert locality.play(recorded_node(name), WAYS[way], pods=12, seed=1).percent == 100


@pytest.mark.parametrize("name", ["mi300x-8gpu", "mi250-8gpu", "epyc-no-switch"])
def test_nics_matched_by_the_pci_address_of_their_gpu_are_the_nearest_whoever_made_that(name: str) -> None:
    assert locality.play(recorded_node(name), WAYS["near_address"], pods=12, seed=1).percent == 100


def test_the_report_holds_each_figure_and_what_nodes_attain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("agent.hardware.recorded.names", lambda: ("h100-8gpu", "one-nic"))
    monkeypatch.setattr(bench, "DENSE", "h100-8gpu")
    status = bench.main([*PURE, "--pods", "4", "--limit", "1", "--report", str(tmp_path / "dra.json")])
    found = json.loads((tmp_path / "dra.json").read_text())
    assert found["near_gpu_attained_pct"] == found["late_dra_attained_pct"] == 100
    assert set(found["nodes"]) == {"h100-8gpu"}
    assert {"pcie_root_attained_pct", "numa_attained_pct", "slice_bytes_1024_vf"} <= found.keys()
    assert status == ("NOT HELD" in capsys.readouterr().out)
