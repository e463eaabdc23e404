"""Random lives of DRA claims beside all else that happens to a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.soak.calls import Pod
from tests.soak.scenarios import BY_CLAIM
from tests.soak.state_machine import MOST_PODS, NUMBER, POINTS, TRY_AGAIN_LATER, Life, Nodes

T = TypeVar("T")
TRIES = 60
"""An Unprepare waits 0.3 s for devices on their way back."""


class LifeWithClaims(Life):
    """What the scheduler and kubelet do with claims, too."""

    def __init__(self, nodes: Nodes) -> None:
        super().__init__(nodes)
        self.claims: dict[str, Pod] = {}
        """All that were ever handed to kubelet."""

    # ------------------------------------------------------------------- claims

    @rule(early=st.booleans(), late=st.integers(0, 2))
    @precondition(lambda self: len(self.pods) < MOST_PODS)
    def claim_and_prepare(self, early: bool, late: int) -> None:
        uid = self._new_claim(early, late)
        self.node.claims.prepare(self.node.running(), uid)

    @rule(early=st.booleans(), late=st.integers(0, 2), point=POINTS)
    @precondition(lambda self: len(self.pods) < MOST_PODS)
    def claim_and_prepare_amid_a_crash(self, early: bool, late: int, point: int) -> None:
        uid = self._new_claim(early, late)
        self._amid_a_crash("prepare", uid, point)

    @rule(which=NUMBER)
    @precondition(lambda self: self._reserved())
    def prepare_once_more(self, which: int) -> None:
        """kubelet does after its own restart, and when another driver of the claim has failed."""
        uid = _one_of(self._reserved(), which)
        was_prepared = uid in self.node.claims.prepared
        is_prepared = self.node.claims.prepare(self.node.running(), uid)
        assert is_prepared or not was_prepared, f"claim {uid} is not prepared once more"

    @rule(which=NUMBER)
    @precondition(lambda self: self._ready())
    def add_by_claim(self, which: int) -> None:
        pod = _one_of(self._ready(), which)
        answer = self._add(pod, BY_CLAIM)
        is_ill = self.node.unplugged or self.node.void or self.node.look().quarantine
        assert answer.succeeded or is_ill or answer.document["code"] == TRY_AGAIN_LATER, answer

    @rule(which=NUMBER, point=POINTS)
    @precondition(lambda self: self._ready())
    def add_by_claim_amid_a_crash(self, which: int, point: int) -> None:
        pod = _one_of(self._ready(), which)
        self.node.running().order("arm", at=point)
        call = self.node.call("ADD", pod, BY_CLAIM)
        self._carry_on(call)
        self.node.take_answer(call, pod, BY_CLAIM)

    @rule(which=NUMBER)
    @precondition(lambda self: self.claims)
    def unprepare(self, which: int) -> None:
        """Whether or not its pod lives, and however often."""
        self.node.claims.unprepare(self.node.running(), _one_of(list(self.claims), which))

    @rule(which=NUMBER, point=POINTS)
    @precondition(lambda self: self.claims)
    def unprepare_amid_a_crash(self, which: int, point: int) -> None:
        self._amid_a_crash("unprepare", _one_of(list(self.claims), which), point)

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
        self.node.claims.api_is_away(away)

    @rule()
    @precondition(lambda self: self.claims and not self.node.unplugged)
    def reboot_that_renumbers(self) -> None:
        self.node.reboot(renumbers=True)
        self.dead += self.pods
        self.pods.clear()

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

    # ----------------------------------------------------------------- plumbing

    def _new_claim(self, early: bool, late: int) -> str:
        pod = self.node.make_pod()
        self.pods.append(pod)
        self.confs[pod.container_id] = BY_CLAIM
        uid = self.node.claims.allocate(pod, self.node.devices[: early or not late], late)
        self.claims[uid] = pod
        return uid

    def _amid_a_crash(self, call: str, uid: str, point: int) -> None:
        agent = self.node.running()
        agent.order("arm", at=point)
        (self.node.claims.prepare if call == "prepare" else self.node.claims.unprepare)(agent, uid)
        if agent.answers():
            agent.points()
        else:
            self.node.history.note(f"the agent is killed at {agent.place_of_death}")
            self.node.start_agent()

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
        self.node.claims.api_is_away(False)
        for uid in self.claims:
            agent = self.node.running()
            ended = any(self.node.claims.unprepare(agent, uid) for _ in range(TRIES))
            assert ended, f"claim {uid} cannot be unprepared"


def _one_of(listed: Sequence[T], which: int) -> T:
    return listed[which % len(listed)]


def life_on(nodes: Nodes) -> type[LifeWithClaims]:
    """Make the class that hypothesis wants: one that needs no argument."""

    class LifeOnThese(LifeWithClaims):
        def __init__(self) -> None:
            super().__init__(nodes)

    return LifeOnThese
