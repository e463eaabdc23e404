"""One browser for all tests here, and nodes for it to look at. Both are in the test run's own network namespace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent.hardware import recorded
from agent.hardware.adapter_ids import with_adapter_ids
from agent.hardware.sysfs.scan import scan
from agent.model.device import Snapshot
from tests.browser.chromium import Browser, program
from tests.browser.shown import ShownNode, showing, with_many_vfs


def find_browser() -> str:
    """Name the browser's program, or skip the test that needs it."""
    found = program()
    if found is None:
        pytest.skip("the status page is looked at with no browser: install chromium (hack/setup --system)")
    return found


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A browser; each test opens pages of its own."""
    with Browser.started(find_browser()) as started:
        yield started


@pytest.fixture(scope="session")
def snapshot_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Snapshot]:
    """Give the snapshot of a modelled node, GPUs included."""

    @functools.cache
    def snapshot(name: str) -> Snapshot:
        folder = tmp_path_factory.mktemp(name)
        node = recorded.load(recorded.find(name))
        recorded.unpack(node, folder)
        return replace(with_adapter_ids(scan(folder), folder), gpus=node.gpus, generation=1)

    return snapshot


@pytest.fixture
def node(snapshot_of: Callable[[str], Snapshot], tmp_path: Path) -> Iterator[ShownNode]:
    """The 8-GPU node, idle."""
    with showing(snapshot_of("h100-8gpu"), tmp_path) as shown:
        yield shown


@pytest.fixture
def big_node(snapshot_of: Callable[[str], Snapshot], tmp_path: Path) -> Iterator[ShownNode]:
    """8 GPUs, 8 adapters with 128 VFs each, and two ports without VFs."""
    with showing(with_many_vfs(snapshot_of("h100-8gpu"), 128), tmp_path) as shown:
        yield shown
