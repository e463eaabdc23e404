"""A stage for each test: agent and kubelet stand-in as processes on a simulated node."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.sim.stage import Stage

RELAY = Path(__file__).parents[2] / "build/shim/native/nodefabric-cni"


@pytest.fixture
def stage(own_network: None, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A stage with nothing started on it yet. Its logs are shown if the test fails."""
    # Not tmp_path: a socket's path may have 107 characters only.
    with tempfile.TemporaryDirectory(prefix="nf-") as folder:
        made = Stage(Path(folder), RELAY)
        failed_before = request.session.testsfailed
        try:
            yield made
        finally:
            made.close()
            if request.session.testsfailed > failed_before:
                print(made.log_ends())


@pytest.fixture
def node(stage: Stage) -> Stage:
    """A stage that plays: the 8-GPU node, kubelet and agent, ready."""
    stage.play()
    return stage
