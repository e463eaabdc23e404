"""A kubelet stand-in: admits pods, keeps the device books, runs sandboxes. Speaks the real protocols.

    python -m agent.sim.kubelet --dir D --manifests M --status S --netns-dir N --conflist F --cni-path P

serves D/device-plugins/kubelet.sock and D/pod-resources/kubelet.sock, runs the pods of M's YAML
files, and writes S/node.json and S/<namespace>_<pod>.json. SIGUSR1 restarts it as a kubelet would:
all sockets of the plugin folder are wiped, kubelet.sock is made anew, the checkpoint is read back.
Pods outlive that, and are torn down when the process ends by SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import signal
import stat
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio

from agent.sim.devices import CHECKPOINT, AdmissionFailed, DeviceManager
from agent.sim.plugins import CHANNEL_OPTIONS, Registry
from agent.sim.pod_status import Pod, describe, timed, write_json
from agent.sim.podresources import ActivePod, PodResourcesService
from agent.sim.pods import PodSpec, read_folder
from agent.sim.runtime import CniFailed, CniRunner, Sandbox, make_netns, remove_netns
from proto.deviceplugin.v1beta1 import api_pb2_grpc
from proto.podresources.v1 import api_pb2_grpc as podresources_grpc

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. A real runtime retries a sandbox after 12 to 13 s, and repeats DEL after 4 to 8 s."""

    poll: float = 0.2
    sandbox_retry: float = 1.0
    later_delete: float = 0.3


DEFAULT_TIMING = Timing()


class Kubelet:
    """The stand-in inside a process. `start`, then `close`; pods by `create` and `delete` or by a folder."""

    def __init__(
        self,
        folder: Path,
        *,
        netns_dir: Path,
        runner: CniRunner | None = None,
        status_dir: Path | None = None,
        manifests: Path | None = None,
        seed: int | None = None,
        timing: Timing = DEFAULT_TIMING,
        has_get: bool = True,
    ) -> None:
        self.plugin_folder = folder / "device-plugins"
        self.podresources_folder = folder / "pod-resources"
        self.pods: dict[str, Pod] = {}
        """By namespace/name."""
        self._netns_dir = netns_dir
        self._runner = runner
        self._status_dir = status_dir
        self._manifests = manifests
        self._timing = timing
        self._has_get = has_get
        self._rng = random.Random(seed)  # noqa: S311 -- reproducible order, not secrecy
        self._admission = asyncio.Lock()
        self._threads = ThreadPoolExecutor(16, thread_name_prefix="runtime")
        self._lives: dict[str, asyncio.Task[None]] = {}
        """By pod UID; a pod's last DELs may fall into the life of another pod of its name."""
        self._problems: tuple[str, ...] = ()
        for path in (self.plugin_folder, self.podresources_folder, netns_dir, status_dir):
            if path is not None:
                path.mkdir(parents=True, exist_ok=True)
        self._open_books()

    # ------------------------------------------------------------------ serving

    async def start(self) -> None:
        """Wipe the plugin folder's sockets and serve."""
        self._open_books()
        for path in self.plugin_folder.iterdir():
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()
        self._registration = await _serve(
            self.plugin_folder / "kubelet.sock",
            lambda server: api_pb2_grpc.add_RegistrationServicer_to_server(self.registry, server),
        )
        service = PodResourcesService(self.devices, self._active_pods, self._has_get)
        self._podresources = await _serve(
            self.podresources_folder / "kubelet.sock",
            lambda server: podresources_grpc.add_PodResourcesListerServicer_to_server(service, server),
        )
        self._write_node()

    async def stop(self) -> None:
        """Die as a kubelet dies: connections end, pods and sockets stay."""
        await self.registry.close()
        await self._registration.stop(None)
        await self._podresources.stop(None)

    async def restart(self) -> None:
        """Stop and start. Nothing is known of any plugin until it registers again."""
        await self.stop()
        await self.start()

    async def close(self) -> None:
        """End all pods, then stop."""
        for key in list(self.pods):
            self.delete(key)
        await asyncio.gather(*self._lives.values())
        await self.stop()
        self._threads.shutdown()

    def _open_books(self) -> None:
        self.devices = DeviceManager(
            self.plugin_folder / CHECKPOINT, self._rng, lambda: {p.uid for p in self._active_pods()}
        )
        self.registry = Registry(self.plugin_folder, self.devices, self._write_node)

    # --------------------------------------------------------------------- pods

    def create(self, spec: PodSpec) -> Pod:
        """Begin a pod's life."""
        if spec.key in self.pods:
            raise ValueError(f"pod {spec.key} exists")
        pod = Pod(str(uuid.UUID(int=self._rng.getrandbits(128), version=4)), spec)
        self.pods[spec.key] = pod
        life = asyncio.get_running_loop().create_task(self._live(pod), name=f"pod {spec.key}")
        self._lives[pod.uid] = life
        life.add_done_callback(lambda _: self._lives.pop(pod.uid))
        self._write_pod(pod)
        return pod

    def delete(self, key: str) -> asyncio.Task[None]:
        """Begin a pod's end. The task ends after its last DEL."""
        pod = self.pods[key]
        pod.ending.set()
        return self._lives[pod.uid]

    async def run(self) -> None:
        """Follow the folder of manifests until cancelled."""
        assert self._manifests is not None
        while True:
            wanted, problems = await self._blocking(read_folder, self._manifests)
            if problems != self._problems:
                for problem in problems:
                    log.error("%s", problem)
                self._problems = problems
            by_key = {spec.key: spec for spec in wanted}
            for key, pod in list(self.pods.items()):
                if by_key.get(key) != pod.spec:
                    self.delete(key)
            for spec in wanted:
                if spec.key not in self.pods:
                    self.create(spec)
            await asyncio.sleep(self._timing.poll)

    async def _live(self, pod: Pod) -> None:
        try:
            await self._admit(pod)
            if pod.phase != "Failed" and not pod.spec.host_network and self._runner is not None:
                await self._make_sandbox(pod, self._runner)
            if pod.phase == "Pending" and not pod.ending.is_set():
                await self._start_containers(pod)
                pod.phase = "Running"
            self._write_pod(pod)
            await pod.ending.wait()
            await self._end(pod)
        finally:
            self._forget(pod)

    async def _admit(self, pod: Pod) -> None:
        """Admission is one pod at a time; whoever waits for a plugin holds up the node."""
        async with self._admission:
            with timed(pod, "admission"):
                try:
                    await self.devices.admit(pod.uid, pod.spec.init_containers, pod.spec.containers)
                except AdmissionFailed as error:
                    pod.phase, pod.reason = "Failed", "UnexpectedAdmissionError"
                    pod.message = f"Allocate failed due to {error}, which is unexpected"
                    pod.active = False

    async def _make_sandbox(self, pod: Pod, runner: CniRunner) -> None:
        """Try until it works: a failed sandbox is cleaned up, the next one has new names."""
        while not pod.ending.is_set():
            pod.attempts += 1
            sandbox = self._new_sandbox(pod)
            try:
                await self._blocking(make_netns, sandbox.netns)
                with timed(pod, "add"):
                    result = await self._blocking(runner.add, sandbox)
            except (CniFailed, OSError) as error:
                pod.message = f"failed to set up sandbox: {error}"
                log.warning("pod %s: %s", pod.spec.key, pod.message)
                await self._delete_sandbox(pod, runner, sandbox, str(sandbox.netns), None)
                await self._blocking(remove_netns, sandbox.netns)
                self._write_pod(pod)
                await _either(pod.ending, self._timing.sandbox_retry)
                continue
            pod.sandbox, pod.result, pod.message = sandbox, result, ""
            return

    async def _start_containers(self, pod: Pod) -> None:
        for container in (*pod.spec.init_containers, *pod.spec.containers):
            held = self.devices.of_container(pod.uid, container.name)
            for item in self._rng.sample(held, len(held)):
                client = self.registry.client(item.resource_name)
                if client is not None:
                    await client.pre_start(item.ids)

    async def _end(self, pod: Pod) -> None:
        """One DEL with the namespace; later two more without it, when the devices may be another pod's."""
        sandbox, runner = pod.sandbox, self._runner
        if sandbox is not None and runner is not None:
            while not await self._delete_sandbox(pod, runner, sandbox, str(sandbox.netns), pod.result):
                self._write_pod(pod)
                await asyncio.sleep(self._timing.sandbox_retry)
            await self._blocking(remove_netns, sandbox.netns)
        pod.active = False
        del self.pods[pod.spec.key]
        if sandbox is not None and runner is not None:
            for _ in range(2):
                await asyncio.sleep(self._timing.later_delete)
                await self._delete_sandbox(pod, runner, sandbox, "", None)

    async def _delete_sandbox(
        self, pod: Pod, runner: CniRunner, sandbox: Sandbox, netns: str, result: Mapping[str, Any] | None
    ) -> bool:
        pod.deletes += 1
        try:
            with timed(pod, "delete" if netns else "later_delete"):
                await self._blocking(runner.delete, sandbox, netns, result)
        except CniFailed as error:
            pod.message = f"failed to clean up sandbox: {error}"
            log.warning("pod %s: %s", pod.spec.key, pod.message)
            return False
        return True

    def _new_sandbox(self, pod: Pod) -> Sandbox:
        return Sandbox(
            container_id=f"{self._rng.getrandbits(256):064x}",
            netns=self._netns_dir / f"cni-{uuid.UUID(int=self._rng.getrandbits(128), version=4)}",
            namespace=pod.spec.namespace,
            name=pod.spec.name,
            uid=pod.uid,
            annotations=pod.spec.annotations,
        )

    async def _blocking(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    # ------------------------------------------------------------------- status

    def describe(self, pod: Pod) -> dict[str, Any]:
        """Tell all about a pod, ready for JSON."""
        return describe(pod, self.devices)

    def _active_pods(self) -> list[ActivePod]:
        return [ActivePod(p.uid, p.spec) for p in self.pods.values() if p.active]

    def _write_node(self) -> None:
        if self._status_dir is not None:
            document = {"capacity": self.devices.capacity(), "allocatable": self.devices.allocatable()}
            write_json(self._status_dir / "node.json", document)

    def _write_pod(self, pod: Pod) -> None:
        if self._status_dir is not None:
            write_json(self._status_path(pod), self.describe(pod))

    def _forget(self, pod: Pod) -> None:
        if self._status_dir is not None and pod.spec.key not in self.pods:
            self._status_path(pod).unlink(missing_ok=True)

    def _status_path(self, pod: Pod) -> Path:
        assert self._status_dir is not None
        return self._status_dir / f"{pod.spec.namespace}_{pod.spec.name}.json"


async def _either(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


async def _serve(socket: Path, add: Callable[[grpc.aio.Server], None]) -> grpc.aio.Server:
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    add(server)
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    return server


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m agent.sim.kubelet", description="A kubelet stand-in.")
    parser.add_argument("--dir", type=Path, required=True, help="kubelet's folder (/var/lib/kubelet of a real one)")
    parser.add_argument("--manifests", type=Path, required=True, help="folder of pod manifests to run")
    parser.add_argument("--status", type=Path, required=True, help="folder for node.json and one file per pod")
    parser.add_argument("--netns-dir", type=Path, required=True, help="folder to pin pods' network namespaces in")
    parser.add_argument("--conflist", type=Path, help="CNI configuration list; without it pods have no network")
    parser.add_argument("--cni-path", default="", help="folders of CNI plugins, separated by colons")
    parser.add_argument("--seed", type=int, help="for the order of things that have none")
    parser.add_argument(
        "--later-delete", type=float, default=DEFAULT_TIMING.later_delete, help="seconds to a repeated DEL"
    )
    parser.add_argument(
        "--sandbox-retry", type=float, default=DEFAULT_TIMING.sandbox_retry, help="seconds to a new try"
    )
    return parser.parse_args(argv)


async def serve(arguments: argparse.Namespace) -> None:
    """Run until SIGTERM or SIGINT."""
    runner = None
    if arguments.conflist is not None:
        runner = CniRunner(arguments.conflist, [Path(p) for p in arguments.cni_path.split(":") if p])
    arguments.manifests.mkdir(parents=True, exist_ok=True)
    kubelet = Kubelet(
        arguments.dir,
        netns_dir=arguments.netns_dir,
        runner=runner,
        status_dir=arguments.status,
        manifests=arguments.manifests,
        seed=arguments.seed,
        timing=Timing(sandbox_retry=arguments.sandbox_retry, later_delete=arguments.later_delete),
    )
    loop = asyncio.get_running_loop()
    stopping, restarting = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    loop.add_signal_handler(signal.SIGUSR1, restarting.set)
    await kubelet.start()
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(kubelet.run())
        while not stopping.is_set():
            await _either(stopping, 0.1)
            if restarting.is_set():
                restarting.clear()
                await kubelet.restart()
        following.cancel()
    await kubelet.close()


def main(argv: Sequence[str]) -> int:
    """Run the stand-in as a process."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="kubelet: %(levelname)s %(message)s")
    asyncio.run(serve(_arguments(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
