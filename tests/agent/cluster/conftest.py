from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.cluster.apiserver import ApiServer
from hack.sim.cluster.apiserver import ApiServerStandIn


@pytest.fixture
def server() -> Iterator[ApiServerStandIn]:
    """An API server with the Node `n`."""
    with ApiServerStandIn(bookmark_seconds=0.05) as running:
        running.state.add_node("n")
        yield running


@pytest.fixture
def open_api(server: ApiServerStandIn, tmp_path: Path) -> Callable[[], ApiServer]:
    (tmp_path / "kubeconfig").write_text(server.kubeconfig())
    return lambda: ApiServer.from_kubeconfig(tmp_path / "kubeconfig")


@pytest.fixture
def api(open_api: Callable[[], ApiServer]) -> Iterator[ApiServer]:
    opened = open_api()
    yield opened
    opened.close()
