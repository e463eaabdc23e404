"""Kills the agent at fault points of the scenarios, lets the runtime carry on, and checks the invariants."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.soak.node import Nodes
from tests.soak.points import Point, distinct
from tests.soak.scenarios import BY_CLAIM, SCENARIOS, Play, Scenario, allocate, plain
from tests.soak.world import Violation

TRIES = 20


@dataclass(frozen=True)
class Crash:
    """One fault point of one scenario, and how the story goes on."""

    scenario: Scenario
    point: Point
    seed: int

    def __str__(self) -> str:
        return f"{self.scenario.name!r}, point {self.point.number} ({self.point.where}), seed {self.seed}"


@dataclass
class Outcome:
    """What came of many crashes."""

    chosen: int = 0
    """Points to try."""
    points: int = 0
    """Points tried."""
    missed: int = 0
    """Points that did not come up again, as threads went another way; the invariants were checked all the same."""
    violations: list[str] = field(default_factory=list, repr=False)


class CrashTest:
    """Plays scenarios on one node, which is as it was after each."""

    def __init__(self, say: Callable[[str], None] = print) -> None:
        self._say = say
        self.outcome = Outcome()
        self._nodes = Nodes()
        self.close = self._nodes.close

    def find_points(self, scenario: Scenario) -> tuple[Point, ...]:
        """Play a scenario without a crash, and list its points."""
        with self._play(scenario) as play:
            if scenario.act is None:
                points = play.node.start_agent(note_points=True).started
                assert points is not None
            else:
                agent = play.node.running()
                agent.order("arm", at=None)
                play.call = scenario.act(play)
                if play.call is not None:
                    play.call.finish()
                self._note_answer(play)
                # A detach goes on after its DEL was answered.
                play.node.until(lambda: not any(row.state == "detaching" for row in play.node.look().rows))
                points = agent.points()
            wrong = self._conclude(play, random.Random(0))
        if wrong:
            self._report(f"{scenario.name!r} without a crash", wrong)
        return distinct(points)

    def try_point(self, crash: Crash) -> None:
        """Kill the agent at a point, go on as kubelet and the runtime do, and check."""
        self.outcome.points += 1
        rng = random.Random(f"{crash.seed} {crash.scenario.name} {crash.point.number}")
        with self._play(crash.scenario) as play:
            self._meet(play, crash)
            died_at = play.node.agent.place_of_death if play.node.agent is not None else ""
            self.outcome.missed += not died_at
            wrong = play.node.wrong()
            if not wrong:
                self._come_back(play, rng)
                wrong = self._conclude(play, rng)
        if wrong:
            self._report(f"{crash}, died at {died_at or 'no point'}", wrong)

    def _meet(self, play: Play, crash: Crash) -> None:
        node, act = play.node, crash.scenario.act
        if act is None:
            node.start_agent(die_at=crash.point.number)
            return
        agent = node.running()
        agent.order("arm", at=crash.point.number)
        play.call = act(play)
        if play.call is not None:
            agent.await_death(play.call.process)
        if agent.lives:
            # What goes on after the answer may still meet the point.
            until = time.monotonic() + 5
            while agent.answers() and time.monotonic() < until:
                if not any(row.state == "detaching" for row in node.look().rows):
                    break
        if agent.lives:
            agent.points()
        node.history.note(f"the agent is killed at {agent.place_of_death}" if not agent.lives else "no crash after all")

    def _come_back(self, play: Play, rng: random.Random) -> None:
        """Start the next agent, in one of the ways that things go on after a crash."""
        node = play.node
        for file in ("ipam-fails-ADD", "ipam-fails-DEL", "ipam-hangs"):
            (node.folder / file).unlink(missing_ok=True)
        way = rng.choice(["at once", "at once", "late", "again", "pod ended"])
        node.history.note(f"from here: {way}")
        if way == "late" and play.call is not None:
            if play.call.command != "DEL":
                play.call.process.kill()  # its runtime has lost patience
            play.call.finish()
        elif way == "pod ended" and play.adding is not None:
            node.end_pod(play.adding[0])
        elif way == "again":
            node.start_agent(die_at=int(rng.triangular(1, 1500, 1)))
        if node.agent is None or not node.agent.lives:
            node.start_agent(watched=False)
        self._note_answer(play)

    def _note_answer(self, play: Play) -> None:
        if play.call is None:
            return
        if play.adding is not None and play.call.process.returncode is None:
            pod, conf = play.adding
            play.node.take_answer(play.call, pod, conf)
        else:
            play.call.finish()

    def _conclude(self, play: Play, rng: random.Random) -> tuple[Violation, ...]:
        """Check, give the devices to other pods amid late DELs, end everything, and check again."""
        node = play.node
        for file in ("ipam-fails-ADD", "ipam-fails-DEL"):
            (node.folder / file).unlink(missing_ok=True)
        if wrong := node.wrong():
            return wrong
        if play.claims and (wrong := self._go_on_with_claims(play, rng)):
            return wrong
        if play.pods:
            # kubelet ends a pod whose ADD failed, or any other, with several DELs, some without a namespace.
            ended = [held for held in play.pods if held[1].get("deviceID", node.devices[0]) == node.devices[0]]
            for pod, conf in ended:
                for _ in range(rng.choice((1, 2))):
                    node.delete(pod, conf, netns=rng.random() < 0.5)
            if play.claims:
                if wrong := self._follow_claims(play):
                    return wrong
            else:
                play.pods.append((node.make_pod(), plain(node)))
            for _ in range(TRIES):
                answer = node.add(*play.pods[-1])
                if answer.succeeded or answer.document.get("code") != 11:
                    break
            node.delete(*ended[0], netns=False)
            if wrong := node.wrong():
                return wrong
            if not answer.succeeded:
                return (Violation(node.devices[0], f"cannot be had: {answer.document}", node.history.all()),)
        for pod, conf in play.pods:
            node.delete(pod, conf)
            if str(pod.netns) in node.look().pods:
                node.end_pod(pod)
        return self._unprepare_all(play) or node.rest()

    def _go_on_with_claims(self, play: Play, rng: random.Random) -> tuple[Violation, ...]:
        """Do what kubelet may do next: have claims prepared once more, and start their pods."""
        node = play.node
        for uid, pod in play.claims.items():
            is_wanted = uid in node.claims.uids and uid not in node.claims.ended and rng.random() < 0.5
            if is_wanted and node.claims.prepare(node.running(), uid) and str(pod.netns) in node.look().pods:
                node.add(pod, BY_CLAIM)
        return node.wrong()

    def _follow_claims(self, play: Play) -> tuple[Violation, ...]:
        """Give the first device to another claim, once kubelet has had the claims before unprepared."""
        node = play.node
        if wrong := self._unprepare_all(play):
            return wrong
        uid = allocate(play)
        if any(node.claims.prepare(node.running(), uid) for _ in range(TRIES)):
            return node.wrong()
        return (Violation(uid, "cannot be prepared", node.history.all()),)

    def _unprepare_all(self, play: Play) -> tuple[Violation, ...]:
        """Have claims unprepared as kubelet does, which tries again for ever."""
        node = play.node
        while play.claims:
            uid, pod = play.claims.popitem()
            if not any(node.claims.unprepare(node.running(), uid) for _ in range(TRIES)):
                return (Violation(uid, "cannot be unprepared", node.history.all()),)
            node.claims.delete(uid)
            node.claims.unlist(pod)
        return node.wrong()

    @contextmanager
    def _play(self, scenario: Scenario) -> Iterator[Play]:
        node = self._nodes.take()
        play = Play(node)
        scenario.prepare(play)
        if scenario.act is None:
            node.kill_agent()
        try:
            yield play
        except BaseException:
            print("\n".join(node.history.all()), (node.folder / "agent.log").read_text()[-5000:], sep="\n")
            raise
        if play.call is not None and play.call.answer is None:
            play.call.process.kill()
            play.call.finish()
        self._nodes.give_back()

    def _report(self, what: str, wrong: Iterable[Violation]) -> None:
        text = "\n".join([what, *map(str, wrong)])
        self.outcome.violations.append(text)
        self._say(f"VIOLATION: {text}")
        self.close()


@dataclass(frozen=True)
class Limits:
    """How much to try, however fast the machine is: all points after a change, and so many others of each scenario."""

    others: int
    most: int | None = None
    """Of all these points so many, mixed: of each scenario something."""
    seconds: float = math.inf
    """After so long something is wrong with the machine, and what is left is left."""


def choose(found: Mapping[Scenario, tuple[Point, ...]], limits: Limits, seed: int) -> list[Crash]:
    """Choose which points to try."""
    rng = random.Random(seed)
    crashes: list[Crash] = []
    for scenario, points in found.items():
        others = [point for point in points if not point.after_change]
        chosen = [point for point in points if point.after_change]
        chosen += rng.sample(others, min(limits.others, len(others)))
        crashes += [Crash(scenario, point, seed) for point in chosen]
    if limits.most is not None:
        rng.shuffle(crashes)
    return crashes[: limits.most]


def run(
    seed: int,
    limits: Limits,
    say: Callable[[str], None] = print,
    scenarios: Sequence[Scenario] = SCENARIOS,
    note: Callable[[Outcome], object] = lambda outcome: None,
) -> Outcome:
    """Try the points of scenarios. `note` is told after each what has come of all so far."""
    test = CrashTest(say)
    began = time.monotonic()
    try:
        found = {}
        for scenario in scenarios:
            found[scenario] = points = test.find_points(scenario)
            say(f"{scenario.name}: {len(points)} points, {sum(p.after_change for p in points)} after a change")
        crashes = choose(found, limits, seed)
        test.outcome.chosen = len(crashes)
        say(f"{len(crashes)} points to try, found in {time.monotonic() - began:.0f} s")
        for number, crash in enumerate(crashes):
            if time.monotonic() - began > limits.seconds:
                say(f"{limits.seconds:g} s are over: {len(crashes) - number} points are left")
                break
            test.try_point(crash)
            note(test.outcome)
            if number % 50 == 49:
                say(f"{number + 1} of {len(crashes)} points tried, {time.monotonic() - began:.0f} s")
    finally:
        test.close()
    return test.outcome
