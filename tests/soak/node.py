"""A tiny node with a small agent that may be killed at any moment, and a runtime that calls the real relay."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cni.pods_file import path_of
from hack.sim.machine import SimulatedMachine
from tests import sandbox
from tests.cni import tiny_node
from tests.soak import observe
from tests.soak.agent import Agent
from tests.soak.calls import Answer, Call, Pod, names, promised, start
from tests.soak.configured import SPECS, ipam
from tests.soak.invariants import violations
from tests.soak.kubelet import FILE, Cluster
from tests.soak.node_claims import NodeClaims
from tests.soak.small_agent import SOCKET, Options
from tests.soak.world import HOST, Expected, History, Promise, Settings, Shape, Violation, World
from tests.waiting import SECONDS, until

ROOT = Path(__file__).resolve().parents[2]
HOST_LOCAL = "/usr/lib/cni/host-local"
JOURNALLED = f"""\
#!/bin/sh
# The real host-local, with each call noted. A file `ipam-fails` or `ipam-hangs` makes it do so.
cd "$(dirname "$0")/.." || exit 1
echo "$CNI_COMMAND $CNI_CONTAINERID $CNI_IFNAME" >> ipam-calls
if [ -e ipam-hangs ]; then exec sleep 60; fi
if [ -e "ipam-fails-$CNI_COMMAND" ]; then
    echo '{{"cniVersion": "1.0.0", "code": 999, "msg": "told to fail"}}'
    exit 1
fi
exec {HOST_LOCAL}
"""
REST_SECONDS = 30.0
RECONCILE_SECONDS = 0.5
KERNEL_SECONDS = 30.0
"""How long the kernel may take to end a namespace, which it does when it finds time."""


@dataclass
class Node:
    """The hardware, the agent if one runs, and all that the runtime has been told."""

    folder: Path
    vfs: int = 3
    history: History = field(default_factory=History)
    promises: dict[tuple[str, str], tuple[Promise, ...]] = field(default_factory=dict)
    results: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Container → the CNI result that a runtime keeps for CHECK."""
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """Devices that kubelet gave to a pod, and its container, whose chained ADD succeeded without them."""
    unplugged: set[str] = field(default_factory=set)
    void: set[str] = field(default_factory=set)
    boot: int = 1
    agent: Agent | None = None
    _pods: int = 0

    def __post_init__(self) -> None:
        # Of its own: the links of a node that was closed are gone only after a while.
        self.claims = NodeClaims(self.folder, lambda: self.history)
        self._network = sandbox.network()
        self._network.__enter__()
        tiny_node.create(self.folder, self.vfs)
        for name in ("bin", "state", "spool", "pods"):
            (self.folder / name).mkdir(exist_ok=True)
        plugin = self.folder / "bin/journalled"
        plugin.write_text(JOURNALLED)
        plugin.chmod(0o755)
        self.machine = SimulatedMachine.open(self.folder)
        self.devices = tuple(tiny_node.vf(i) for i in range(self.vfs))
        self._order = list(self.devices)
        """By their numbers at the PF."""
        found = observe.links({})
        self.shapes: dict[str, Shape] = {device: found[device][0].shape for device in self.devices}
        self.settings = {device: self._settings(device) for device in self.devices}
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self._zygote = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.zygote", str(its.fileno())],
                cwd=ROOT,
                pass_fds=[its.fileno()],
            )
        self._requests = mine

    def close(self) -> None:
        """End everything."""
        self.kill_agent()
        self._requests.close()
        self._zygote.wait(SECONDS)
        for pod in observe.namespaces(self.folder / "pods"):
            self._unpin(Path(pod))
        self.machine.close()
        SimulatedMachine.destroy(self.folder)
        self._network.__exit__(None, None, None)
        shutil.rmtree(self.folder)

    # -------------------------------------------------------------------- agent

    def start_agent(self, die_at: int | None = None, note_points: bool = False, watched: bool = True) -> Agent:
        """Start an agent: it heals, then serves. It may die of it. One that still runs is killed first."""
        self.kill_agent()
        options = Options(str(self.folder), die_at=die_at, note_points=note_points, watched=watched)
        self.agent = Agent(self._requests, options, self.folder / "agent.log")
        end = f", killed at {self.agent.place_of_death}" if not self.agent.lives else ""
        self.history.note(f"an agent starts (boot {self.boot}){end}")
        self.claims.damaged = self.claims.damaged and not self.agent.lives
        return self.agent

    def kill_agent(self) -> None:
        """SIGKILL the agent, if one runs."""
        if self.agent is not None and self.agent.lives:
            self.agent.kill()
            self.history.note("the agent is killed")

    def running(self) -> Agent:
        """Return the agent, started if need be."""
        if self.agent is None or not self.agent.lives:
            self.start_agent()
        assert self.agent is not None
        return self.agent

    def reconcile(self) -> None:
        """Have the agent reconcile, as it does each minute."""
        self.running().order("reconcile")
        self.history.note("the agent reconciles")

    # --------------------------------------------------------------------- pods

    def make_pod(self) -> Pod:
        """Make a sandbox."""
        self._pods += 1
        container_id = f"c{self._pods}"
        path = self.folder / "pods" / f"{container_id}.netns"
        path.touch()
        subprocess.run(["unshare", f"--net={path}", "true"], check=True)
        pod = Pod(container_id, path, path.stat().st_ino)
        self.history.note(f"pod {container_id} begins, namespace {pod.inode}", container_id)
        return pod

    def end_pod(self, pod: Pod) -> None:
        """Take a sandbox's namespace away, as a runtime does; with what is inside. Nothing promised holds then."""
        self._unpin(pod.netns)
        for key in [key for key in self.promises if key[0] == pod.container_id]:
            del self.promises[key]
        self.history.note(f"the namespace of {pod.container_id} ends")

    def _unpin(self, path: Path) -> None:
        subprocess.run(["umount", "--lazy", path], check=True)
        path.unlink()

    def tell_granted(self, held: Mapping[str, Sequence[str]]) -> None:
        """Set what kubelet says that pods hold."""
        replace(Cluster.read(self.folder), units=held).write(self.folder)

    # ---------------------------------------------------------------------- CNI

    def ipam(self, number: int = 9) -> dict[str, Any]:
        """Configure addresses, one of each family. Each network has a number of its own."""
        return ipam(self.folder, number)

    def call(self, command: str, pod: Pod | None, conf: Mapping[str, Any], ifname: str = "net1", **env: str) -> Call:
        """Start a relay. `env` may take the place of what the runtime says by itself."""
        return start(self.folder, command, pod, conf, ifname, env)

    def add(self, pod: Pod, conf: Mapping[str, Any], ifname: str = "net1") -> Answer:
        """Run a whole ADD."""
        return self.take_answer(self.call("ADD", pod, conf, ifname), pod, conf, ifname)

    def take_answer(self, call: Call, pod: Pod, conf: Mapping[str, Any], ifname: str = "net1") -> Answer:
        """Wait for an ADD's answer, and hold the node to it."""
        answer = call.finish()
        said = "succeeds" if answer.succeeded else f"fails: {answer.document.get('msg')}"
        promises = promised(answer, pod, conf, ifname) if answer.succeeded else ()
        self.history.note(f"ADD of {pod.container_id} {ifname} {said}", pod.container_id, *names(promises))
        if answer.succeeded and "prevResult" in conf:
            missing = {*Cluster.read(self.folder).units.get(pod.name, ())} - {p.device for p in promises}
            self.left_out += [(device, pod.container_id) for device in sorted(missing)]
            if len(promises) < self.claims.results_of(pod):
                self.left_out.append(("a device of its claims", pod.container_id))
        if promises:
            self.promises[pod.container_id, ifname] = promises
            self.results[pod.container_id] = answer.document
        return answer

    def delete(self, pod: Pod, conf: Mapping[str, Any], ifname: str = "net1", *, netns: bool = True) -> Answer:
        """Run a whole DEL. From now on nobody holds the node to what ADD promised."""
        return self.begin_delete(pod, conf, ifname, netns=netns).finish()

    def begin_delete(self, pod: Pod, conf: Mapping[str, Any], ifname: str = "net1", *, netns: bool = True) -> Call:
        """Start a relay with a DEL."""
        held = self.promises.pop((pod.container_id, ifname), ())
        self.history.note(f"DEL of {pod.container_id} {ifname}", pod.container_id, *names(held))
        return self.call("DEL", pod, conf, ifname, **({} if netns else {"CNI_NETNS": ""}))

    def collect(self, keep: Sequence[tuple[str, str]]) -> Call:
        """Start a relay with a GC that lists some attachments."""
        for key in [key for key in self.promises if key not in keep]:
            del self.promises[key]
        self.history.note(f"GC keeps {', '.join(map(' '.join, keep)) or 'nothing'}")
        kept = [{"containerID": c, "ifname": i} for c, i in keep]
        return self.call("GC", None, {"cni.dev/valid-attachments": kept, "ipam": self.ipam()})

    # ----------------------------------------------------------------- hardware

    def reboot(self, *, renumbers: bool = False) -> None:
        """Lose power: processes, namespaces, interfaces and settings are gone, files are there.

        It may come up with the first two VFs at each other's addresses.
        """
        self.history.note(f"the node reboots{', and renumbers its devices' if renumbers else ''}")
        self.kill_agent()
        self.end_orphans()
        for path in observe.namespaces(self.folder / "pods"):
            self._unpin(Path(path))
        for device, places in observe.links({}).items():
            if device in self.devices and places[0].shape != self.shapes[device]:
                subprocess.run(["ip", "link", "delete", places[0].shape.name], check=True)
        (self.folder / "vf-settings.json").unlink(missing_ok=True)
        self.until(self._reborn)
        if renumbers:
            self._renumber()
        self.promises.clear()
        shutil.rmtree(self.folder / SPECS, ignore_errors=True)  # on a tmpfs
        self.claims.prepared.clear()
        self.claims.unlist_all()
        path_of(self.folder / SOCKET).unlink(missing_ok=True)  # of a folder that is empty then
        self.boot += 1
        (self.machine.root / "proc/sys/kernel/random/boot_id").write_text(f"boot-{self.boot}\n")

    def _renumber(self) -> None:
        self._order[:2] = reversed(self._order[:2])
        pf = self.machine.root / "sys/bus/pci/devices" / tiny_node.PF
        for index, device in enumerate(self._order[:2]):
            link = pf / f"virtfn{index}"
            link.unlink()
            link.symlink_to(f"../{device}")

    def _reborn(self) -> bool:
        """Give devices that are new to the kernel the names that they get at each boot. Tells whether all are there."""
        self.machine.scan()
        found = observe.links({})
        for device in self.devices:
            if device in self.unplugged:
                continue
            if not found.get(device):
                if observe.links(observe.namespaces(self.folder / "pods")).get(device):
                    continue
                return False
            shape, wanted = found[device][0].shape, self.shapes[device]
            if shape.name != wanted.name:
                subprocess.run(["ip", "link", "set", shape.name, "down", "name", wanted.name], check=True)
        return True

    def end_orphans(self) -> None:
        """End IPAM plugins that outlived their agent."""
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                ours = os.fsencode(f"CNI_PATH={self.folder}/bin") in path.read_bytes()  # others' may be no text
                if ours and (path.parent / "exe").readlink().name == "sleep":
                    os.kill(int(path.parent.name), signal.SIGKILL)

    until = staticmethod(until)

    def unplug(self, device: str) -> None:
        """Take a VF off the bus, with its interface, wherever that is."""
        self.history.note(f"{device} leaves the bus", device)
        self.unplugged.add(device)
        (self.machine.root / "sys/bus/pci/devices" / device).rename(self.folder / f"unplugged-{device}")
        for seen in observe.links(observe.namespaces(self.folder / "pods")).get(device, ()):
            enter = [] if seen.place == HOST else ["nsenter", f"--net={seen.place}"]
            subprocess.run([*enter, "ip", "link", "delete", seen.shape.name], check=True)
        self.void |= {device for held in self.promises.values() for p in held if (device := p.device) in self.unplugged}

    def plug(self, device: str) -> None:
        """Bring a VF back onto the bus: new, as hardware is, with the name that udev gives to whoever is there."""
        self.history.note(f"{device} is back on the bus", device)
        (self.folder / f"unplugged-{device}").rename(self.machine.root / "sys/bus/pci/devices" / device)
        self.unplugged.discard(device)
        settings = self.folder / "vf-settings.json"
        if settings.exists():
            document = json.loads(settings.read_text())
            document.pop(f"{tiny_node.PF_NETDEV}/{self._order.index(device)}", None)
            settings.write_text(json.dumps(document))
        self.until(self._reborn)

    def lose_books(self) -> None:
        """Lose the agent, and with it the books."""
        self.kill_agent()
        self.history.note("the books are lost")
        self.claims.damaged = True
        for file in (self.folder / "state").glob("ledger.db*"):
            file.unlink()

    def lose_specs(self) -> None:
        """Lose the agent, and with it all CDI specs."""
        self.kill_agent()
        self.history.note("the CDI specs are lost")
        self.claims.damaged = True
        self.claims.untold |= self.claims.prepared.keys()
        for path in (self.folder / SPECS).glob("*"):
            path.unlink()

    # -------------------------------------------------------------- observation

    def look(self) -> World:
        """Look at everything, once the kernel is done with namespaces that have ended."""
        deadline = time.monotonic() + KERNEL_SECONDS
        while True:
            world = self._look()
            complete = all(world.links[device] for device in self.devices if device not in self.unplugged)
            if complete or time.monotonic() > deadline:
                return world
            time.sleep(0.01)

    def _look(self) -> World:
        self.machine.scan()  # the kernel gives a VF back from a namespace that ended; links of the simulation need this
        pods = observe.namespaces(self.folder / "pods")
        books = observe.Books(self.folder / "state/ledger.db")  # before the links: a row goes when its VF is as it was
        found = observe.links(pods)
        return World(
            links={device: found.get(device, ()) for device in self.devices},
            settings={device: self._settings(device) for device in self.devices},
            pods=pods,
            leases=observe.leases(self.folder / "leases"),
            spool=observe.spool(self.folder / "spool"),
            specs=observe.specs(self.folder / SPECS),
            files=observe.claim_files(self.folder / SPECS),
            **vars(books),
        )

    def expected(self) -> Expected:
        """Say what must be."""
        return Expected(
            shapes=self.shapes,
            settings=self.settings,
            promises=tuple(p for held in self.promises.values() for p in held),
            unplugged=frozenset(self.unplugged),
            promises_void=frozenset(self.void),
            left_out=tuple(self.left_out),
            prepared=dict(self.claims.promised),
            unprepared=frozenset(self.claims.ended),
            damaged=self.claims.damaged,
            untold=frozenset(self.claims.untold),
            boot_id=f"boot-{self.boot}" if self.boot > 1 else "boot",
        )

    def wrong(self, *, settled: bool = False) -> tuple[Violation, ...]:
        """Check the invariants."""
        return violations(self.look(), self.expected(), settled=settled, history=self.history.of)

    def _settings(self, device: str) -> Settings:
        return asdict(self.machine.vf_control.read(tiny_node.PF_NETDEV, self._order.index(device)))

    def rest(self) -> tuple[Violation, ...]:
        """Let everything come to rest; return what is wrong then."""
        deadline = time.monotonic() + REST_SECONDS
        again = time.monotonic() + 0.1
        while (wrong := self.wrong(settled=True)) and (now := time.monotonic()) < deadline:
            if now > again:
                again = now + RECONCILE_SECONDS
                self.reconcile()
            time.sleep(0.002)
        return wrong

    def forget(self) -> None:
        """Begin a new life: empty books, no lease, nothing spooled. Only for a node that is as it was."""
        self.kill_agent()
        if self._order != list(self.devices):
            self._renumber()
        for name in ("state", "spool", "leases", SPECS):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for file in ("ipam-calls", FILE):
            (self.folder / file).unlink(missing_ok=True)
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        self.history = History()
        self.promises.clear()
        self.left_out.clear()
        self.void.clear()
        self.claims.forget()


class Nodes:
    """One node for all that is played: it is as it was after each, or is replaced."""

    def __init__(self) -> None:
        self._node: Node | None = None

    def take(self) -> Node:
        """Return a node on which nothing has happened yet."""
        if self._node is None:
            self._node = Node(Path(tempfile.mkdtemp(prefix="nf-")))
        return self._node

    def give_back(self) -> None:
        """Let the next one have it, unless it was closed."""
        if self._node is not None:
            self._node.forget()

    def close(self) -> None:
        """End it: what is wrong with it must not be blamed on what is played next."""
        if self._node is not None:
            node, self._node = self._node, None
            node.close()
