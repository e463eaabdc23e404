"""Claims that several pods may have: which pods get their devices, and whom ADD asks about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from agent.errors import DeviceBusy, Refused, Unavailable
from agent.model.allocation import Claim, PodRef
from tests.cni.claiming import Scene, of_share, of_vf, pod_of
from tests.cni.claiming import scene as scene  # the fixture
from tests.cni.networks import PREVIOUS
from tests.cni.tiny_node import vf


def reserved(claim: Claim, *pods: PodRef) -> Mapping[str, Any]:
    """Say a claim as the API server does."""
    entries = [{"resource": "pods", "name": pod.name, "uid": pod.uid or f"uid-{pod.name}"} for pod in pods]
    meta = {"namespace": claim.ref.namespace, "name": claim.ref.name, "uid": claim.ref.uid}
    return {"metadata": meta, "status": {"reservedFor": [*entries, {"resource": "others", "name": "x", "uid": "y"}]}}


def test_a_second_pod_of_a_claim_is_learnt_from_kubelet_and_the_api_server(scene: Scene) -> None:
    claim = scene.claim("shared", of_share(network={"mode": "macvlan"}), owned=False)
    scene.start("c1")
    scene.kubelet.claims["pod-of-c2"] = ("shared",)
    scene.reader.claims["shared"] = reserved(claim, pod_of("c2"), pod_of("c3"))
    answer = scene.start("c2")
    assert [i["name"] for i in answer["interfaces"]] == ["cbr0", "eth0", "net1"]
    (known,) = scene.rig.ledger.claims()
    assert [pod.name for pod in known.pods] == ["pod-of-c2", "pod-of-c3"]
    scene.kubelet.is_away = True
    scene.start("c3")
    assert scene.reader.read == ["shared"]


def test_each_pod_of_a_pod_group_gets_its_share_of_the_groups_claim(scene: Scene) -> None:
    claim = scene.claim("shared", of_share(network={"mode": "macvlan"}), pods=(), owned=False)
    group = {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "workers", "uid": "uid-workers"}
    found = reserved(claim)
    scene.reader.claims["shared"] = {**found, "status": {"reservedFor": [group]}}
    for container in ("c1", "c2"):
        scene.kubelet.claims[f"pod-of-{container}"] = ("shared",)
        assert [i["name"] for i in scene.start(container)["interfaces"]] == ["cbr0", "eth0", "net1"]
    assert [pod.name for pod in scene.rig.ledger.claims()[0].pods] == ["pod-of-c1", "pod-of-c2"]


def test_a_pod_without_the_claim_gets_nothing_of_it(scene: Scene) -> None:
    scene.claim("shared", of_share(network={"mode": "macvlan"}), owned=False)
    scene.kubelet.claims["pod-of-c2"] = ("another",)
    for container in ("c2", "c3"):  # c3 is a pod that kubelet does not list
        assert scene.start(container) == PREVIOUS
    assert (scene.kubelet.asked, scene.reader.read) == (2, [])


@pytest.mark.parametrize("error", [Unavailable("away"), Refused(403, "no"), None])
def test_without_the_api_servers_word_kubelet_is_believed(scene: Scene, error: Exception | None) -> None:
    scene.claim("shared", of_share(network={"mode": "macvlan"}), owned=False)
    scene.kubelet.claims["pod-of-c2"] = ("shared",)
    scene.reader.error = error
    if error is None:
        scene.asks.set(None)  # nobody can ask
    scene.start("c2")
    assert [pod.name for pod in scene.rig.ledger.claims()[0].pods] == ["pod-of-c1", "pod-of-c2"]


def test_a_claim_that_is_gone_goes_to_no_pod_whose_claim_has_its_name(scene: Scene) -> None:
    scene.claim("shared", of_share(network={"mode": "macvlan"}), owned=False)
    scene.kubelet.claims["pod-of-c2"] = ("shared",)
    assert scene.start("c2") == PREVIOUS
    assert scene.reader.read == ["shared"]
    assert [pod.name for pod in scene.rig.ledger.claims()[0].pods] == ["pod-of-c1"]


def test_a_claim_that_has_one_pod_asks_kubelet_about_no_other(scene: Scene) -> None:
    scene.claim("mine", of_vf(0))
    scene.kubelet.is_away = True
    assert scene.start("c2") == PREVIOUS


def test_a_device_cannot_be_in_two_pods_of_its_claim_and_the_second_is_told_what_to_do(scene: Scene) -> None:
    rig = scene.rig
    scene.claim("shared", of_vf(0), pods=("c1", "c2"), owned=False)
    first = rig.pod("first")
    scene.start("c1", first)
    with pytest.raises(DeviceBusy, match=r"still held by pod default/pod-of-c1 .* use a template, a claim per pod"):
        scene.start("c2")
    assert scene.rows() == {vf(0): ("c1", "net1", "uid-shared")}
    rig.check("c1", first, ifname="eth0")
    rig.delete("c1", first, ifname="eth0")
    rig.await_back()
    rig.remove(rig.folder / "c2.netns")
    scene.start("c2")
