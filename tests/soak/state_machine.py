"""Random lives of pods and VFs on one node: hypothesis chooses what happens next, the checker looks after each step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.cni.tiny_node import PF
from tests.soak.agent import Agent
from tests.soak.calls import Answer, Call, Pod
from tests.soak.configured import OF_GRANTED
from tests.soak.kubelet import AWAY
from tests.soak.node import Nodes
from tests.soak.scenarios import BY_CLAIM, CHAINED, SETTINGS

T = TypeVar("T")

MOST_PODS = 4
TRY_AGAIN_LATER = 11
TRIES = 60
"""An Unprepare waits 0.3 s for devices on their way back."""
POINTS = st.integers(1, 1500)
CRASH = st.one_of(st.none(), POINTS)
"""At which point the agent dies, if at all."""
NUMBER = st.integers(0, 99)
POOLED = 80
"""From this number on a pod names no VF, and gets whichever is free."""
KINDS = st.sampled_from(["plain", "settings", "addresses", "everything", "everything"])


class Counted(Nodes):
    """The nodes, and what was played on them."""

    examples = 0
    steps = 0


class Life(RuleBasedStateMachine):
    """What kubelet, the runtime, the hardware and fate do to an agent."""

    def __init__(self, nodes: Counted) -> None:
        super().__init__()
        self.nodes = nodes
        self.nodes.examples += 1
        self.node = nodes.take()
        self.pods: list[Pod] = []
        """Alive: their namespaces are there."""
        self.confs: dict[str, Mapping[str, Any]] = {}
        self.dead: list[Pod] = []
        """Ended. DELs may come for them for ever."""
        self.claims: dict[str, Pod] = {}
        """All that were ever handed to kubelet."""

    @initialize()
    def begin(self) -> None:
        self.node.start_agent()

    @invariant()
    def nothing_is_wrong(self) -> None:
        self.nodes.steps += 1
        self._expect_nothing(settled=False)

    # --------------------------------------------------------------------- pods

    @rule(number=NUMBER, kind=KINDS, point=CRASH)
    @precondition(lambda self: len(self.pods) < MOST_PODS)
    def add(self, number: int, kind: str, point: int | None) -> None:
        self._add(*self._new_pod(number, kind), point)

    @rule(number=NUMBER)
    @precondition(lambda self: len(self.pods) < MOST_PODS)
    def add_whose_addresses_fail(self, number: int) -> None:
        pod, conf = self._new_pod(number, "everything")
        fails = self.node.folder / "ipam-fails-ADD"
        fails.touch()
        answer = self._add(pod, conf)
        fails.unlink()
        assert not answer.succeeded

    @rule(number=NUMBER)
    @precondition(lambda self: len(self.pods) < MOST_PODS)
    def add_whose_addresses_hang_until_the_agent_dies(self, number: int) -> None:
        pod, conf = self._new_pod(number, "everything")
        hangs = self.node.folder / "ipam-hangs"
        hangs.touch()
        call = self.node.call("ADD", pod, conf)
        time.sleep(0.1)
        self.node.kill_agent()
        hangs.unlink()
        self.node.end_orphans()
        self.node.start_agent()
        self.node.take_answer(call, pod, conf)

    @rule(which=NUMBER)
    @precondition(lambda self: self.node.promises)
    def add_again(self, which: int) -> None:
        """The same ADD gets the same answer."""
        pod = self._one_with_a_promise(which)
        if not self._may_be_added(pod):
            return
        before = self.node.promises[pod.container_id, "net1"]
        answer = self._add(pod, self.confs[pod.container_id])
        assert answer.succeeded or any(p.device in self.node.unplugged | self.node.void for p in before), answer
        assert self.node.promises[pod.container_id, "net1"] == before

    @rule(which=NUMBER)
    @precondition(lambda self: self.node.promises)
    def check(self, which: int) -> None:
        pod = self._one_with_a_promise(which)
        promised = self.node.promises[pod.container_id, "net1"]
        conf = {**self.confs[pod.container_id], "prevResult": self.node.results[pod.container_id]}
        self.node.running()
        answer = self.node.call("CHECK", pod, conf).finish()
        gone = any(p.device in self.node.unplugged | self.node.void for p in promised)
        assert answer.succeeded or gone, f"CHECK of {pod.container_id}: {answer}"

    @rule(which=NUMBER, times=st.integers(1, 3), netns=st.booleans())
    @precondition(lambda self: self.pods)
    def delete(self, which: int, times: int, netns: bool) -> None:
        pod = _one_of(self.pods, which)
        for _ in range(times):
            answer = self.node.delete(pod, self.confs[pod.container_id], netns=netns)
            assert answer.succeeded, answer

    @rule(which=NUMBER, netns=st.booleans(), point=POINTS)
    @precondition(lambda self: self.pods)
    def delete_amid_a_crash(self, which: int, netns: bool, point: int) -> None:
        pod = _one_of(self.pods, which)
        with self._armed(point):
            call = self.node.begin_delete(pod, self.confs[pod.container_id], netns=netns)
            self._await(call)
        assert call.finish().succeeded

    @rule(which=NUMBER)
    @precondition(lambda self: self.dead)
    def delete_late(self, which: int) -> None:
        pod = _one_of(self.dead, which)
        assert self.node.delete(pod, self.confs[pod.container_id], netns=False).succeeded

    @rule(which=NUMBER)
    @precondition(lambda self: self.pods)
    def end_a_pod(self, which: int) -> None:
        """Its namespace goes, whether there was a DEL or not."""
        pod = _one_of(self.pods, which)
        self.pods.remove(pod)
        self.dead.append(pod)
        self.node.end_pod(pod)

    @rule(keep=st.integers(0, 15))
    def collect_garbage(self, keep: int) -> None:
        kept = [(pod.container_id, "net1") for n, pod in enumerate(self.pods) if keep & 1 << n]
        self.node.running()
        assert self.node.collect(kept).finish().succeeded

    @rule(number=NUMBER)
    @precondition(lambda self: len(self.pods) < MOST_PODS)
    def grant_and_add_chained(self, number: int) -> None:
        """kubelet grants a VF to a pod, which joins its network without Multus."""
        device = self.node.devices[number % len(self.node.devices)]
        pod, _ = self._new_pod(number, "plain")
        conf = {**CHAINED, **OF_GRANTED}
        self.confs[pod.container_id] = conf
        if isinstance(self.node.running().order("grant", devices=[device]), dict):
            return  # a claim has it, and kubelet rejects the pod
        self.node.tell_granted({pod.name: [device]})
        self._add(pod, conf)

    # ------------------------------------------------------------------- claims

    @rule(early=st.booleans(), late=st.integers(0, 2), point=CRASH)
    @precondition(lambda self: len(self.pods) < MOST_PODS)
    def claim_and_prepare(self, early: bool, late: int, point: int | None) -> None:
        uid = self._new_claim(early, late)
        with self._armed(point) as agent:
            self.node.claims.prepare(agent, uid)

    @rule(which=NUMBER)
    @precondition(lambda self: self._reserved())
    def prepare_once_more(self, which: int) -> None:
        """kubelet does after its own restart, and when another driver of the claim has failed."""
        uid = _one_of(self._reserved(), which)
        was_prepared = uid in self.node.claims.prepared
        is_prepared = self.node.claims.prepare(self.node.running(), uid)
        waits = uid in self.node.claims.untold and self.node.claims.api_is_away  # its files are made of its object
        assert is_prepared or not was_prepared or waits, f"claim {uid} is not prepared once more"

    @rule(which=NUMBER, point=CRASH)
    @precondition(lambda self: self._ready())
    def add_by_claim(self, which: int, point: int | None) -> None:
        answer = self._add(_one_of(self._ready(), which), BY_CLAIM, point)
        is_ill = point or self.node.unplugged or self.node.void or self.node.look().quarantine
        assert answer.succeeded or is_ill or answer.document["code"] == TRY_AGAIN_LATER, answer

    @rule(which=NUMBER, point=CRASH)
    @precondition(lambda self: self.claims)
    def unprepare(self, which: int, point: int | None) -> None:
        """Whether or not its pod lives, and however often."""
        with self._armed(point) as agent:
            self.node.claims.unprepare(agent, _one_of(list(self.claims), which))

    @rule(which=NUMBER, forgotten=st.booleans())
    @precondition(lambda self: self._reserved())
    def delete_by_force(self, which: int, forgotten: bool) -> None:
        """The scheduler may hand the devices out at once; kubelet may know nothing of the pod any more."""
        uid = _one_of(self._reserved(), which)
        self.node.claims.delete(uid)
        if forgotten:
            self.node.claims.unlist(self.claims[uid])

    @rule(away=st.booleans())
    def api_server_goes_or_comes(self, away: bool) -> None:
        self.node.claims.have_api_away(away)

    @rule()
    @precondition(lambda self: self.claims)
    def lose_specs(self) -> None:
        self.node.lose_specs()
        self.node.start_agent()

    @rule(point=st.one_of(st.none(), POINTS))
    @precondition(lambda self: self.claims)
    def lose_books(self, point: int | None) -> None:
        """While nothing else is in them: what books alone can know is lost for good."""
        world = self.node.look()
        if not (world.rows or world.owed or world.quarantine or world.spool):
            self.node.lose_books()
            self.node.start_agent(die_at=point)
            self.node.running()

    # ------------------------------------------------------------ agent and node

    @rule(point=CRASH)
    def crash(self, point: int | None) -> None:
        """Perhaps once more, at the next start."""
        self.node.kill_agent()
        if point is not None:
            self.node.start_agent(die_at=point)

    @rule(point=CRASH)
    def reconcile(self, point: int | None) -> None:
        with self._armed(point):
            self.node.reconcile()

    @rule(away=st.booleans())
    def kubelet_restarts(self, away: bool) -> None:
        """For a while kubelet answers nothing, or knows no pods."""
        self.node.tell_granted({})
        self.node.claims.unlist_all()
        (self.node.folder / AWAY).touch() if away else (self.node.folder / AWAY).unlink(missing_ok=True)
        self.node.history.note("kubelet is away" if away else "kubelet knows no pods")

    @rule(renumbers=st.booleans())
    def reboot(self, renumbers: bool) -> None:
        self.node.reboot(renumbers=renumbers and bool(self.claims) and not self.node.unplugged)
        self.dead += self.pods
        self.pods.clear()

    @rule(number=NUMBER)
    @precondition(lambda self: len(self.node.unplugged) < 2)
    def unplug(self, number: int) -> None:
        device = self.node.devices[number % len(self.node.devices)]
        if device not in self.node.unplugged:
            self.node.unplug(device)
            self._notice_hardware()

    @rule()
    @precondition(lambda self: self.node.unplugged)
    def plug(self) -> None:
        self.node.plug(sorted(self.node.unplugged)[0])
        self._notice_hardware()

    # -------------------------------------------------------------------- the end

    def teardown(self) -> None:
        """End all pods, let everything come to rest: then each device must be free, clean and usable."""
        try:
            self._end()
        except BaseException:
            log = (self.node.folder / "agent.log").read_text(errors="replace")
            note("\n".join([*self.node.history.all(), "--- the agents' log", log[-6000:]]))
            self.nodes.close()
            raise
        self.nodes.give_back()

    def _end(self) -> None:
        for device in sorted(self.node.unplugged):
            self.node.plug(device)
            self._notice_hardware()
        (self.node.folder / AWAY).unlink(missing_ok=True)
        self.node.running()
        for pod in [*self.pods, *self.dead]:
            assert self.node.delete(pod, self.confs[pod.container_id], netns=pod in self.pods).succeeded
        for pod in self.pods:
            self.node.end_pod(pod)
        self._let_go()
        self._rest()
        pods = [self.node.make_pod() for _ in self.node.devices]
        for pod, device in zip(pods, self.node.devices, strict=True):
            answer = self.node.add(pod, {"deviceID": device})
            assert answer.succeeded, f"{device} cannot be had in the end: {answer}"
        self._expect_nothing(settled=True)
        for pod in pods:
            self.node.delete(pod, {})
            self.node.end_pod(pod)
        self._rest()

    def _rest(self) -> None:
        wrong = self.node.rest()
        assert not wrong, "\n".join(map(str, wrong))

    def _expect_nothing(self, *, settled: bool) -> None:
        wrong = self.node.wrong(settled=settled)
        assert not wrong, "\n".join(map(str, wrong))

    # ------------------------------------------------------------------ plumbing

    def _new_pod(self, number: int, kind: str) -> tuple[Pod, Mapping[str, Any]]:
        pod = self.node.make_pod()
        self.pods.append(pod)
        conf: dict[str, Any] = {"deviceID": self.node.devices[number % len(self.node.devices)]}
        if number >= POOLED:
            conf = {"pf": [PF]}
        if kind in ("settings", "everything"):
            conf |= {**SETTINGS, "mac": _mac(number)}
        if kind in ("addresses", "everything"):
            conf["ipam"] = self.node.ipam()
        self.confs[pod.container_id] = conf
        self.node.running()
        return pod, conf

    def _notice_hardware(self) -> None:
        """Let an agent that runs see what has changed: the kernel tells it at once."""
        if self.node.agent is not None and self.node.agent.lives:
            self.node.reconcile()

    def _add(self, pod: Pod, conf: Mapping[str, Any], point: int | None = None) -> Answer:
        with self._armed(point):
            call = self.node.call("ADD", pod, conf)
            if point is not None:
                self._await(call)
        return self.node.take_answer(call, pod, conf)

    @contextmanager
    def _armed(self, point: int | None) -> Iterator[Agent]:
        """Have an agent that runs die at a point, if it comes there. Then the next one starts."""
        agent = self.node.running()
        if point is not None:
            agent.order("arm", at=point)
        yield agent
        if point is None:
            return
        if agent.answers():
            agent.points()
        else:
            self.node.history.note(f"the agent is killed at {agent.place_of_death}")
            self.node.start_agent()

    def _await(self, call: Call) -> None:
        """Wait until a call has its answer, or the agent is dead."""
        assert self.node.agent is not None
        self.node.agent.await_death(call.process)

    def _one_with_a_promise(self, which: int) -> Pod:
        return _one_of([pod for pod in self.pods if (pod.container_id, "net1") in self.node.promises], which)

    def _new_claim(self, early: bool, late: int) -> str:
        pod = self.node.make_pod()
        self.pods.append(pod)
        self.confs[pod.container_id] = BY_CLAIM
        uid = self.node.claims.allocate(pod, self.node.devices[: early or not late], late)
        self.claims[uid] = pod
        return uid

    def _reserved(self) -> list[str]:
        """List the claims that the API server has for pods that live."""
        return [uid for uid in self.node.claims.uids if self.claims[uid] in self.pods]

    def _ready(self) -> list[Pod]:
        """List the pods whose claims are all prepared: others get no sandbox."""
        return [pod for pod in self.pods if pod in self.claims.values() and self._may_be_added(pod)]

    def _may_be_added(self, pod: Pod) -> bool:
        mine = [uid for uid, of in self.claims.items() if of == pod]
        return all(uid in self.node.claims.prepared and uid in self.node.claims.uids for uid in mine)

    def _let_go(self) -> None:
        self.node.claims.have_api_away(False)
        for uid in self.claims:
            agent = self.node.running()
            ended = any(self.node.claims.unprepare(agent, uid) for _ in range(TRIES))
            assert ended, f"claim {uid} cannot be unprepared"


def _one_of(listed: Sequence[T], which: int) -> T:
    return listed[which % len(listed)]


def _mac(number: int) -> str:
    return f"02:00:00:00:77:{number:02x}"


def life_on(nodes: Counted) -> type[Life]:
    """Make the class that hypothesis wants: one that needs no argument."""
    return type("LifeOnThese", (Life,), {"__init__": lambda self: Life.__init__(self, nodes)})
