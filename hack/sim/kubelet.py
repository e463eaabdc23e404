"""A kubelet stand-in: admits pods, keeps the device books, runs sandboxes. Speaks the real protocols.

    python -m hack.sim.kubelet --dir D --manifests M --status S --netns-dir N --conflist F --cni-path P

serves D/device-plugins/kubelet.sock and D/pod-resources/kubelet.sock, registers the DRA drivers of
D/plugins_registry if it has an API server, and runs the pods of M's YAML files: as the API server has
them, with their UID, and with the status that names their claims. It writes S/node.json and
S/<namespace>_<pod>.json. SIGUSR1 restarts it as a kubelet would: all sockets of the plugin folder are
wiped, kubelet.sock is made anew, the checkpoints are read back. Pods outlive that, and are torn down
when the process ends by SIGTERM. Source: Kubernetes 1.36, pkg/kubelet/cm/devicemanager/plugin/v1beta1/server.go
for the sockets, pkg/kubelet/nodestatus for what node.json counts; the files of S are the stand-in's own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import signal
import stat
import sys
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio

from hack.sim.devices import CHECKPOINT, DeviceManager
from hack.sim.dra.behaviour import SHORT, Behaviour
from hack.sim.dra.cluster import Cluster, HttpCluster
from hack.sim.dra.manager import DraManager
from hack.sim.plugins import CHANNEL_OPTIONS, Registry
from hack.sim.pod_life import DEFAULT_TIMING, Pod, PodLife, Timing, describe, either, write_json
from hack.sim.podresources import ActivePod, PodResourcesService
from hack.sim.pods import PodSpec, read_folder
from hack.sim.runtime import CniRunner
from proto.deviceplugin.v1beta1 import api_pb2_grpc
from proto.podresources.v1 import api_pb2_grpc as podresources_grpc

log = logging.getLogger(__name__)


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
        cluster: Cluster | None = None,
        behaviour: Behaviour = SHORT,
    ) -> None:
        """Pods may have claims if there is a cluster to read them from."""
        self.behaviour = behaviour
        self.dra: DraManager | None = None
        self.plugin_folder = folder / "device-plugins"
        self.podresources_folder = folder / "pod-resources"
        self.pods: dict[str, Pod] = {}
        """By namespace/name."""
        self.admission = asyncio.Lock()
        self.closing = False
        self._status_dir = status_dir
        self._manifests = manifests
        self._timing = timing
        self._has_get = has_get
        self._folder = folder
        self._cluster = cluster
        self._rng = random.Random(seed)
        self._threads = ThreadPoolExecutor(16, thread_name_prefix="runtime")
        self._life = PodLife(self, netns_dir, runner, timing, self._rng, self._threads)
        self._lives: dict[str, asyncio.Task[None]] = {}
        """By pod UID; a pod's last DELs may fall into the life of another pod of its name."""
        self._lost: set[asyncio.Task[None]] = set()
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
            with contextlib.suppress(FileNotFoundError):  # its plugin, too, removes a socket that kubelet has left
                if stat.S_ISSOCK(path.lstat().st_mode):
                    path.unlink()
        self._registration = await _serve(
            self.plugin_folder / "kubelet.sock",
            partial(api_pb2_grpc.add_RegistrationServicer_to_server, self.registry),
        )
        service = PodResourcesService(self.devices, self._active_pods, self._has_get, self.dra)
        self._podresources = await _serve(
            self.podresources_folder / "kubelet.sock",
            partial(podresources_grpc.add_PodResourcesListerServicer_to_server, service),
        )
        if self.dra is not None:
            await self.dra.start()
        self._write_node()

    async def stop(self) -> None:
        """Die as a kubelet dies: connections end, pods and sockets stay."""
        if self.dra is not None:
            await self.dra.close()
        await self.registry.close()
        await self._registration.stop(None)
        await self._podresources.stop(None)

    async def restart(self) -> None:
        """Stop and start. Nothing is known of any plugin until it registers again."""
        await self.stop()
        await self.start()

    async def close(self) -> None:
        """End all pods, then stop."""
        self.closing = True
        for pod in self.pods.values():
            pod.ending.set()  # one that failed may have ended by itself
        await asyncio.gather(*self._lives.values(), *self._lost)
        await self.stop()
        self._threads.shutdown()

    def _open_books(self) -> None:
        self.devices = DeviceManager(self.plugin_folder / CHECKPOINT, self._rng, self._active_uids)
        self.registry = Registry(self.plugin_folder, self.devices, self._write_node)
        if self._cluster is not None:
            self.dra = DraManager(
                self._folder, self._cluster, self._rng, self.behaviour, self._active_uids, self._health_changed
            )

    # --------------------------------------------------------------------- pods

    def create(self, spec: PodSpec) -> Pod:
        """Begin a pod's life."""
        if spec.key in self.pods:
            raise ValueError(f"pod {spec.key} exists")
        pod = Pod(spec.uid or str(uuid.UUID(int=self._rng.getrandbits(128), version=4)), spec)
        self.pods[spec.key] = pod
        life = asyncio.get_running_loop().create_task(self._life.live(pod), name=f"pod {spec.key}")
        self._lives[pod.uid] = life
        life.add_done_callback(partial(self._ended, pod))
        self.write(pod)
        return pod

    def delete(self, key: str) -> asyncio.Task[None]:
        """Begin a pod's end. The task ends after its last DEL."""
        pod = self.pods[key]
        pod.ending.set()
        return self._lives[pod.uid]

    def lose(self, key: str) -> asyncio.Task[None]:
        """Know nothing of a pod any more, as of one that was deleted by force while kubelet was away.

        Its claims and its sandbox are found and ended later, in any order. The task ends with the sandbox.
        """
        pod = self.pods.pop(key)
        pod.active = False
        self._lives[pod.uid].cancel()
        task = asyncio.get_running_loop().create_task(self._life.clean_up(pod), name=f"sandbox of the lost pod {key}")
        self._lost.add(task)
        task.add_done_callback(self._lost.discard)
        return task

    async def run(self) -> None:
        """Follow the folder of manifests until cancelled."""
        assert self._manifests is not None
        while True:
            wanted, problems = await asyncio.to_thread(read_folder, self._manifests)
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

    # ------------------------------------------------------------------- status

    def describe(self, pod: Pod) -> dict[str, Any]:
        """Tell all about a pod, ready for JSON."""
        return describe(pod, self.devices, self.dra)

    def _active_pods(self) -> list[ActivePod]:
        return [ActivePod(p.uid, p.spec) for p in self.pods.values() if p.active]

    def _active_uids(self) -> set[str]:
        return {pod.uid for pod in self.pods.values() if pod.active}

    def _write_node(self) -> None:
        if self._status_dir is not None:
            document = {"capacity": self.devices.capacity(), "allocatable": self.devices.allocatable()}
            write_json(self._status_dir / "node.json", document)

    def write(self, pod: Pod) -> None:
        """Show a pod's newest state."""
        if self._status_dir is not None:
            write_json(self._status_path(pod), self.describe(pod))

    def _health_changed(self, pod_uids: set[str]) -> None:
        for pod in self.pods.values():
            if pod.uid in pod_uids:
                self.write(pod)

    def forget(self, pod: Pod) -> None:
        """Drop a pod that needs its devices no more; another of its name may come."""
        del self.pods[pod.spec.key]

    def _ended(self, pod: Pod, _life: asyncio.Task[None]) -> None:
        del self._lives[pod.uid]
        if self._status_dir is not None and pod.spec.key not in self.pods:
            self._status_path(pod).unlink(missing_ok=True)

    def _status_path(self, pod: Pod) -> Path:
        assert self._status_dir is not None
        return self._status_dir / f"{pod.spec.namespace}_{pod.spec.name}.json"


async def _serve(socket: Path, add: Callable[[grpc.aio.Server], None]) -> grpc.aio.Server:
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    add(server)
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    return server


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hack.sim.kubelet", description="A kubelet stand-in.")
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
    parser.add_argument("--api-server", default="", help="URL to read claims from; without it pods can have none")
    parser.add_argument("--look", type=float, default=SHORT.look, help="seconds between two looks for DRA drivers")
    parser.add_argument("--node", default="node", help="name of the node, whose slices are wiped")
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
        cluster=HttpCluster(arguments.api_server, arguments.node) if arguments.api_server else None,
        behaviour=replace(SHORT, look=arguments.look),
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
            await either(stopping, 0.1)
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
