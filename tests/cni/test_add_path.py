"""How much code of ours one ADD passes: what a reader has to know to follow it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from types import CodeType, FrameType

from prometheus_client import CollectorRegistry

from agent.config import Config, HealthSettings, Resource
from agent.health_history import HealthHistory
from agent.inventory import Inventory
from agent.kubelet.podresources import ContainerDevices, DeviceAssignment, PodDevices, PodResources
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.offer.units import plain_offer
from agent.process.conditions import Conditions
from agent.report.events import Events
from agent.report.metrics import Metrics
from agent.report.report import Report
from agent.state import Latest
from agent.wiring import Parts
from cni.call import Node
from cni.protocol import Answer, Request
from hack.sim.machine import SimulatedMachine
from tests import frames
from tests.cni import tiny_node
from tests.cni.networks import network
from tests.cni.tiny_node import vf
from tests.node import granted, open_books
from tests.waiting import until

ROOT = Path(__file__).parents[2]
OURS = tuple(str(ROOT / name) + "/" for name in ("agent", "cni", "deviceplugin", "proto"))
MOST = 26
"""Beside the node's stand-in: the server, what the call names, the mode, the ledger, netlink, and the values of all."""
MOST_CALLS, DEEPEST = 400, 15
STAND_IN = str(ROOT / "hack/sim") + "/"


def is_ours(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(OURS) and not file.startswith(STAND_IN)


class Passed:
    """Notes the functions of ours that run on threads that serve CNI."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what ran until now."""
        self.modules = set[str]()
        self.functions = set[CodeType]()
        self.calls = self.depth = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and is_ours(frame) and threading.current_thread().name == "cni":
            file = frame.f_code.co_filename
            self.modules.add(file.removeprefix(f"{ROOT}/").removesuffix(".py").replace("/", "."))
            self.functions.add(frame.f_code)
            self.calls += 1
            self.depth = max(self.depth, sum(is_ours(caller) for caller, _ in traceback.walk_stack(frame)))

    def __str__(self) -> str:
        modules, functions = len(self.modules), len(self.functions)
        return f"{modules} modules, {functions} functions, {self.calls} calls, {self.depth} deep"


class Kubelet(PodResources):
    """Has given the first VF to every pod."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"))

    async def get(self, pod: PodRef) -> PodDevices | None:
        return PodDevices(pod, (ContainerDevices("main", (DeviceAssignment("rdma/vf", (vf(0),)),)),))


@contextlib.asynccontextmanager
async def parts_of(folder: Path, run_dir: Path) -> AsyncIterator[tuple[Parts, Ledger]]:
    """Put the agent's parts together on a node with VFs, of which kubelet has granted the first."""
    resource = Resource("rdma/vf", "vf", network="rails")
    config = Config(
        resources=(resource,),
        networks=(network({"name": "rails", "vlan": 7}),),
        kubelet_dir=folder,
        state_dir=folder,
        run_dir=run_dir,
        cdi_dir=folder,
    )
    async with contextlib.AsyncExitStack() as stack:
        host = SimulatedMachine.open(folder)
        stack.callback(host.close)
        inventory = Inventory(host, 60.0)
        await inventory.scan_now()
        snapshot = inventory.snapshot.value
        books = stack.enter_context(open_books(folder, boot_id=snapshot.boot_id))
        books.grant(granted("rdma/vf", {vf(0): vf(0)}))
        report = Report(Metrics(CollectorRegistry()), Conditions(), Events(), HealthHistory(HealthSettings()))
        node = Node(host, books, inventory.snapshot, report, report.metrics.observe_steps)
        offer = Latest(plain_offer(config.resources, snapshot))
        parts = Parts(Latest(config), node, offer, Kubelet(), report)
        stack.callback(parts.attachments.close)
        yield parts, books


def call(path: Path, command: str, container_id: str, pod: Path) -> Answer:
    """Chain a call after the pod's network, as a relay does."""
    env = {
        "CNI_COMMAND": command,
        "CNI_CONTAINERID": container_id,
        "CNI_IFNAME": "eth0",
        "CNI_NETNS": str(pod),
        "CNI_ARGS": f"K8S_POD_NAMESPACE=default;K8S_POD_NAME=pod-of-{container_id};K8S_POD_UID=uid-of-{container_id}",
        "CNI_PATH": "/opt/cni/bin",
    }
    before = {"cniVersion": "1.1.0", "interfaces": [{"name": "eth0"}]}
    conf = {"cniVersion": "1.1.0", "name": "cluster", "type": "nodefabric", "prevResult": before}
    with socket.socket(socket.AF_UNIX) as connection, pod.open() as netns:
        connection.connect(str(path))
        frame = frames.encode_request(Request(env, json.dumps(conf).encode()))
        socket.send_fds(connection, [frame], [netns.fileno()])
        received = b""
        while more := connection.recv(1 << 16):
            received += more
    return frames.decode_answer(received)


def test_an_add_passes_few_modules(own_network: None, tmp_path: Path, short_folder: Path) -> None:
    tiny_node.create(tmp_path)
    passed = Passed()
    path, pod = short_folder / "cni.sock", tiny_node.make_pod(tmp_path / "pod.netns")

    def calls(parts: Parts, books: Ledger) -> Answer:
        """Make two pods' sandboxes: the first ADD of an agent fills caches, which is not what the others pass."""
        call(path, "ADD", "c1", pod)
        call(path, "DEL", "c1", pod)
        until(lambda: not books.attachments())
        passed.begin()
        writes: list[None] = []
        books.subscribe(lambda: writes.append(None))
        answer = call(path, "ADD", "c2", pod)
        assert len(writes) == 2, "one before the hardware is touched, one after"
        hold = books.hold(vf(0))
        assert hold is not None
        assert hold.pod == PodRef("default", "pod-of-c2", "uid-of-c2")
        return answer

    async def scenario() -> Answer:
        async with parts_of(tmp_path, short_folder) as (parts, books):
            threading.setprofile(passed)
            try:
                parts.server.start()
                return await asyncio.to_thread(calls, parts, books)
            finally:
                threading.setprofile(None)
                parts.server.close()

    answer = asyncio.run(scenario())
    assert answer.exit == 0, answer.stdout
    assert [i["name"] for i in json.loads(answer.stdout)["interfaces"]] == ["eth0", "net1"]
    print(f"\none ADD passes {passed}", *sorted(passed.modules), sep="\n")  # for hack/measure-house, and `pytest -s`
    assert len(passed.modules) <= MOST, sorted(passed.modules)
    assert passed.calls <= MOST_CALLS
    assert passed.depth <= DEEPEST
