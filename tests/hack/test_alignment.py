"""The alignment benchmark: what it counts, and a short play of the whole thing."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from measure.alignment.__main__ import claimed, judge
from measure.alignment.scenarios import Scenario, scenarios
from measure.alignment.score import attained
from measure.alignment.stream import EVEN, PLAYS, steps
from measure.alignment.table import WAYS

from agent.model.locality import Locality
from agent.placement.distances import FINE

ROOT = Path(__file__).parents[2]
PIX, NODE, SYS = Locality.PIX, Locality.NODE, Locality.SYS


def far(localities: list[Locality]) -> list[int]:
    return [locality * FINE for locality in localities]


def test_pairs_are_compared_the_nearest_with_the_nearest() -> None:
    assert attained(far([PIX, NODE, SYS]), far([PIX, PIX, NODE])) == 1
    assert attained(far([PIX, PIX, NODE]), far([PIX, PIX, PIX])) == 2
    assert attained(far([SYS]), far([PIX])) == 0


def of_gb300(folder: Path, change: Callable[[dict[str, list[str]]], object] | None = None) -> Scenario:
    """One VF per port of gb300-4gpu, with what documents say of it, or with other pairs."""
    for name in ("gb300-4gpu.json", "gb300-4gpu.pairs.yaml"):
        (folder / name).write_bytes((ROOT / "tests/nodes" / name).read_bytes())
    file = folder / "gb300-4gpu.pairs.yaml"
    document = yaml.safe_load(file.read_text())
    if change is not None:
        change(document["pairs"])
        file.write_text(yaml.safe_dump(document))
    (folder / "root").mkdir()
    *_, scenario = scenarios(folder / "gb300-4gpu.json", folder / "root")
    return scenario


def swap(pairs: dict[str, list[str]]) -> None:
    """Exchange the NICs of two GPUs, as the order of PCI segments would have them."""
    pairs["0008:06:00.0"], pairs["0009:06:00.0"] = pairs["0009:06:00.0"], pairs["0008:06:00.0"]


@pytest.mark.parametrize(("change", "attained_pairs"), [(None, 4), (swap, 2)], ids=["documented", "swapped"])
def test_the_agent_is_judged_by_documented_pairs_and_not_by_its_own_distances(
    tmp_path: Path, change: Callable[[dict[str, list[str]]], object] | None, attained_pairs: int
) -> None:
    scenario = of_gb300(tmp_path, change)
    found = claimed(scenario, 4, 1)
    assert found is not None
    assert (found.pairs, found.attained) == (4, attained_pairs)
    plan = list(steps(EVEN, 4, 4, 12, 1))
    own, by_documents = judge(scenario, tmp_path / "play", EVEN, plan, 1)
    for way in ("late_binding", "early_pairing"):
        assert own[way].percent == 100
        assert (by_documents[way].percent == 100) is (change is None)


def test_the_whole_benchmark_runs_on_a_folder_of_nodes(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.mkdir()
    for name in ("one-numa-node", "efa", "one-nic"):
        for file in (f"{name}.json", f"{name}.pairs.yaml"):
            (nodes / file).write_bytes((ROOT / "tests/nodes" / file).read_bytes())
    report_file, drawing = tmp_path / "alignment.json", tmp_path / "alignment.svg"
    play = ["--pods", "6", "--choices", "3", "--jobs", "1", "--events", "0"]
    options = [*play, "--report", str(report_file), "--svg", str(drawing)]
    done = subprocess.run([ROOT / "hack/bench/alignment", nodes, *options], capture_output=True, text=True, timeout=400)
    assert done.returncode in (0, 1), done.stderr  # 1: a busy machine chose too slowly
    found = json.loads(report_file.read_text())
    assert (found["seed"], found["pods"]) == (4, 6)
    assert (found["worst_late_pct"], found["worst_early_even_pct"]) == (100, 100)
    assert found["worst_early_pct"] <= found["early_all_plays_pct"] <= 100
    assert (found["documented_pct"], found["documented_nodes"]) == (100, 1)
    assert (found["unknown_nodes"], found["unknown_said"]) == (0, 0)
    assert {play.name for play in PLAYS} == set(found["plays"])
    assert set(found["nodes"]) == {"one-numa-node", "efa"}
    assert found["nodes"]["efa"]["late_binding_attained_pct"] == 100
    assert found["pairs"] == sum(node["pairs"] for node in found["nodes"].values()) > 0
    assert {f"{way}_attained_pct" for way, _ in WAYS} | {"placement_p99_ms"} <= set(found)
    for figures in found["nodes"].values():
        assert figures["placement_p99_ms"] > 0
        assert figures["pairs"] > 0
    assert drawing.read_text().startswith("<svg")
