"""The long forms: every fault point, a thousand pods, random lives for as long as one likes, and the fuzzer."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from hack.sim.stage import CNI_FOLDERS
from tests import sandbox
from tests.soak import churn, crash
from tests.soak.crash import Limits, Outcome
from tests.soak.scenarios import SCENARIOS
from tests.soak.state_machine import Counted, life_on

CHECKOUT = Path(__file__).resolve().parents[2]
FUZZER = CHECKOUT / "hack/fuzz-shim"
EXAMPLES_AT_ONCE = 5
Figures = dict[str, Any]
Found = tuple[Figures, Sequence[str]]
"""Figures, and problems."""
Note = Callable[[Figures, Sequence[str]], None]
"""Takes the figures and problems so far."""


def main(arguments: Sequence[str]) -> int:
    """Run the parts one after the other, and keep the report up to date. Returns 1 if anything was wrong."""
    options = _parser().parse_args(arguments)
    if not any((folder / "host-local").is_file() for folder in CNI_FOLDERS):
        print("the CNI plugin host-local is missing: install containernetworking-plugins", file=sys.stderr)
        return 2
    sandbox.seal()
    parts = options.only or list(PARTS)
    figures: Figures = {"seed": options.seed}
    problems: list[str] = []

    def tell(now: Figures, wrong: Sequence[str]) -> None:
        document = {**figures, **now, "unfinished": unfinished, "problems": [*problems, *wrong]}
        fresh = options.report.with_name(f"{options.report.name}.new")
        fresh.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(document, indent=1) + "\n")
        fresh.rename(options.report)

    for number, name in enumerate(parts):
        unfinished = parts[number:]
        tell({}, [])
        say(f"== {name}")
        began = time.monotonic()
        try:
            found, wrong = PARTS[name](options, tell)
        except Exception as error:  # whatever it is, the other parts are played
            found, wrong = {}, [f"{name} ended before it was over: {error!r}"]
            traceback.print_exc()
        figures |= {**found, f"{name.replace('-', '_')}_seconds": round(time.monotonic() - began)}
        problems += wrong
    unfinished = []
    tell({}, [])
    say("\n".join(f"{name:24} {value}" for name, value in figures.items()))
    say("\n".join([f"\nThe figures are in {options.report}", *(f"WRONG: {problem}" for problem in problems)]))
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hack/soak",
        allow_abbrev=False,
        description="Try to make the agent lose a device or an address, in namespaces of its own, for as long as told.",
    )
    add = parser.add_argument
    add("--only", action="append", choices=PARTS, help="may be repeated")
    add("--seed", type=int, default=int(time.time()), help="to repeat a run (default: another one each time)")
    add("--report", type=Path, default=CHECKOUT / "build/reports/soak.json", help="default: %(default)s")
    add("--scenario", help="of the crash test, this one alone")
    add("--crash-seconds", type=float, default=3600.0, help="points left then count as wrong (default: %(default)s)")
    add("--lines", type=int, default=60, help="points beside those after a change, in each scenario (%(default)s)")
    add("--machine-seconds", type=float, default=600.0, help="of the state machine (default: %(default)s)")
    add("--pods", type=int, default=1000, help="of the churn (default: %(default)s)")
    add("--fuzz-seconds", type=int, default=300, help="of the relay's fuzzer (default: %(default)s)")
    return parser


def _figures(part: str, found: Outcome | churn.Figures) -> Figures:
    return {f"{part}_{name}": len(seen) if isinstance(seen, list) else seen for name, seen in asdict(found).items()}


def _crash(options: argparse.Namespace, tell: Note) -> Found:
    limits = Limits(options.lines, seconds=options.crash_seconds)
    chosen = [each for each in SCENARIOS if options.scenario in (None, each.name)]
    outcome = crash.run(options.seed, limits, say, chosen, lambda now: tell(_figures("crash", now), now.violations))
    say(f"crash test: {outcome}")
    left = outcome.chosen - outcome.points
    problems = [*outcome.violations, *([f"{left} fault points were not tried"] if left else [])]
    return _figures("crash", outcome), problems if outcome.chosen else [*problems, "there is no fault point to try"]


def _state_machine(options: argparse.Namespace, tell: Note) -> Found:
    """Play as many examples as time allows; after a failure, begin anew with another seed."""
    nodes = Counted()
    failures: list[str] = []
    until = time.monotonic() + options.machine_seconds
    chosen = settings(
        max_examples=EXAMPLES_AT_ONCE,
        stateful_step_count=40,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    turn = 0

    def figures() -> Figures:
        return {
            "state_machine_examples": nodes.examples,
            "state_machine_steps": nodes.steps,
            "state_machine_failures": len(failures),
        }

    try:
        while time.monotonic() < until:
            try:
                run_state_machine_as_test(seed(options.seed + turn)(life_on(nodes)), settings=chosen)
            except Exception as error:  # whatever it is that came to light
                notes = "\n".join(getattr(error, "__notes__", ()))
                failures.append(f"state machine, seed {options.seed + turn}: {error!r}\n{notes}")
                say(failures[-1])
            turn += 1
            say(f"state machine: {nodes.examples} examples, {nodes.steps} steps, {len(failures)} failures")
            tell(figures(), failures)
    finally:
        nodes.close()
    return figures(), failures


def _churn(options: argparse.Namespace, tell: Note) -> Found:
    with sandbox.network():
        found = churn.run(
            options.pods,
            vfs=32,
            concurrency=16,
            crash_every=50,
            seed=options.seed,
            say=say,
            tell=lambda now: tell(_figures("churn", now), now.failures),
        )
    say(f"churn: {found}")
    return _figures("churn", found), found.failures + found.leaks


def _fuzz(options: argparse.Namespace, tell: Note) -> Found:
    if not os.access(FUZZER, os.X_OK):
        return {}, [f"{FUZZER} is missing, so nothing was fuzzed"]
    with tempfile.TemporaryDirectory(prefix="nf-fuzz-") as folder:
        report = Path(folder, "report.json")
        done = subprocess.run([FUZZER, "--seconds", str(options.fuzz_seconds), "--report", report], check=False)
        found = json.loads(report.read_text()) if report.exists() else {}
    executions, crashes = (int(found.get(f"fuzz_{what}", found.get(what, 0))) for what in ("executions", "crashes"))
    problems = [f"the fuzzer ended with status {done.returncode}"] if done.returncode else []
    problems += [f"{crashes} inputs break the relay"] if crashes else []
    problems += ["the fuzzer has executed nothing"] if not executions else []
    return {"fuzz_executions": executions, "fuzz_crashes": crashes}, problems


PARTS: Mapping[str, Callable[[argparse.Namespace, Note], Found]] = {
    "crash": _crash,
    "state-machine": _state_machine,
    "churn": _churn,
    "fuzz": _fuzz,
}


def say(text: str) -> None:
    """Show a line at once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
