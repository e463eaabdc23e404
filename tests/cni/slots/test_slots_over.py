"""When a slot's binding is over: only once nobody can still be using it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from agent.kubelet.cri import Sandbox
from agent.model.allocation import Binding, PodRef
from agent.reconcile.view import View
from cni.slots.bound import SANDBOX_SECONDS, is_over
from tests.node import POD, VF, attach, open_books, owner

BINDING = Binding("slot-rdma:vf-0-0", "rdma/vf", "vf", VF, "worker", "c1", "net1", POD, {}, "boot", since=10.0)
LATER = BINDING.since + SANDBOX_SECONDS + 1
NAMES = {(POD.namespace, POD.name)}


def known(pods: set[tuple[str, str]] | None = None, sandboxes: set[str] | None = None, asked_at: float = LATER) -> View:
    running = None if sandboxes is None else [Sandbox(sandbox, POD, ready=True) for sandbox in sandboxes]
    return View(asked_at, None, pods, running)


def test_a_binding_ends_with_its_pod_as_kubelet_tells() -> None:
    assert is_over(BINDING, known(pods={("kube-system", "nodefabric")}))
    assert not is_over(BINDING, known(pods=NAMES))


def test_a_kubelet_that_knows_no_pods_at_all_is_not_believed() -> None:
    assert not is_over(BINDING, known(pods=set()))


def test_a_kubelet_that_knows_none_but_static_pods_is_not_believed_while_its_checkpoint_says_otherwise() -> None:
    static = {("kube-system", "kube-proxy-gpu-7")}
    assert not is_over(BINDING, known(pods=static), (), lambda binding: True)
    assert is_over(BINDING, known(pods=static), (), lambda binding: False)
    assert is_over(BINDING, known(pods=static, sandboxes={"c2"}), (), lambda binding: True)  # the runtime is sure


def test_the_runtime_knows_better_than_kubelet_which_sandboxes_live() -> None:
    assert is_over(BINDING, known(pods=NAMES, sandboxes={"c2"}))
    assert not is_over(BINDING, known(pods=set(), sandboxes={"c1"}))


def test_a_sandbox_that_the_runtime_has_not_finished_keeps_its_slots() -> None:
    """containerd lists a sandbox when all of it stands: after its ADD, and whatever comes after that."""
    assert not is_over(BINDING, known(pods=NAMES, sandboxes={"c2"}, asked_at=BINDING.since + 1))


def test_where_nobody_answers_all_stays() -> None:
    assert not is_over(BINDING, known())


def test_what_was_bound_since_they_were_asked_stays() -> None:
    assert not is_over(BINDING, known(pods=set(), sandboxes=set(), asked_at=10.0))


def test_a_binding_lives_as_long_as_its_attachment(tmp_path: Path) -> None:
    with open_books(tmp_path) as books:
        row = attach(books, VF, owner("c1"))
        assert not is_over(BINDING, View(LATER, None, set(), ()), (row,))
        other = attach(books, "0000:3b:00.3", owner("c1"))
        assert is_over(BINDING, View(LATER, None, set(), ()), (other,))


def test_a_binding_whose_sandbox_is_not_known_ends_with_its_pod() -> None:
    rebuilt = replace(BINDING, container_id="")
    assert not is_over(rebuilt, known(pods=NAMES, sandboxes={"c2"}))
    assert is_over(rebuilt, known(pods={("kube-system", "nodefabric")}, sandboxes={"c2"}))


def test_a_binding_whose_pod_is_not_known_stays_until_it_is() -> None:
    held = replace(BINDING, container_id="", pod=PodRef("", ""))
    assert not is_over(held, known(pods=NAMES, sandboxes={"c2"}))
