"""Many pods come and go at once, by the real relay and the real agent process, which is killed now and then.

A VF goes to the next pod the moment that the last one is told to be gone, and the one that was freed last
goes first. Pods end in all the ways in which runtimes end them: DEL and then the namespace, the namespace
first and then several DELs, or no DEL at all.

A third of the pods have their devices by DRA claims: VFs bound early or late, and shares of an adapter.
"""

from __future__ import annotations

import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agent.model.device import PciDevice
from hack.sim.runtime import make_netns, remove_netns
from hack.sim.stage import CONFIG, Stage
from tests.soak import churn_claims, observe
from tests.soak.calls import RELAY
from tests.soak.churn_claims import Desk, PodClaim
from tests.soak.invariants import violations
from tests.soak.scenarios import CHAINED, SETTINGS
from tests.soak.world import Expected, History, Lease, Violation, World

NODE = "h100-8gpu"
TRY_AGAIN_LATER = 11
PATIENCE_SECONDS = 90.0
REST_SECONDS = 45.0
BY_CLAIM = 0.35
"""So many of the pods have their devices by claims."""


@dataclass
class Figures:
    """What came of a churn."""

    pods: int = 0
    by_claim: int = 0
    """Of these pods."""
    attached: int = 0
    crashes: int = 0
    told_to_try_again: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list, repr=False)
    """What a pod met that it should not have."""
    leaks: list[str] = field(default_factory=list, repr=False)
    """What was left when all was over."""


@dataclass(frozen=True)
class Sandbox:
    """A pod's sandbox, and what its ADD and DEL say: by the VF that it names, or by its claim."""

    container: str
    netns: Path
    conf: Mapping[str, Any]
    claim: PodClaim | None = None

    @property
    def concerns(self) -> str:
        """Tell what its history is about: the one VF that it names, or itself."""
        return str(self.conf.get("deviceID", self.container))


class Churn:
    """One node with its agent, and pods on it."""

    def __init__(
        self, stage: Stage, vfs: int, seed: int, say: Callable[[str], None], tell: Callable[[Figures], object]
    ) -> None:
        self._stage = stage
        self._say = say
        self._tell = tell
        self._machine = stage.build_node(NODE)
        found = self._machine.scan()
        pfs = [d.address for d in found.devices if d.vfs]
        claimed = pfs[-4:]
        plain = [d.address for d in found.devices if d.is_vf and d.physfn not in claimed][:vfs]
        self._vfs: dict[str, PciDevice] = {
            d.address: d for d in found.devices if d.address in plain or d.physfn in claimed[:-1]
        }
        self._pfs = {device: found.pf_netdev(facts) for device, facts in self._vfs.items()}
        resources = [{"name": "rdma/vf", "kind": "vf", "select": {"rootDevices": pfs[:-4]}}]
        resources += churn_claims.resources(claimed)
        network = {"name": "claims", "vlan": 11, "ipam": stage.ipam("claims", "10.8.0.0/20")}
        # The pods are no kubelet's.
        stage.write_config({**CONFIG, "networks": [network], "resources": resources, "cni": {"requireGrant": False}})
        stage.start_kubelet()
        self._desk = Desk(stage)
        self._free = plain
        self._guard = threading.Lock()
        self._rng = random.Random(seed)
        self._history = History()
        self.figures = Figures()
        shapes = {device: seen[0].shape for device, seen in observe.links({}).items() if device in self._vfs}
        self._expected = Expected(shapes, {device: self._settings(device) for device in self._vfs})

    def run(self, pods: int, concurrency: int, crash_every: int) -> Figures:
        """Let so many pods live and end, and return what came of it."""
        started = time.monotonic()
        figures = self.figures
        self._start_agent()
        self._desk.open()
        with ThreadPoolExecutor(concurrency) as threads:
            lives = [threads.submit(self._live, number, self._rng.random()) for number in range(pods)]
            try:
                self._crash_amid(lives, crash_every)
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        for life in lives:
            life.result()
        figures.leaks = [str(violation) for violation in self._rest()]
        figures.seconds = time.monotonic() - started
        return figures

    def _crash_amid(self, lives: Sequence[Future[None]], crash_every: int) -> None:
        figures = self.figures
        due = self._rng.randint(1, crash_every)
        while not all(life.done() for life in lives):
            time.sleep(0.01)
            if figures.pods >= due:
                due += crash_every
                time.sleep(self._rng.random() * 0.2)
                self._stage.end("agent", signal.SIGKILL)
                self._note("the agent is killed")
                self._start_agent()
                figures.crashes += 1
                self._say(f"churn: {figures}")
                self._tell(figures)

    # --------------------------------------------------------------------- a pod

    def _live(self, number: int, seed: float) -> None:
        """Prepare, ADD, DEL, Unprepare; and sometimes the scheduler has a claim's devices back before its pod ends."""
        rng, name = random.Random(seed), f"pod{number}"
        claim = self._desk.hand_out(name, rng) if rng.random() < BY_CLAIM else None
        netns, is_forced = self._stage.folder / "netns" / f"{name}.netns", claim is not None and rng.random() < 0.2
        with self._guard:
            self.figures.pods += 1
            self.figures.by_claim += claim is not None
            conf = CHAINED if claim is not None else self._conf(number, self._free.pop(), rng)  # freed last
        sandbox = Sandbox(name, netns, conf, claim)
        self._note(f"{name} gets {claim or conf['deviceID']}", name)
        try:
            if claim is not None and (problem := self._desk.prepare(claim)):
                self._fail(name, f"claim {claim.uid} is not prepared: {problem}")
                return
            make_netns(netns)
            if self._attach(sandbox):
                self._expect(sandbox)
                time.sleep(rng.random() * 0.1)
                self._expect(sandbox)
            if claim is not None and is_forced:
                self._desk.take_back(claim)
                time.sleep(rng.random() * 0.1)
            self._end(sandbox, rng)
        finally:
            if claim is None:
                with self._guard:
                    self._free.append(conf["deviceID"])
            elif problem := self._desk.unprepare(claim):
                self._fail(name, f"claim {claim.uid} is not unprepared: {problem}")
            if claim is not None and not is_forced:
                self._desk.take_back(claim)

    def _conf(self, number: int, device: str, rng: random.Random) -> dict[str, Any]:
        conf: dict[str, Any] = {"deviceID": device}
        if rng.random() < 0.5:
            conf |= {**SETTINGS, "mac": f"02:00:00:77:{number >> 8 & 255:02x}:{number & 255:02x}"}
        if rng.random() < 0.5:
            conf["ipam"] = self._stage.ipam("rails", "10.9.0.0/20")
        return conf

    def _expect(self, sandbox: Sandbox) -> None:
        """See in a sandbox what its pod was promised."""
        place = str(sandbox.netns)
        found = {
            device: one for device, seen in observe.links({place: 0}).items() for one in seen if one.place == place
        }
        if (claim := sandbox.claim) is not None:
            if len(found.keys() & self._vfs.keys()) != claim.vfs or not claim.addresses <= found.keys():
                self._fail(sandbox.container, f"should have {claim.pieces}, and has {sorted(found)}")
            return
        device, conf = sandbox.conf["deviceID"], sandbox.conf
        wanted = ("net1", conf.get("mac", self._expected.shapes[device].mac), True)
        shape = found[device].shape if device in found else None
        if shape is None or (shape.name, shape.mac, shape.up) != wanted:
            self._fail(device, f"{sandbox.container} should have it as {wanted}, and has {shape}")

    def _attach(self, sandbox: Sandbox) -> bool:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            status, error = self._call("ADD", sandbox)
            if status == 0:
                with self._guard:
                    self.figures.attached += 1
                self._note(f"ADD of {sandbox.container} with {sandbox.concerns}", sandbox.concerns)
                return True
            if error["code"] != TRY_AGAIN_LATER or time.monotonic() > deadline:
                self._fail(sandbox.concerns, f"ADD of {sandbox.container} failed: {error}")
                return False
            self.figures.told_to_try_again += 1
            time.sleep(0.2)

    def _end(self, sandbox: Sandbox, rng: random.Random) -> None:
        way = rng.choice(("DEL first", "DEL first", "namespace first", "no DEL"))
        self._note(f"{sandbox.container} ends: {way}", sandbox.concerns)
        if way == "DEL first":
            self._delete(sandbox)
        remove_netns(sandbox.netns)
        for _ in range(rng.choice((0, 1)) if way == "DEL first" else 2 * (way == "namespace first")):
            self._delete(sandbox, netns="")

    def _delete(self, sandbox: Sandbox, netns: str | None = None) -> None:
        status, error = self._call("DEL", sandbox, netns)
        if status != 0:
            self._fail(sandbox.concerns, f"DEL of {sandbox.container} failed: {error}")

    def _call(self, command: str, sandbox: Sandbox, netns: str | None = None) -> tuple[int, dict[str, Any]]:
        """Name the interface, and for a pod of the cluster the pod."""
        place = sandbox.netns if netns is None else netns
        conf = {"name": "rails", **sandbox.conf}
        if (claim := sandbox.claim) is None:
            return self._stage.call(command, conf, sandbox.container, place)
        return self._stage.call(command, conf, sandbox.container, place, "eth0", sandbox.container, claim.pod_uid)

    # ------------------------------------------------------------------- the end

    def _rest(self) -> tuple[Violation, ...]:
        """Let things settle, start the agent once more if they do not, and return what is wrong then."""
        for _ in range(2):
            until = time.monotonic() + REST_SECONDS
            while wrong := violations(self._look(), self._expected, settled=True, history=self._history.of):
                if time.monotonic() > until:
                    break
                time.sleep(0.5)
            if not wrong:
                break
            self._note("the agent is started once more")
            self._stage.end("agent")
            self._start_agent()
        return wrong

    def _start_agent(self) -> None:
        self._stage.start_agent(*self._desk.agent_options)

    def _look(self) -> World:
        self._machine.scan()
        found = observe.links({})

        def leases(network: str) -> Sequence[Lease]:
            return observe.leases(self._stage.folder / f"leases-{network}")

        return World(
            links={device: found.get(device, ()) for device in self._vfs},
            settings={device: self._settings(device) for device in self._vfs},
            pods={},
            leases=(*leases("rails"), *leases("claims")),
            spool=tuple(name for name in observe.spool(self._stage.folder / "state/spool") if name.endswith(".del")),
            specs=observe.specs(self._stage.folder / "cdi-specs"),
            **vars(observe.Books(self._stage.folder / "state/ledger.db")),
        )

    def _settings(self, device: str) -> dict[str, object]:
        index, pf = self._vfs[device].vf_index, self._pfs[device]
        assert index is not None
        assert pf is not None
        return asdict(self._machine.vf_control.read(pf.name, index))

    def _note(self, text: str, *concerned: str) -> None:
        with self._guard:
            self._history.note(text, *concerned)

    def _fail(self, device: str, text: str) -> None:
        with self._guard:
            self.figures.failures.append("\n    ".join([f"{device}: {text}", *self._history.of(device)]))
            self._say(self.figures.failures[-1])


def run(
    pods: int,
    vfs: int,
    concurrency: int,
    crash_every: int,
    seed: int,
    say: Callable[[str], None],
    tell: Callable[[Figures], object] = lambda figures: None,
) -> Figures:
    """Make a node and churn it. Needs a network namespace of its own. `tell` gets the figures now and then."""
    with tempfile.TemporaryDirectory(prefix="nf-") as folder, closing(Stage(Path(folder), RELAY)) as stage:
        figures = Churn(stage, vfs, seed, say, tell).run(pods, concurrency, crash_every)
        if figures.failures or figures.leaks:
            say(stage.log("agent")[-20000:])
        return figures
