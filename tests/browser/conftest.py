"""One browser for all tests here, and nodes for it to look at. Both are in the test run's own network namespace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from agent.model.device import Snapshot
from tests.agent.conftest import node_root, node_snapshot
from tests.browser.chromium import program, started
from tests.browser.shown import ShownNode, showing, with_many_vfs

__all__ = ["node_root", "node_snapshot"]


def find_browser() -> str:
    """Name the browser's program, or skip the test that needs it."""
    found = program()
    if found is None:
        pytest.skip("the status page is looked at with no browser: install chromium (hack/setup --system)")
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser; each test opens pages of its own."""
    with started(find_browser()) as browser:
        yield browser


@pytest.fixture
def node(node_snapshot: Callable[[str], Snapshot], tmp_path: Path) -> Iterator[ShownNode]:
    """The 8-GPU node, idle."""
    with showing(node_snapshot("h100-8gpu"), tmp_path) as shown:
        yield shown


@pytest.fixture
def big_node(node_snapshot: Callable[[str], Snapshot], tmp_path: Path) -> Iterator[ShownNode]:
    """8 GPUs, 8 adapters with 128 VFs each, and two ports without VFs."""
    with showing(with_many_vfs(node_snapshot("h100-8gpu"), 128), tmp_path) as shown:
        yield shown
