"""Running `tests/vm` in the machine: what `make vm` does.

A computer that cannot run the machine skips the tests in one loud line; where CI=true is set, that is a failure.
Done in under fifteen minutes whatever happens, with nothing in the cache too.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from rig import programs, session
from rig.errors import GuestFailed, Impossible, RigError, TimedOut
from rig.machine import Shape
from rig.progress import Deadline, say, step

ROOT = Path(__file__).resolve().parent.parent.parent.parent
PYTHON = ROOT / ".venv" / "bin" / "python"
RELAY = ROOT / "build" / "shim" / "amd64" / "nodefabric-cni"
REPORTS = ROOT / "build" / "reports"
SOURCES = ("agent", "deviceplugin", "cni", "proto", "tests")
NEEDS_IOMMU = ("tests/vm/test_vfio.py",)
EXTRA_MODULES = ROOT / "hack" / "vm" / "extra-modules"
EXTRA_VARIABLE = "NODEFABRIC_EXTRA_MODULES"
IN_ALL_SECONDS, ONE_RUN_SECONDS, EXTRA_SECONDS = 1800, 1440, 240


def main(arguments: Sequence[str], env: Mapping[str, str]) -> int:
    """Run the tests and return an honest exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    deadline = Deadline.after(IN_ALL_SECONDS)
    try:
        for needed, remedy in ((PYTHON, "set up the virtual environment"), (RELAY, "run make shim")):
            if not needed.exists():
                raise RigError(f"{needed.relative_to(ROOT)} is missing: {remedy}")
        REPORTS.mkdir(parents=True, exist_ok=True)
        machine = session.prepare(
            session.Order(
                cache=session.default_cache(env), shape=Shape(pfs=2, numa_nodes=2), snapshot=True, shares=(REPORTS,)
            ),
            deadline,
        )
        compile_all(deadline)
        extra = extra_modules(session.default_cache(env), env, deadline)
        here = list(arguments) or [f"--ignore={test}" for test in NEEDS_IOMMU]
        if not any((ROOT / argument.partition("::")[0]).exists() for argument in arguments):
            here = ["tests/vm", *here]
        status = run(machine, here, {**env, **extra}, deadline)
        return status if status or arguments else run_with_iommu(env, deadline)
    except Impossible as error:
        return skip(str(error), env)
    except RigError as error:
        say(f"FAILED: {error}")
        return error.status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def compile_all(deadline: Deadline) -> None:
    """Compile all byte code here: in the guest it could not be kept, and each import would compile again."""
    packages = sorted((ROOT / ".venv" / "lib").glob("python*/site-packages"))
    sources = [ROOT / name for name in SOURCES if (ROOT / name).exists()]
    # A package may ship templates that are no Python; what is imported will say so itself.
    with step("compiling byte code", quiet_seconds=2), contextlib.suppress(programs.ProgramFailed):
        programs.run([PYTHON, "-m", "compileall", "-q", *packages, *sources], deadline)


def extra_modules(
    cache: Path, env: Mapping[str, str], deadline: Deadline, program: Path = EXTRA_MODULES
) -> dict[str, str]:
    """Build the drivers that Debian's kernel lacks, unless the cache has them, and tell the guest where they are.

    Without them the tests that need them are left out, loudly; where CI=true is set, that is a failure.
    """
    folder = cache / f"extra-{hashlib.sha256(program.read_bytes()).hexdigest()[:12]}"  # each checkout's own changes
    try:
        with step("building drivers for the guest's kernel, 1 to 2 minutes the first time", quiet_seconds=2):
            programs.run([program, folder], deadline.sooner(EXTRA_SECONDS), env={session.CACHE_VARIABLE: str(cache)})
    except (programs.ProgramFailed, TimedOut) as error:
        if env.get("CI") == "true":
            raise
        say(f"!!! the tests with RDMA devices that move are NOT run: {error} !!!")
        return {}
    return {EXTRA_VARIABLE: str(folder)}


def run_with_iommu(env: Mapping[str, str], deadline: Deadline) -> int:
    """Run what needs an IOMMU, in a machine of its own: all the others are slower with one."""
    shape = Shape(pfs=2, numa_nodes=2, iommu=True)
    order = session.Order(cache=session.default_cache(env), shape=shape, snapshot=True, shares=(REPORTS,))
    return run(session.prepare(order, deadline), NEEDS_IOMMU, env, deadline, REPORTS / "vm-iommu.xml")


def run(
    machine: session.Prepared,
    arguments: Sequence[str],
    env: Mapping[str, str],
    deadline: Deadline,
    report: Path = REPORTS / "vm.xml",
) -> int:
    """Run pytest in the guest; once more, from a new snapshot, if the guest ends by itself."""
    pytest = [PYTHON, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
    passed = {name: env[name] for name in ("LANG", "CI", EXTRA_VARIABLE) if name in env}
    # The machine's emulated processor is slow, and what is printed should be seen at once.
    command = session.Command([str(word) for word in pytest], ROOT, {**passed, "PYTHONUNBUFFERED": "1"})
    report.unlink(missing_ok=True)
    try:
        status = machine.run(command, deadline.sooner(ONE_RUN_SECONDS))
    except GuestFailed as error:
        say(f"{error}; trying once more, from a new snapshot")
        status = machine.without_snapshot(deadline).run(command, deadline.sooner(ONE_RUN_SECONDS))
    summarize(report)
    return status


def summarize(report: Path) -> None:
    """Say how many tests ran, from the report that the guest wrote."""
    try:
        suite = ElementTree.parse(report).find("testsuite")
    except (OSError, ElementTree.ParseError):
        suite = None
    if suite is None:
        say(f"pytest left no report in {report.relative_to(ROOT)}")
        return
    counts = ", ".join(f"{suite.get(word)} {word}" for word in ("tests", "failures", "errors", "skipped"))
    say(f"{counts} in {float(suite.get('time', 0)):.0f} s (report: {report.relative_to(ROOT)})")


def skip(reason: str, env: Mapping[str, str]) -> int:
    """Say loudly what is not tested, and why."""
    if env.get("CI") == "true":
        say(f"FAILED: the VM tests cannot run, and with CI=true they must: {reason}")
        return Impossible.status
    say(f"!!! SKIPPED: the VM tests (real SR-IOV adapters, real kernel, RDMA) were NOT run: {reason} !!!")
    return 0
