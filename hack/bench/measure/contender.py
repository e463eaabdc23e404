"""A CNI plugin in a host of its own: a network namespace with a simulated node's links in it.

Each of the plugins that are compared has such a host, made by the same code from the same node, so
that nobody's work disturbs the other's: link events of one namespace are not heard in another.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agent.hardware import netns as namespaces
from agent.hardware.host import LinkChange
from agent.hardware.netlink.rtnetlink import NetlinkSocket
from hack.sim.machine import SimulatedMachine
from hack.sim.runtime import make_netns, remove_netns
from hack.sim.stage import CNI_FOLDERS, Stage
from measure.program import Program, Run

IFNAME = "net1"
T = TypeVar("T")


class Host:
    """A network namespace, and threads in it: what a thread starts, opens or asks is there."""

    def __init__(self, *, fresh: bool, threads: int = 1) -> None:
        """Without `fresh` it is the namespace of this process."""
        with ThreadPoolExecutor(1) as once:
            self._netns = once.submit(_open_namespace, fresh).result()
        self._threads = ThreadPoolExecutor(threads, initializer=_enter, initargs=(self._netns,))

    def close(self) -> None:
        """End the threads, and with them a fresh namespace that nothing else holds."""
        self._threads.shutdown()
        os.close(self._netns)

    def do(self, work: Callable[[], T]) -> T:
        """Do something in the namespace. As many callers as there are threads do so at once."""
        return self._threads.submit(work).result()


@dataclass(frozen=True, slots=True)
class Played:
    """A version's agent, which runs on a stage in a host."""

    host: Host
    stage: Stage
    machine: SimulatedMachine


class Contender:
    """A plugin, its network configuration, and the VF that it brings into a pod and back."""

    def __init__(
        self,
        program: Program,
        host: Host,
        config: Mapping[str, Any],
        environment: Mapping[str, str],
        link: str,
        ifname: str = IFNAME,
    ) -> None:
        """`link` is the interface's name in the host, `ifname` that in the pod; `environment` goes over CNI's own."""
        self.name = program.path.name
        self.program = program
        self.host = host
        self.link = link
        self._ifname = ifname
        self._config = {"cniVersion": "1.0.0", "name": "bench", **config}
        self._environment = dict(environment)
        self._netns: Path | None = None
        self._result: dict[str, Any] = {}

    def make_pod(self, netns: Path) -> Path:
        """Make the pod's network namespace."""
        make_netns(netns)
        self.enter_pod(netns)
        return netns

    def enter_pod(self, netns: Path) -> None:
        """Have the interface come into a pod that is there."""
        self._netns = netns

    def end_pod(self) -> None:
        """End the pod's network namespace."""
        if self._netns is not None:
            remove_netns(self._netns)

    def add(self, container_id: str) -> Run:
        """Run ADD, and check what it answered and did."""
        run = self._run("ADD", container_id, self._config)
        self._result = json.loads(run.output)
        found = [(i["name"], i["sandbox"]) for i in self._result.get("interfaces", ())]
        if found != [(self._ifname, str(self._netns))]:
            raise RuntimeError(f"{self.name} ADD answered with interfaces {found}")
        if not self._in_pod() or self.in_host():
            raise RuntimeError(f"{self.name} ADD answered, but {self.link} is not in the pod as {self._ifname}")
        return run

    def delete(self, container_id: str) -> Run:
        """Run DEL. The VF may still be on its way back after it."""
        return self._run("DEL", container_id, {**self._config, "prevResult": self._result})

    def in_host(self) -> bool:
        """Tell whether the VF is in the host under its own name. Waits for no lock in the kernel (SIOCGIFINDEX)."""
        return self.host.do(lambda: _exists(self.link))

    def _in_pod(self) -> bool:
        with open(str(self._netns)) as netns:
            return namespaces.run_in(netns.fileno(), lambda: _exists(self._ifname))

    def _run(self, command: str, container_id: str, config: Mapping[str, Any]) -> Run:
        environment = {
            "PATH": os.defpath,
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": container_id,
            "CNI_NETNS": str(self._netns),
            "CNI_IFNAME": self._ifname,
            "CNI_PATH": ":".join(map(str, (self.program.path.parent, *CNI_FOLDERS))),
            **self._environment,
        }
        text = json.dumps(config).encode()
        run = self.host.do(lambda: self.program.run(environment, text))
        if run.status != 0:
            raise RuntimeError(f"{self.name} {command} failed: {run.output.decode(errors='replace')}")
        return run


class BareMove:
    """The move of a link into a pod's namespace with nothing around it, as one request to the kernel."""

    def __init__(self, host: Host, link: str, netns: Path) -> None:
        self._host = host
        self._link = link
        self._netns = netns

    def move(self, program: Program | None = None) -> float:
        """Move the link there and back, and return the milliseconds that the way there took.

        With `program` that begins with its start and ends with its end: what no plugin can do without, as what a
        start leaves to do for the kernel is what a move waits for.
        """
        return self._host.do(lambda: self._there_and_back(program))

    def _there_and_back(self, program: Program | None) -> float:
        with open("/proc/thread-self/ns/net") as home, open(self._netns) as pod:
            with NetlinkSocket() as links:
                index = _ifindex(links, self._link)
                began = time.perf_counter()
                with program.waiting({"CNI_COMMAND": "VERSION"}) if program is not None else nullcontext():
                    links.change(index, LinkChange(name="bare0", up=True), pod.fileno())
                taken = time.perf_counter() - began
            with NetlinkSocket(pod.fileno()) as links:
                links.change(_ifindex(links, "bare0"), LinkChange(name=self._link, up=False), home.fileno())
        return taken * 1000


def _ifindex(links: NetlinkSocket, name: str) -> int:
    found = links.find(name)
    if found is None:
        raise RuntimeError(f"there is no link {name}")
    return found.ifindex


def _exists(link: str) -> bool:
    try:
        socket.if_nametoindex(link)
    except OSError:
        return False
    return True


def _open_namespace(fresh: bool) -> int:
    """Open the calling thread's namespace. The thread is at its end: it stays in a fresh one."""
    if fresh:
        _check("unshare", ctypes.CDLL(None, use_errno=True).unshare(namespaces.CLONE_NEWNET))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _enter(netns: int) -> None:
    _check("setns", ctypes.CDLL(None, use_errno=True).setns(netns, namespaces.CLONE_NEWNET))


def _check(what: str, status: int) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
