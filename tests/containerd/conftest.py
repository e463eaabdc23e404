"""A node with a containerd of the test's own, from what hack/fetch-containerd keeps in the user's cache."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hack.sim.machine import SimulatedMachine
from hack.sim.stage import CONFIG, Stage
from tests import sandbox
from tests.containerd import machine, runtime
from tests.containerd.cgroups import Cgroups
from tests.containerd.node import Node, make_devices
from tests.containerd.runtime import Containerd

RELAY = Path(__file__).parents[2] / "build/shim/native/nodefabric-cni"
WHOLE_MACHINE = "4294967295"
"""How many users the first user namespace has; an ordinary user's tests run in one of their own."""
CNI_VERSIONS = {"trixie": "1.0.0", "forky": "1.1.0"}
"""The newest that the containerd of each suite speaks: 1.7 and 2.x."""


@pytest.fixture
def suite(request: pytest.FixtureRequest) -> str:
    """The Debian suite that containerd is from; parametrize it indirectly for another than the newest."""
    return str(getattr(request, "param", "forky"))


@pytest.fixture
def stage(own_network: None) -> Iterator[Stage]:
    """A stage with a /run and a /dev of its own."""
    if WHOLE_MACHINE not in Path("/proc/self/uid_map").read_text():
        pytest.skip("containerd runs no pods without the machine's root")
    with sandbox.mounts(), tempfile.TemporaryDirectory(prefix="nf-") as folder:
        place = Path(folder)
        with machine.covered(place), closing(Stage(place, RELAY)) as made:
            yield made


@pytest.fixture
def snapshotter() -> str:
    """How containerd keeps files of images; a module may have another."""
    return Containerd.snapshotter


@pytest.fixture
def containerd(stage: Stage, suite: str, snapshotter: str) -> Iterator[Containerd]:
    """A containerd that runs, with its images."""
    unpacked = runtime.unpacked(suite)
    if not unpacked.exists():
        pytest.skip(f"no containerd of Debian's {suite}: hack/fetch-containerd fetches it")
    cgroups = Cgroups(stage.folder.name)
    if reason := cgroups.missing():
        pytest.skip(reason)
    folder = stage.folder / "containerd"
    folder.mkdir()
    made = Containerd(folder, unpacked, cgroups, stage.relay_environment)
    made.snapshotter = snapshotter
    with closing(made):
        made.write_config()
        made.start()
        made.import_images()
        yield made


@pytest.fixture
def runtime_only(
    stage: Stage, containerd: Containerd, suite: str, request: pytest.FixtureRequest
) -> Iterator[tuple[Node, SimulatedMachine]]:
    """The 8-GPU node with a runtime, and neither kubelet nor agent yet. Its logs are shown if the test fails."""
    failed_before = request.session.testsfailed
    simulated = stage.build_node("h100-8gpu")
    make_devices(simulated.scan(), simulated.root)
    made = Node(stage, containerd)
    made.configure(CONFIG)
    made.install(CNI_VERSIONS[suite])
    try:
        yield made, simulated
    finally:
        if request.session.testsfailed > failed_before:
            print(stage.log_ends(), "--- the end of containerd.log", containerd.log_end(), sep="\n")


@pytest.fixture
def bare(runtime_only: tuple[Node, SimulatedMachine]) -> tuple[Node, SimulatedMachine]:
    """The node with kubelet and runtime, and no agent yet."""
    runtime_only[0].start_kubelet()
    return runtime_only


@pytest.fixture
def node(bare: tuple[Node, SimulatedMachine]) -> Node:
    """The node with an agent that is ready."""
    made, _ = bare
    made.start_agent()
    return made


@pytest.fixture
def hardware(bare: tuple[Node, SimulatedMachine]) -> SimulatedMachine:
    """The node's hardware."""
    return bare[1]
