"""Gives the whole run namespaces of its own, and says to tests what there is on this machine.

A test that makes links or mounts asks for `own_network` and is skipped where the kernel
forbids namespaces; it then has a network namespace to itself. All other tests share one with a loopback only.
"""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import sandbox
from tests.nvml import fake

IN_THE_MACHINE = Path("/run/vmrun/command").is_file()
"""In the virtual machine of hack/vm the adapters are in the first namespace, and nothing else is at stake."""

_SEALED = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Leave the machine's namespaces before any test, thread or event loop begins."""
    # A deadline, for each example or for making them, is a timed assertion: it fails on a busy machine. And the same
    # examples are tried in each run, so that what fails is due to the change that is tested.
    checks = [HealthCheck.too_slow]
    settings.register_profile("nodefabric", deadline=None, derandomize=True, suppress_health_check=checks)
    settings.load_profile("nodefabric")
    config.stash[_SEALED] = ""
    if tempfile.gettempdir() == "/tmp/.nf":  # hack/test-worker has files in memory, which no other worker sees
        config.option.basetemp = Path("/tmp/.nf/pytest")
    if IN_THE_MACHINE:
        return
    try:
        sandbox.seal()
    except OSError as error:
        config.stash[_SEALED] = f"this machine lets nobody make namespaces ({error})"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Have what a test has printed and logged be text: reports of parallel processes cannot carry lone surrogates."""
    report = yield
    report.sections = [(name, content.encode(errors="replace").decode()) for name, content in report.sections]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, and fail it for a task that died unseen."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    unseen: list[str] = []

    async def watched() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, seen: unseen.append(f"{seen['message']}: {seen.get('exception')}"))
        await pyfuncitem.obj(**arguments)

    asyncio.run(watched())
    assert unseen == []
    return True


@pytest.fixture
def own_network(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give the test an empty network namespace, and mounts that nobody else sees."""
    if forbidden := request.config.stash[_SEALED]:
        pytest.skip(forbidden)
    with sandbox.network():
        yield


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose name leaves room for a socket's: its path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="nf-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libnvidia-ml.so.1 that shows what a test says."""
    return fake.compile_library(tmp_path_factory.mktemp("nvml"))
