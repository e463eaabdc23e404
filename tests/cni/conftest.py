"""The relay in both builds (as installed, and with sanitizers), and a node with VFs to attach."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cni import tiny_node
from tests.cni.door import Door
from tests.cni.modes import rdma_node
from tests.cni.old_plugins import OldSriov
from tests.cni.relay import Relay
from tests.cni.tiny_node import Rig

ROOT = Path(__file__).parents[2]
SANITIZED = [
    *("gcc", "-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wconversion", "-Wshadow"),
    *("-fanalyzer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
]


@pytest.fixture(scope="session")
def relay_program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Build a relay, "static" or "sanitized", once."""
    built: dict[str, Path] = {}

    def build(kind: str) -> Path:
        if kind not in built:
            if kind == "static":
                subprocess.run([ROOT / "hack/build-shim", "native"], check=True)
                built[kind] = ROOT / "build/shim/native/nodefabric-cni"
            else:
                built[kind] = tmp_path_factory.mktemp("sanitized") / "nodefabric-cni"
                sources = sorted((ROOT / "cni/shim").glob("*.c"))
                subprocess.run([*SANITIZED, "-o", built[kind], *sources], check=True)
        return built[kind]

    return build


@pytest.fixture(params=["static", "sanitized"])
def relay(request: pytest.FixtureRequest, relay_program: Callable[[str], Path], short_folder: Path) -> Relay:
    """A relay with an empty folder of its own."""
    return Relay(relay_program(request.param), short_folder)


@pytest.fixture
def sanitized_relay(relay_program: Callable[[str], Path], short_folder: Path) -> Relay:
    """The relay that stops at any misuse of memory."""
    return Relay(relay_program("sanitized"), short_folder)


@pytest.fixture
def rig(own_network: None, tmp_path: Path) -> Iterator[Rig]:
    """A node of one PF and three VFs on real links, in a network namespace of the test's own."""
    with tiny_node.open_rig(tmp_path) as rig:
        yield rig


@pytest.fixture
def exclusive(own_network: None, tmp_path: Path) -> Iterator[Rig]:
    """The node with an RDMA device on each VF, in exclusive mode."""
    with rdma_node.opened(tmp_path) as rig:
        yield rig


@pytest.fixture
def infiniband(own_network: None, tmp_path: Path) -> Iterator[Rig]:
    """The same with InfiniBand ports."""
    with rdma_node.opened(tmp_path, ib=True) as rig:
        yield rig


@pytest.fixture
def old(rig: Rig) -> OldSriov:
    """The plugin of type sriov, which served the node before."""
    return OldSriov(rig)


@pytest.fixture
def door(short_folder: Path) -> Iterator[Door]:
    """Open a server."""
    made = Door(short_folder / "run/cni.sock")
    made.server.start()
    yield made
    made.server.close()
