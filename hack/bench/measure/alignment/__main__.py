"""The command line of the alignment benchmark."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.placement import Terrain
from agent.sim import recorded
from measure import health
from measure.alignment import speed, svg
from measure.alignment.agent_node import AgentNode
from measure.alignment.node_health import NodeHealth
from measure.alignment.rivals import RIVALS, Books
from measure.alignment.scenarios import Scenario, scenarios
from measure.alignment.score import Tally
from measure.alignment.stream import Step, steps
from measure.alignment.table import MIXED, UNREAD, Line, markdown, report, rounded, table, told
from measure.figures import Figures
from measure.namespaces import enter_namespaces

CHECKOUT = Path(__file__).parents[4]
ALONE, AT_ONCE = 0.4, 0.5
"""In the mixed play: the share of pods with GPUs or NICs only, and of those that come right after another."""


def main(arguments: Sequence[str]) -> int:
    """Play, print and write. Returns 1 if what is promised is not held, 2 if there is nothing to play on."""
    options = _parser().parse_args(arguments)
    if options.events and not options.inside:
        enter_namespaces("measure.alignment", arguments)
    lines: list[Line] = []
    speeds: dict[str, Figures] = {}
    first: dict[str, tuple[Path, Scenario]] = {}
    for file in _files(options.folder):
        with tempfile.TemporaryDirectory(prefix="nf-") as folder:
            root = Path(folder) / "root"
            root.mkdir()
            for number, scenario in enumerate(scenarios(file, root)):
                _say(f"{scenario.node}, {scenario.nics}: {options.pods} pods")
                lines.append(_play(scenario, Path(folder) / str(number), options.pods, options.seed))
                if scenario.node not in first:  # it has the most devices
                    first[scenario.node] = file, scenario
                    speeds[scenario.node] = speed.on(scenario, options.choices)
    if not lines:
        print("alignment: none of these nodes has GPUs and RDMA adapters", file=sys.stderr)
        return 2
    _say("how long a choice takes")
    more = speed.measure(options.choices)
    found = report(lines, more)
    for node, figures in speeds.items():
        found["nodes"][node] |= figures
    if options.events:
        found |= rounded(health.measure(_say, options.events))
        by_node = NodeHealth(_say, options.events)
        for node, (file, scenario) in first.items():
            found["nodes"][node] |= told(by_node.measure(file, scenario))
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps(found, indent=1) + "\n")
    if options.svg is not None:
        options.svg.write_text(svg.draw(lines))
    if options.document is not None:
        options.document.write_text(markdown(options.document.read_text(), lines, found))
    print("\n" + "\n".join(table(lines, found)) + f"\n\nThe figures are in {options.report}", flush=True)
    missed = _missed(found)
    for text in missed:
        print(f"NOT HELD: {text}", flush=True)
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hack/bench/alignment",
        description="Let pods come and go on recorded nodes, and tell how many of their GPU-NIC pairs are as near as"
        " any choice could have made them. Record a host of your own with hack/record-node.",
    )
    add = parser.add_argument
    add("folder", nargs="?", type=Path, help="folder of node files (default: the nodes that come along)")
    add("--pods", type=int, default=60, help="pods on each node and kind of NIC (default: %(default)s)")
    add("--choices", type=int, default=300, help="choices of each kind to time (default: %(default)s)")
    add("--seed", type=int, default=4, help="of the pods that come and go (default: %(default)s)")
    add("--events", type=int, default=20, help="health events to time, 0 for none (default: %(default)s)")
    add("--report", type=Path, default=CHECKOUT / "build/reports/alignment.json", help="default: %(default)s")
    add("--svg", type=Path, help="file to draw the shares into")
    add("--document", type=Path, help="file to put the table into, between its marks")
    add("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser


def _files(folder: Path | None) -> list[Path]:
    if folder is None:
        return [recorded.find(name) for name in recorded.names()]
    return sorted(folder.glob("*.json"))


def _play(scenario: Scenario, folder: Path, pods: int, seed: int) -> Line:
    """Play the same pods in every way that there is."""
    terrain = Terrain(scenario.snapshot)
    plan = list(steps(len(terrain.gpus), len(scenario.devices), pods, seed))
    tallies: dict[str, Tally] = {}
    ways = [("early_pairing", "early", True, plan), (UNREAD, "early", False, plan)]
    if scenario.binds_late:
        ways.insert(0, ("late_binding", "late", True, plan))
    mixed = list(steps(len(terrain.gpus), len(scenario.devices), 2 * pods, seed, alone=ALONE, at_once=AT_ONCE))
    for way, binding, reads_pods, its_plan in (*ways, (MIXED, "early", True, mixed)):
        (folder / way).mkdir(parents=True)
        node = AgentNode(scenario, folder / way, binding, reads_pods=reads_pods, seed=seed)
        tallies[way] = asyncio.run(_play_agent(node, terrain, its_plan))
    for way, choose in RIVALS:
        books, chance = Books(terrain.gpus, scenario.devices), random.Random(seed)
        tally = tallies[way] = Tally()
        for step in plan:
            if step.comes:
                free = books.free
                gpus, nics = choose(terrain, free, step.gpus, chance)
                books.take(step.pod, (gpus, nics))
                tally.add(terrain, free, gpus, nics)
            else:
                books.give_back(step.pod)
    return Line(scenario.node, scenario.nics, tallies)


async def _play_agent(node: AgentNode, terrain: Terrain, plan: Sequence[Step]) -> Tally:
    tally = Tally()
    async with node.running():
        for step in plan:
            if step.comes:
                free = node.free()
                gpus, nics = await node.come(step)
                if gpus and nics:
                    tally.add(terrain, free, gpus, nics)
            else:
                await node.go(step.pod)
    return tally


def _missed(found: Mapping[str, Any]) -> list[str]:
    late, early = found["late_binding_attained_pct"], found["early_pairing_attained_pct"]
    missed = []
    if late is not None and late < 100:
        missed.append(f"late binding attains {late} %, must be 100")
    if early < 99:
        missed.append(f"early pairing attains {early} %, must be at least 99")
    if found["placement_p99_ms"] > 5:
        missed.append(f"a choice takes {found['placement_p99_ms']} ms at the 99th percentile, must be at most 5")
    for where, figures in ((health.NODE, found), *found["nodes"].items()):
        soon = figures.get("health_event_to_list_ms")
        if soon is not None and soon > 200:
            missed.append(f"{soon} ms from a health event to the list on {where}, must be at most 200")
    return missed


def _say(text: str) -> None:
    print(f"alignment: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
