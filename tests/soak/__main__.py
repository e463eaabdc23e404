"""The long forms: every fault point, a thousand pods, random lives for as long as one likes, and the fuzzer."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from agent.sim.stage import CNI_FOLDERS
from tests import sandbox
from tests.soak import churn, crash
from tests.soak.crash import Limits
from tests.soak.state_machine import Nodes, life_on

CHECKOUT = Path(__file__).resolve().parents[2]
FUZZER = CHECKOUT / "hack/fuzz-shim"
EXAMPLES_AT_ONCE = 5
Report = dict[str, int | str | list[str]]


def main(arguments: Sequence[str]) -> int:
    """Run the parts one after the other, and write the report after each. Returns 1 if anything was wrong."""
    options = _parser().parse_args(arguments)
    if not any((folder / "host-local").is_file() for folder in CNI_FOLDERS):
        print("the CNI plugin host-local is missing: install containernetworking-plugins", file=sys.stderr)
        return 2
    parts: dict[str, Callable[[], Report]] = {
        "crash": lambda: _crash(options),
        "state-machine": lambda: _state_machine(options),
        "churn": lambda: _churn(options),
        "fuzz": lambda: _fuzz(options),
    }
    report: Report = {"seed": options.seed}
    found: list[str] = []
    sandbox.seal()
    for name in options.only or parts:
        say(f"== {name}, seed {options.seed}")
        part = parts[name]()
        problems = part.pop("problems", [])
        assert isinstance(problems, list)
        found += problems
        report |= part
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(json.dumps(report | {"problems": found}, indent=1) + "\n")
    say("\n" + "\n".join(f"{name:24} {value}" for name, value in report.items()))
    say(f"\nThe figures are in {options.report}")
    for problem in found:
        say(f"WRONG: {problem}")
    return 1 if found else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hack/soak",
        description="Try to make the agent lose a device or an address, in namespaces of its own, for as long as told.",
    )
    add = parser.add_argument
    add("--only", action="append", choices=("crash", "state-machine", "churn", "fuzz"), help="may be repeated")
    add("--seed", type=int, default=int(time.time()), help="to repeat a run (default: another one each time)")
    add("--report", type=Path, default=CHECKOUT / "build/reports/soak.json", help="default: %(default)s")
    add("--scenario", help="of the crash test, this one alone")
    add("--crash-seconds", type=float, default=1800.0, help="at most (default: %(default)s)")
    add("--lines", type=int, default=60, help="points beside those after a change, in each scenario (%(default)s)")
    add("--machine-seconds", type=float, default=600.0, help="of the state machine (default: %(default)s)")
    add("--pods", type=int, default=1000, help="of the churn (default: %(default)s)")
    add("--fuzz-seconds", type=int, default=300, help="of the relay's fuzzer (default: %(default)s)")
    return parser


def _crash(options: argparse.Namespace) -> Report:
    outcome = crash.run(options.seed, Limits(options.lines, options.crash_seconds), say, options.scenario)
    say(f"crash test: {outcome}")
    return {
        "crash_points": outcome.points,
        "crash_violations": len(outcome.violations),
        "problems": outcome.violations,
    }


def _state_machine(options: argparse.Namespace) -> Report:
    """Play as many examples as time allows; after a failure, begin anew with another seed."""
    nodes = Nodes()
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
    finally:
        nodes.close()
    return {
        "state_machine_examples": nodes.examples,
        "state_machine_steps": nodes.steps,
        "state_machine_failures": len(failures),
        "problems": failures,
    }


def _churn(options: argparse.Namespace) -> Report:
    with sandbox.network():
        figures = churn.run(options.pods, vfs=64, concurrency=16, crash_every=50, seed=options.seed, say=say)
    say(f"churn: {figures}")
    return {
        "churn_pods": figures.pods,
        "churn_crashes": figures.crashes,
        "churn_failures": len(figures.failures),
        "churn_leaks": len(figures.leaks),
        "problems": figures.failures + figures.leaks,
    }


def _fuzz(options: argparse.Namespace) -> Report:
    if not os.access(FUZZER, os.X_OK):
        return {"problems": [f"{FUZZER} is missing, so nothing was fuzzed"]}
    with tempfile.TemporaryDirectory(prefix="nf-fuzz-") as folder:
        report = Path(folder, "report.json")
        done = subprocess.run([FUZZER, "--seconds", str(options.fuzz_seconds), "--report", report], check=False)
        found = json.loads(report.read_text()) if report.exists() else {}
    executions, crashes = (int(found.get(f"fuzz_{what}", found.get(what, 0))) for what in ("executions", "crashes"))
    problems = [f"the fuzzer ended with status {done.returncode}"] if done.returncode else []
    problems += [f"{crashes} inputs break the relay"] if crashes else []
    problems += ["the fuzzer has executed nothing"] if not executions else []
    return {"fuzz_executions": executions, "fuzz_crashes": crashes, "problems": problems}


def say(text: str) -> None:
    """Show a line at once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
