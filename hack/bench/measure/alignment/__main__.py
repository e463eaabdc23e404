"""The command line of the alignment benchmark."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from agent.hardware import recorded
from agent.model.locality import Locality
from agent.report.chart import why_not_known
from deviceplugin.dra.devices import pair_up
from measure import health
from measure.alignment import speed, svg
from measure.alignment.agent_node import AgentNode, Way
from measure.alignment.node_health import NodeHealth
from measure.alignment.rivals import RIVALS, Books
from measure.alignment.scenarios import ALL_VFS, Scenario, scenarios
from measure.alignment.score import Tally
from measure.alignment.stream import EVEN, PLAYS, Play, Step, steps
from measure.alignment.table import CLAIMS, OURS, TOLD, UNREAD, Line, markdown, report, rounded, table, told
from measure.dra import locality
from measure.namespaces import enter_namespaces

BY_CLAIM = ("near_gpu_attained_pct", "late_dra_attained_pct")
"""Ways to ask by claim that go by nearness."""
CLAIM_PODS = 20
"""Pods of these, at most: the stand-in for the scheduler searches long."""
MOST_CHOICE_MS = 10
"""On 16 GPUs, where an exact choice takes up to `agent.placement.gpus.SEARCH` steps."""
CHECKOUT = Path(__file__).parents[4]
MEMORY = "/dev/shm"
LATE, EARLY = OURS
WAYS = {
    LATE: Way("late"),
    EARLY: Way("early"),
    TOLD: Way("early", foresees=True),
    UNREAD: Way("early", reads_pods=False),
}


def main(arguments: Sequence[str]) -> int:
    """Play, print and write. Returns 1 if what is promised is not held, 2 if there is nothing to play on."""
    options = _parser().parse_args(arguments)
    if options.events and not options.inside:
        enter_namespaces("measure.alignment", arguments)
    files = _files(options.folder)
    with ProcessPoolExecutor(options.jobs) as pool:
        found_lines = pool.map(partial(_play_node, pods=options.pods, seed=options.seed), files)
        lines = [line for mine in found_lines for line in mine]
    if not lines:
        print("alignment: none of these nodes has GPUs and RDMA adapters", file=sys.stderr)
        return 2
    _say("how long a choice takes")
    found = {"seed": options.seed, "pods": options.pods} | report(lines, speed.measure(options.choices))
    if options.events:
        found |= rounded(health.measure(_say, options.events))
    by_node = NodeHealth(_say, options.events)
    for file in files:
        with tempfile.TemporaryDirectory(prefix="nf-") as folder:
            scenario = next(scenarios(file, Path(folder)), None)  # that with the most devices
        if scenario is not None:
            found["nodes"][scenario.node] |= speed.on(scenario, options.choices)
            if options.events:
                found["nodes"][scenario.node] |= told(by_node.measure(file, scenario))
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
        description="Let pods come and go on modelled nodes, and tell how many of their GPU-NIC pairs are as near as"
        " any choice could have made them. Record a host of your own with hack/record-node.",
    )
    add = parser.add_argument
    add("folder", nargs="?", type=Path, help="folder of node files (default: the nodes that come along)")
    add("--pods", type=int, default=100, help="pods of each play on each node and kind of NIC (default: %(default)s)")
    add("--choices", type=int, default=300, help="choices of each kind to time (default: %(default)s)")
    add("--seed", type=int, default=4, help="of the pods that come and go (default: %(default)s)")
    add("--jobs", type=int, default=os.cpu_count(), help="nodes played side by side (default: %(default)s)")
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


def _play_node(file: Path, pods: int, seed: int) -> list[Line]:
    """Play everything on one node."""
    lines = []
    # Books that are written to a disk would have it wait; nothing of it is measured.
    with tempfile.TemporaryDirectory(prefix="nf-", dir=MEMORY if os.path.isdir(MEMORY) else None) as folder:
        root = Path(folder) / "root"
        root.mkdir()
        for number, scenario in enumerate(scenarios(file, root)):
            plays: dict[str, Mapping[str, Tally]] = {}
            documented: dict[str, Mapping[str, Tally]] = {}
            for play in PLAYS:
                began = time.monotonic()
                plan = list(steps(play, len(scenario.distances.gpus), len(scenario.devices), pods, seed))
                place = Path(folder) / f"{number}-{len(plays)}"
                plays[play.name], judged = judge(scenario, place, play, plan, seed)
                if judged:
                    documented[play.name] = judged
                _say(f"{scenario.node}, {scenario.nics}, {play.name}: {time.monotonic() - began:.1f} s")
            if scenario.truth is not None and EVEN.name not in documented:
                raise RuntimeError(f"{scenario.node}: no pod got a device of a documented pair, so nothing was judged")
            if (claims := claimed(scenario, pods, seed)) is not None:
                documented[CLAIMS] = {CLAIMS: claims}
            pairs, said = scenario.pairs, why_not_known(scenario.snapshot) is not None
            undocumented = None if pairs is None else pairs.unknown
            lines.append(Line(scenario.node, scenario.nics, plays, documented, undocumented, said))
    return lines


def claimed(scenario: Scenario, pods: int, seed: int) -> Tally | None:
    """Judge by documented pairs what claims go by: the GPU that each device names, and the NICs that pods get so.

    None without documented pairs.
    """
    truth = scenario.truth
    if truth is None:
        return None
    tally = Tally()
    named = pair_up(scenario.devices, scenario.distances).gpu
    for device in scenario.devices:
        own = [gpu for gpu in truth.gpus if truth.distance(gpu, device) is Locality.PIX]
        tally.pairs += bool(own)
        tally.attained += named.get(device) in own
    if scenario.has_nvml and scenario.nics == ALL_VFS:
        for way in (way for way in locality.WAYS if way.figure in BY_CLAIM):
            share = locality.play(scenario.snapshot, way, min(pods, CLAIM_PODS), seed, truth)
            tally += Tally(share.pairs, share.attained)
    return tally


def judge(
    scenario: Scenario, folder: Path, play: Play, plan: Sequence[Step], seed: int
) -> tuple[Mapping[str, Tally], Mapping[str, Tally]]:
    """Play the same pods in every way that there is. What is told beforehand matters only where something is missed.

    The second are our ways, judged by documented pairs.
    """
    tallies: dict[str, Tally] = {}
    documented: dict[str, Tally] = {}
    for name, way in WAYS.items():
        if way.foresees and (tallies[EARLY].attained == tallies[EARLY].pairs or play.other_plugin):
            tallies[name] = tallies[EARLY]
            continue
        if not way.reads_pods and play is not EVEN:
            continue
        (folder / name).mkdir(parents=True)
        tallies[name], judged = asyncio.run(
            _play_agent(AgentNode(scenario, folder / name, way, play, seed), scenario, play, plan)
        )
        if name in OURS and judged.pairs:
            documented[name] = judged
    for name, choose in RIVALS if play is EVEN else ():
        books, chance = Books(scenario.distances.gpus, scenario.devices), random.Random(seed)
        tally = tallies[name] = Tally()
        for step in plan:
            if step.comes:
                free = books.free
                gpus, nics = choose(scenario.distances, free, step.gpus, chance)
                books.take(step.pod, (gpus, nics))
                tally.add(scenario.distances, free, [(gpus, nics)])
            else:
                books.give_back(step.pod)
    return tallies, documented


async def _play_agent(node: AgentNode, scenario: Scenario, play: Play, plan: Sequence[Step]) -> tuple[Tally, Tally]:
    tally, judged = Tally(), Tally()
    async with node.running():
        for step in plan:
            if step.comes:
                free = node.free()
                parts = await node.come(step)
                # kubelet asks for one container after the other: what is chosen for one cannot heed the next.
                given = play.other_plugin or len(step.containers) > 1
                tally.add(scenario.distances, free, parts, given=given)
                if scenario.truth is not None:
                    judged.add(scenario.truth, free, parts, given=given)
            else:
                node.go(step)
    return tally, judged


def _missed(found: Mapping[str, Any]) -> list[str]:
    missed = []
    if (late := found["worst_late_pct"]) is not None and late < 100:
        missed.append(f"late binding attains {late} % somewhere, must be 100 everywhere")
    if (even := found["worst_early_even_pct"]) is not None and even < 99:
        missed.append(f"early pairing attains {even} % at 1:1 somewhere, must be at least 99 everywhere")
    if (early := found["early_all_plays_pct"]) is not None and early < 95:
        missed.append(f"early pairing attains {early} % over all plays, must be at least 95")
    if (documented := found["documented_pct"]) is not None and documented < 100:
        missed.append(f"{documented} % of documented pairs are attained somewhere, must be 100 everywhere")
    for node, figures in found["nodes"].items():
        if figures["unknown_said"] != figures["unknown_nodes"]:
            said, told = ("not known", "tell") if figures["unknown_said"] else ("known", "do not tell")
            missed.append(f"the agent says that nearness is {said} on {node}, but documents {told}")
    if found["placement_p99_ms"] > MOST_CHOICE_MS:
        slow = f"a choice takes {found['placement_p99_ms']} ms at the 99th percentile"
        missed.append(f"{slow}, must be at most {MOST_CHOICE_MS}")
    for where, figures in ((health.NODE, found), *found["nodes"].items()):
        soon = figures.get("health_event_to_list_ms")
        if soon is not None and soon > 200:
            missed.append(f"{soon} ms from a health event to the list on {where}, must be at most 200")
    return missed


def _say(text: str) -> None:
    print(f"alignment: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
