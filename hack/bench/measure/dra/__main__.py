"""The command line of the DRA benchmark."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.hardware import recorded
from agent.model.device import Snapshot
from measure import markdown
from measure.dra import calls, document, locality, memory, pods, stall, standing
from measure.dra.locality import Share
from measure.dra.node import running_node
from measure.dra.published import publish
from measure.figures import Figures, Limit, exceeded, table
from measure.namespaces import enter_namespaces
from tests.deviceplugin.dra.nodes import recorded_node

CHECKOUT = Path(__file__).parents[4]
DENSE, EIGHT_GPUS = "dense-16x64", "h100-8gpu"
VF = "rdma/vf"
PARTS = ("locality", "slices", "stall", "node", "pods", "memory")
RUNNING = {"node", "pods"}
"""Those with a running agent."""
PROMISED = ("near_gpu_attained_pct", "near_address_attained_pct", "late_dra_attained_pct")
"""Always 100."""
LIMITS = (
    Limit("prepare_p99_ms", 40, "NodePrepareResources, with an API server that answers in 5 ms"),
    Limit("prepared_again_p50_ms", 8, "the same for a claim that is prepared"),
    Limit("books_ms", 1, "what the books take of it"),
    Limit("pod_start_claim_more_ms", 30, "start of a pod by claim, above one by device plugin"),
    Limit("slice_writes_per_pod", 0, "slices written"),
    Limit("status_writes_per_pod", 1, "claims written"),
    Limit("steady_writes_per_hour", 0, "anything written while nothing happens"),
    Limit("slices_back_after_wipe_s", 2, "until all slices are back"),
    Limit("registered_after_restart_s", 1.5, "from the agent's exec until kubelet has registered it"),
    Limit("agent_rss_mib", 110, "memory of the agent with 1,024 VFs for claims"),
    Limit("rss_without_dra_extra_mib", 1, "memory for claims on a node that offers nothing to them"),
)


def main(arguments: Sequence[str]) -> int:
    """Play, print and write. Returns 1 if what is promised is not held."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.document is not None and options.only:
        parser.error("--document shows all parts: leave --only out")
    parts = options.only or PARTS
    if RUNNING & set(parts) and not options.inside:
        enter_namespaces("measure.dra", arguments)
    figures: Figures = {}
    nodes: dict[str, Figures] = {}
    if "locality" in parts:
        figures |= _locality(nodes, options.pods, options.seed)
    if "slices" in parts:
        _say(f"slices of {DENSE}")
        figures |= slice_bytes(recorded_node(DENSE))
    if "stall" in parts:
        _say(f"pods that do not fit on {EIGHT_GPUS}")
        figures |= stall.measure(recorded_node(EIGHT_GPUS), options.limit)
    if "node" in parts:
        figures |= _large_node(options)
    if "pods" in parts:
        figures |= _small_node(options)
    if "memory" in parts:
        figures |= memory.without(_say)
    report: dict[str, Any] = {name: round(value, 3) for name, value in figures.items()} | {"nodes": nodes}
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps(report, indent=1) + "\n")
    if options.document is not None:
        text = options.document.read_text()
        options.document.write_text(markdown.put_into(text, document.section(figures), document.BEGIN))
    print("\n".join(table(figures, LIMITS)) + f"\n\nThe figures are in {options.report}", flush=True)
    missed = stall.missed(figures) if "stall" in parts else []
    missed += [f"{name} is {figures[name]}, must be 100" for name in PROMISED if figures.get(name, 100) < 100]
    missed += exceeded(figures, LIMITS)
    for text in missed:
        print(f"NOT HELD: {text}", flush=True)
    return 1 if missed else 0


def _locality(nodes: dict[str, Figures], pods: int, seed: int) -> Figures:
    """Play on all modelled nodes with GPUs and VFs, and put what each attains into `nodes`."""
    shares = {way.figure: Share() for way in locality.WAYS}
    for name in recorded.names():
        snapshot = recorded_node(name)
        ways = [way for way in locality.WAYS if way.is_for(snapshot)]
        if not ways:
            continue
        _say(f"{name}: {pods} pods in {len(ways)} ways")
        for way in ways:
            share = locality.play(snapshot, way, pods, seed)
            nodes.setdefault(name, {})[way.figure] = round(share.percent, 1)
            shares[way.figure].add(share)
    return {figure: round(share.percent, 1) for figure, share in shares.items()}


def _large_node(options: argparse.Namespace) -> Figures:
    """Run the agent on the node with 1,024 VFs: one by one for claims, then as late-bound places."""
    figures: Figures = {}
    look = ("--look", str(standing.LOOK_SECONDS))
    _say(f"the agent on {DENSE}, with a claim for each VF")
    with running_node(options.relay, DENSE, _config("early"), _say, with_links=False, kubelet=look) as node:
        figures |= calls.measure(node, VF, "", options.calls, options.crowds, _say)
        figures |= memory.resident(node, _say)
        figures |= standing.wiped(node.cluster, options.wipes, _say)
        figures |= standing.steady(node.cluster, options.idle, _say)
        figures |= standing.restarted(node, options.starts, _say)
        node.stage.end("agent")
        figures |= calls.books(node.stage.folder / "state", _say)
    _say(f"the agent on {DENSE}, choosing VFs late")
    with running_node(options.relay, DENSE, _config("late"), _say, with_links=False) as node:
        figures |= calls.measure(node, VF, "late_", options.calls, options.crowds, _say)
    return figures


def _small_node(options: argparse.Namespace) -> Figures:
    """Run pods on a node with real links."""
    _say(f"the agent on {pods.NODE}, with real links")
    with running_node(
        options.relay, pods.NODE, pods.config(), _say, with_links=True, kubelet=pods.LATER_DELETE
    ) as node:
        return pods.starts(node, options.rounds, _say) | pods.homes(node, options.rounds, _say)


def _config(binding: str) -> Mapping[str, Any]:
    """Offer all VFs and shares to claims, and publish the topology, as by the chart's defaults."""
    mellanox = {"vendors": ["15b3"]}
    return {
        "resources": [
            {"name": VF, "kind": "vf", "offer": "dra", "binding": binding, "select": mellanox},
            {"name": "rdma/hca", "kind": "hca", "offer": "dra", "select": mellanox},
        ],
        "topology": {"publish": True, "startSpreadSeconds": 0, "kubeletConfig": os.devnull},
    }


def slice_bytes(snapshot: Snapshot) -> Figures:
    """Tell how large the slices of a node's VFs are, as JSON."""
    vfs = [device.address for device in snapshot.devices if device.is_vf]
    sizes = {
        binding: sum(len(json.dumps(one, separators=(",", ":"))) for one in publish(snapshot, vfs, binding).slices)
        for binding in ("early", "late")
    }
    return {"slice_bytes_1024_vf": sizes["early"], "slice_bytes_1024_vf_late": sizes["late"]}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hack/bench/dra",
        description="Let pods ask for GPUs and NICs by claims on modelled nodes, by a stand-in for the scheduler, and"
        " tell how near these stand, how large the slices are, and how soon pods are told that they do not fit. Then"
        " run the agent beside stand-ins for kubelet and for an API server that answers in 5 ms, and time what kubelet"
        " waits for. A busy machine gives bad times.",
    )
    add = parser.add_argument
    add("--only", action="append", choices=PARTS, help="measure this part alone (may be repeated)")
    add("--relay", type=Path, default=CHECKOUT / "build/shim/native/nodefabric-cni", help="default: %(default)s")
    add("--calls", type=int, default=300, help="claims that are prepared one by one (default: %(default)s)")
    add("--crowds", type=int, default=20, help="rounds of 16 claims at once (default: %(default)s)")
    add("--wipes", type=int, default=10, help="times that the slices are wiped (default: %(default)s)")
    add("--starts", type=int, default=15, help="starts of the agent (default: %(default)s)")
    add("--idle", type=float, default=120.0, help="seconds to watch the idle agent (default: %(default)s)")
    add("--rounds", type=int, default=40, help="pods of each kind, and rounds of DEL (default: %(default)s)")
    add("--pods", type=int, default=60, help="pods on each node (default: %(default)s)")
    add("--seed", type=int, default=4, help="of the pods that come and go (default: %(default)s)")
    add("--limit", type=float, default=10.0, help="seconds that one node may take (default: %(default)s)")
    add("--report", type=Path, default=CHECKOUT / "build/reports/dra.json", help="default: %(default)s")
    add("--document", type=Path, help="file to put the tables into, between its marks (needs all parts)")
    add("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser


def _say(text: str) -> None:
    print(f"dra: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
