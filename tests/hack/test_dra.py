"""The DRA benchmark: a short play of each of its parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from measure.alignment.stream import EVEN, steps
from measure.dra import __main__ as bench
from measure.dra import document, locality
from measure.dra.published import publish
from measure.markdown import END, put_into

from agent.placement import Distances
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


def test_the_figures_go_between_their_marks_in_the_guide() -> None:
    class Measured(dict[str, float]):
        def __missing__(self, name: str) -> float:
            return 12.345

    guide = (bench.CHECKOUT / "hack/bench/dra-results.md").read_text()
    new = put_into(guide, document.section(Measured(slice_bytes_1024_vf=660832)), document.BEGIN)
    assert new.partition(document.BEGIN)[0] == guide.partition(document.BEGIN)[0]
    assert "| NodePrepareResources | 12.3 / 12.3 ms | 12.3 / 12.3 ms |" in new
    assert "| all slices, bytes | 660,832 | 12.345 |" in new
    assert new.partition(END)[2] == guide.partition(END)[2]


def test_a_play_gives_no_vf_to_two_pods() -> None:
    snapshot = recorded_node("one-numa-node")
    vfs = {device.address for device in snapshot.devices if device.is_vf}
    played = locality._Play(publish(snapshot, sorted(vfs), "late"), WAYS["late_dra"], Distances(snapshot), set(vfs))
    for step in steps(EVEN, 4, len(vfs), 30, 7):
        played.take(step)
        held = [nic for _, nics in played._running.values() for nic in nics]
        assert len(set(held)) == len(held)
        assert set(held) | played._free == vfs


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
