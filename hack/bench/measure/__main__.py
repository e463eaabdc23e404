"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hack.sim.machine import SimulatedMachine
from hack.sim.stage import CNI_FOLDERS, CONFIG, Stage
from measure import agent_process, attach, attach_many, discovery, former, markdown, passthrough, routing, starts
from measure.contender import Host, Played
from measure.figures import Figures, exceeded, table
from measure.former import Version
from measure.namespaces import enter_namespaces

CHECKOUT = former.CHECKOUT
PARTS = ("discovery", "agent", "starts", "attach-many", "attach", "routing", "passthrough")


def main(arguments: Sequence[str]) -> int:
    """Measure, print and write. Returns 1 if a limit is not held."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.document is not None and options.only:
        parser.error("--document shows all parts: leave --only out")
    if not options.inside:
        enter_namespaces("measure", arguments)
    figures = _measure(options)
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps({name: round(value, 4) for name, value in figures.items()}, indent=1) + "\n")
    if options.document is not None:
        options.document.write_text(markdown.put_into(options.document.read_text(), markdown.section(figures)))
    print("\n" + "\n".join(table(figures)) + f"\n\nThe figures are in {options.report}", flush=True)
    for line in exceeded(figures):
        print(f"LIMIT NOT HELD: {line}", flush=True)
    return 1 if exceeded(figures) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hack/bench/run",
        description="Measure discovery, the device plugins, the agent's footprint and the CNI relay, in network and"
        " mount namespaces of their own. A busy machine gives bad figures; the ratios suffer least.",
    )
    add = parser.add_argument
    add("--only", action="append", choices=PARTS, help="measure this part alone (may be repeated)")
    add("--relay", type=Path, default=CHECKOUT / "build/shim/native/nodefabric-cni", help="default: %(default)s")
    add("--against", metavar="REV", help="measure the agent and relay of this commit, too, in the same rounds")
    add("--report", type=Path, default=CHECKOUT / "build/reports/bench.json", help="default: %(default)s")
    add("--document", type=Path, help="file to put the tables into, between its marks (needs all parts)")
    add("--scans", type=int, default=15, help="scans of the large node (default: %(default)s)")
    add("--calls", type=int, default=1000, help="calls of each device plugin method (default: %(default)s)")
    add("--starts", type=int, default=25, help="starts of the agent (default: %(default)s)")
    add("--rounds", type=int, default=150, help="rounds of ADD and DEL, and of pass-through (default: %(default)s)")
    add("--crowds", type=int, default=20, help="rounds of 16 pods at once (default: %(default)s)")
    add("--idle", type=float, default=20.0, help="seconds to watch the idle agent (default: %(default)s)")
    add("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser


def _measure(options: argparse.Namespace) -> Figures:
    parts = options.only or PARTS
    figures: Figures = {}
    # On a disk, not in memory: what the ledger waits for is a part of the figures.
    with tempfile.TemporaryDirectory(prefix="nf-bench-", dir="/var/tmp") as folder:
        if "discovery" in parts:
            figures |= discovery.measure(Path(folder), options.scans, _say)
    versions = _versions(options)
    if "agent" in parts:
        figures |= agent_process.measure(versions, options.calls, options.idle, _say)
    if "starts" in parts:
        figures |= starts.measure(versions, options.starts, _say)
    if {"attach", "attach-many", "routing", "passthrough"} & set(parts):
        figures |= _measure_relay(options, versions, parts)
    return figures


def _versions(options: argparse.Namespace) -> dict[str, Version]:
    """Return what is measured, by the prefix of its figures: this checkout, and a former version where one is named."""
    versions = {"": Version(options.relay)}
    if options.against is not None:
        versions["former_"] = former.build(options.against, CHECKOUT / "build/against")
    return versions


def _measure_relay(options: argparse.Namespace, versions: dict[str, Version], parts: Sequence[str]) -> Figures:
    """Start one node of each version for these parts, and measure them."""
    figures: Figures = {}
    with ExitStack() as stack:
        played = {name: stack.enter_context(_node(version)) for name, version in versions.items()}
        ours = played[""]
        if "attach-many" in parts:
            figures |= attach_many.measure(ours.stage, ours.machine, _host_device(), options.crowds, _say)
        if "attach" in parts:
            figures |= attach.measure(played, _host_device(), options.rounds, _say)
        if "routing" in parts:
            figures |= routing.measure(ours.stage, ours.machine, options.rounds // 3, _say)
        if "passthrough" in parts:
            figures |= passthrough.measure(ours.stage, options.rounds, _say)
    return figures


@contextmanager
def _node(version: Version) -> Iterator[Played]:
    """Run a version's agent on a node with real links: this checkout's here, another in a namespace of its own."""
    _say(f"the agent of {version.code or 'this checkout'} on {attach.NODE}, with real links")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nf-bench-", dir="/var/tmp")))
        host = Host(fresh=version.code is not None)
        stack.callback(host.close)
        stage = host.do(lambda: Stage(folder, version.relay, code=version.code))
        stack.callback(lambda: host.do(stage.close))

        def start() -> SimulatedMachine:
            machine = stage.build_node(attach.NODE)
            stage.write_config({**CONFIG, "cni": {"requireGrant": False}})  # both plugins are told the device by hand
            stage.start_kubelet("--seed", "7")
            stage.start_agent()
            stage.await_ready()
            return machine

        try:
            yield Played(host, stage, host.do(start))
        except BaseException:
            _say(stage.log_ends())
            raise


def _host_device() -> Path:
    for folder in CNI_FOLDERS:
        if (folder / "host-device").is_file():
            return folder / "host-device"
    raise SystemExit("the CNI plugin host-device is missing: install containernetworking-plugins")


def _say(text: str) -> None:
    print(f"bench: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
