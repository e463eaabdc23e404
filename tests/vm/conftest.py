"""Keeps these tests out of any other computer, and hands them adapters, namespaces and soft RoCE."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.containerd import runtime
from tests.containerd.cgroups import Cgroups
from tests.containerd.runtime import Containerd
from tests.vm.adapters import EXTRA, MakePod, MakeVfs, Pf, find_pfs, ip, run

IN_THE_MACHINE = Path("/run/vmrun/command").is_file()
"""hack/vm mounts this file. Anywhere else these tests would take somebody's adapters apart."""

collect_ignore_glob = [] if IN_THE_MACHINE else ["test_*.py"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say that these tests were left out, where they were."""
    if not IN_THE_MACHINE:
        terminalreporter.write_line("tests/vm was left out: it runs in the virtual machine only (make vm)")


@pytest.fixture(scope="session")
def pfs() -> tuple[Pf, ...]:
    """The machine's two adapters, in the order of their interfaces' names, up."""
    found = find_pfs()
    assert len(found) == 2
    for pf in found:
        ip("link", "set", pf.netdev, "up")
    return found


@pytest.fixture(scope="module")
def vfs(pfs: tuple[Pf, ...]) -> Iterator[MakeVfs]:
    """Make so many VFs on a PF and return their addresses. The module's last test leaves none."""

    def make(pf: Pf, count: int) -> tuple[str, ...]:
        if len(pf.vfs()) != count:
            pf.set_vfs(0)
            pf.set_vfs(count)
        return pf.vfs()

    yield make
    for pf in pfs:
        pf.set_vfs(0)


@pytest.fixture
def netns() -> Iterator[MakePod]:
    """Make a named network namespace and return its name; it is removed at the end."""
    made: list[str] = []
    numbers = itertools.count()

    def make() -> str:
        name = f"pod{next(numbers)}"
        ip("netns", "add", name)
        made.append(name)
        return name

    yield make
    for name in made:
        if Path("/run/netns", name).exists():
            ip("netns", "delete", name)


@pytest.fixture
def containerd() -> Iterator[Containerd]:
    """A containerd that runs, with its images; its network and plugins are the test's business."""
    unpacked = runtime.unpacked("forky")
    if not unpacked.exists():
        pytest.skip("no containerd of Debian's forky: hack/fetch-containerd fetches it")
    run("modprobe", "veth")
    with tempfile.TemporaryDirectory(prefix="nf-") as folder:
        made = Containerd(Path(folder), unpacked, Cgroups(Path(folder).name), {})
        with closing(made):
            made.write_config()
            made.start()
            made.import_images()
            yield made


@contextmanager
def soft_roce() -> Iterator[Callable[[str, str], None]]:
    """Yield what puts a soft RoCE device, by its name, on an interface; it is removed at the end."""
    made: list[str] = []

    def make(name: str, netdev: str) -> None:
        run("rdma", "link", "add", name, "type", "rxe", "netdev", netdev)
        made.append(name)

    yield make
    for name in made:
        if Path("/sys/class/infiniband", name).exists():
            run("rdma", "link", "delete", name)


@pytest.fixture
def rxe() -> Iterator[Callable[[str], str]]:
    """Put a soft RoCE device on an interface and return its name."""
    numbers = itertools.count()
    with soft_roce() as make_named:

        def make(netdev: str) -> str:
            make_named(name := f"rxe{next(numbers)}", netdev)
            return name

        yield make


@pytest.fixture
def changed_rxe() -> Iterator[Callable[[str, str], None]]:
    """Put the changed soft RoCE of hack/vm/extra-modules, under a name, on an interface."""
    if not (EXTRA / "rdma_rxe.ko").exists():
        pytest.skip("the changed rdma_rxe of hack/vm/extra-modules is not there")
    run("rmmod", "rdma_rxe")  # not modprobe, which would remove what it needs too
    run("insmod", str(EXTRA / "rdma_rxe.ko"))
    with soft_roce() as make:
        yield make
    run("rmmod", "rdma_rxe")
    run("modprobe", "rdma_rxe")
