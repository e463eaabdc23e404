from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import pytest

from agent.cluster.apiserver import ApiServer, ObjectKind
from agent.cluster.object_watch import ObjectWatch, WatchedPod, pods_of, read_pod
from agent.errors import Refused, Unavailable
from hack.sim.cluster.apiserver import ApiServerStandIn, Fault

T = TypeVar("T")


def pod(name: str, version: str = "1", phase: str = "Running") -> dict[str, Any]:
    return {
        "metadata": {"namespace": "ns", "name": name, "uid": f"uid-{name}", "resourceVersion": version},
        "status": {"phase": phase},
    }


def event(kind: str, item: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "object": item}


class Script(ApiServer):
    """An API server that answers as it is told, call by call, and ends the watch after the last answer."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[str, str]] = []
        self.pauses: list[float] = []
        self.changes = 0
        self.now = 0.0
        self.watch_lasts = 300.0
        self.followed = ObjectWatch(self, pods_of("worker-1"), self.note)
        self.followed.chance, self.followed.pause, self.followed.clock = lambda: 0.5, self.pause, lambda: self.now

    def note(self) -> None:
        self.changes += 1

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if not self.answers:
            self.followed.stop()

    def take(self) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def list_of(
        self, kind: ObjectKind, selector: Mapping[str, str], read: Callable[[dict[str, Any]], T]
    ) -> tuple[str, list[T]]:
        self.calls.append(("list", selector["spec.nodeName"]))
        version, items = self.take()
        return version, list(map(read, items))

    def watch(
        self, kind: ObjectKind, selector: Mapping[str, str], since: str, seconds: int
    ) -> Iterator[dict[str, Any]]:
        assert 300 <= seconds <= 600
        self.calls.append(("watch", since))
        for each in self.take():
            if isinstance(each, Exception):
                raise each
            yield each
        self.now += self.watch_lasts

    def play(self) -> ObjectWatch[WatchedPod]:
        self.followed.follow()
        assert not self.answers
        return self.followed


def names(watch: ObjectWatch[WatchedPod]) -> list[str] | None:
    return None if watch.objects is None else [pod.name for pod in watch.objects]


def test_pods_are_listed_once_and_the_watch_goes_on_where_it_ended() -> None:
    script = Script(
        ("7", [pod("b"), pod("a")]),
        [event("ADDED", pod("c", "8")), event("BOOKMARK", {"metadata": {"resourceVersion": "20"}})],
        [],
    )
    watch = script.play()
    assert script.calls == [("list", "worker-1"), ("watch", "7"), ("watch", "20")]
    assert names(watch) == ["a", "b", "c"]
    assert watch.problem is None


def test_only_what_matters_is_told() -> None:
    script = Script(
        ("7", [pod("a")]),
        [event("MODIFIED", pod("a", "8")), event("MODIFIED", pod("a", "9", "Succeeded"))],
        [event("DELETED", pod("a", "10")), event("DELETED", pod("a", "11"))],
        [],
    )
    watch = script.play()
    assert script.changes == 3
    assert names(watch) == []


@pytest.mark.parametrize(
    "answer",
    [
        [Refused(410, "too old")],
        [event("ADDED", {"metadata": None})],
        [event("ADDED", {"spec": {"containers": 7}})],
    ],
    ids=str,
)
def test_an_answer_that_makes_no_sense_or_a_version_that_is_gone_asks_for_a_new_list(answer: list[Any]) -> None:
    script = Script(("7", [pod("a")]), answer, ("90", [pod("b")]), [])
    watch = script.play()
    assert [call for call, _ in script.calls] == ["list", "watch", "list", "watch"]
    assert names(watch) == ["b"]
    assert script.pauses[0] > 0


@pytest.mark.parametrize(
    ("answers", "lasts", "pauses"),
    [
        pytest.param([("7", []), *[[]] * 9], 0.1, [0.5, 1, 2, 4, 8, 16, 30, 30, 30], id="ends at once"),
        pytest.param([("7", []), Refused(410, "too old")] * 4, 300.0, [0.5, 1, 2, 4], id="too old each time"),
        pytest.param([("7", []), *[[]] * 4], 300.0, [0.5] * 4, id="lasts"),
        pytest.param(
            [("7", []), *[Unavailable("cut")] * 10, []],
            *(300.0, [0.75, 1.5, 3, 6, 12, 24, 48, 96, 192, 225, 0.5]),
            id="fails, and is not listed again",
        ),
        pytest.param([Unavailable("429", 40.0)], 300.0, [30], id="is asked for a longer pause"),
    ],
)
def test_what_ends_at_once_or_fails_is_begun_again_more_and_more_seldom(
    answers: list[Any], lasts: float, pauses: list[float]
) -> None:
    script = Script(*answers)
    script.watch_lasts = lasts
    script.play()
    assert script.pauses == pauses


def asks(**requests: str) -> dict[str, Any]:
    return {"resources": {"requests": requests}}


ONE_VF = asks(**{"rdma/vf": "1"})
TWO_CPUS = asks(cpu="2", memory="1Gi")


@pytest.mark.parametrize(
    ("spec", "qos", "native", "extended", "init"),
    [
        ({}, "BestEffort", False, set(), False),
        ({"containers": [TWO_CPUS]}, "Guaranteed", True, set(), False),
        ({"containers": [TWO_CPUS]}, "Burstable", False, set(), False),
        ({"containers": [asks(cpu="1500m")]}, "Guaranteed", False, set(), False),
        ({"containers": [asks(**{"hugepages-2Mi": "4Mi"})]}, "Guaranteed", True, set(), False),
        ({"containers": [ONE_VF]}, "BestEffort", False, {"rdma/vf"}, False),
        ({"containers": [asks(**{"a.kubernetes.io/b": "1"})]}, "BestEffort", False, set(), False),
        ({"initContainers": [ONE_VF]}, "BestEffort", False, set(), True),
        ({"initContainers": [TWO_CPUS]}, "Guaranteed", False, set(), True),
        ({"initContainers": [TWO_CPUS]}, "Burstable", False, set(), False),
        ({"initContainers": [{"restartPolicy": "Always", **ONE_VF}]}, "BestEffort", False, {"rdma/vf"}, False),
        ({"initContainers": [{"restartPolicy": "Always", **TWO_CPUS}]}, "Guaranteed", True, set(), False),
    ],
)
def test_what_a_pod_owns_follows_the_schedulers_rule(
    spec: dict[str, Any], qos: str, native: bool, extended: set[str], init: bool
) -> None:
    item = {**pod("a"), "spec": spec, "status": {"phase": "Running", "qosClass": qos}}
    assert read_pod(item) == WatchedPod("ns", "a", "uid-a", "Running", native, frozenset(extended), init)


class Follower:
    """A watch on its thread, over real HTTP."""

    def __init__(self, api: ApiServer) -> None:
        self.told = threading.Condition()
        self.watch = ObjectWatch(api, pods_of("worker-1"), self.note)
        self.watch.pause = lambda seconds: self.wait(0.01)

    def note(self) -> None:
        with self.told:
            self.told.notify_all()

    def wait(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def until(self, condition: Callable[[], bool]) -> None:
        with self.told:
            assert self.told.wait_for(condition, 20)


def test_over_real_http_pods_are_followed_through_cuts_errors_and_forgotten_versions(
    server: ApiServerStandIn, api: ApiServer
) -> None:
    follower = Follower(api)
    server.state.put_pod("worker-1", "ns", "a")
    following = threading.Thread(target=follower.watch.follow)
    following.start()
    follower.until(lambda: names(follower.watch) == ["a"])
    server.state.put_pod("worker-1", "ns", "b", "Pending")
    follower.until(lambda: names(follower.watch) == ["a", "b"])
    server.state.break_watches()
    server.state.put_pod("worker-1", "ns", "c")
    follower.until(lambda: names(follower.watch) == ["a", "b", "c"])
    server.state.set_fault(Fault(status=500))
    server.state.break_watches()
    follower.until(lambda: follower.watch.problem is not None)
    server.state.delete_pod("ns", "a")
    server.state.compact()
    server.state.set_fault(None)
    follower.until(lambda: names(follower.watch) == ["b", "c"])
    assert follower.watch.problem is None
    assert server.state.counts.lists == 2
    follower.watch.stop()  # it ends with the server's next word, and tells nothing of it
    server.state.put_pod("worker-1", "ns", "late")
    following.join(20)
    assert not following.is_alive()
    assert (names(follower.watch), follower.watch.problem) == (["b", "c"], None)


@pytest.mark.parametrize(
    "answer", [Unavailable("timed out"), Refused(410, "too old"), ValueError("nonsense"), ("7", [pod("a")])], ids=str
)
def test_a_watch_that_is_stopped_while_it_asks_tells_nothing_of_the_answer(answer: Any) -> None:
    class Slow(Script):
        def take(self) -> Any:
            self.followed.stop()
            if isinstance(answer, Exception):
                raise answer
            return answer

    script = Slow()
    watch = script.play()
    assert (watch.problem, watch.objects, script.changes) == (None, None, 0)
    assert len(script.calls) == 1
