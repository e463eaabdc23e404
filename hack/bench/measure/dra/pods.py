"""Whole pods with a VF, in turn by device plugin and by claim, and how soon a claim's VF is home. On real links.

A pod's time is that of the kubelet stand-in, from the moment that it knows the pod until its containers run; the claim
has been allocated before. A VF is home when it is in the host under its own name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from agent.model.device import PciDevice
from hack.sim.stage import Stage, wait
from measure.attach import pause
from measure.contender import Contender, Host
from measure.dra.cluster import Cluster, Driver
from measure.dra.node import RunningNode
from measure.figures import Figures, quantile, spread
from measure.program import Program
from proto.dra.v1 import api_pb2
from tests.deviceplugin.dra.nodes import recorded_node

NODE = "h100-8gpu"
BY_PLUGIN, BY_CLAIM = "rdma/vf", "rdma/claimed"
WARM_ROUNDS = 2
HOME_SECONDS = 5.0
LATER_DELETE = ("--later-delete", "0.05")
"""An option of kubelet's stand-in: pods are gone sooner, which nothing here is about."""
CHAINED = {"type": "nodefabric", "prevResult": {"cniVersion": "1.0.0"}}
"""After a pod's network that is of no interest here."""

Say = Callable[[str], None]


def config() -> Mapping[str, Any]:
    """Offer the VFs of half of the ports by plugin, and those of the others to claims."""
    snapshot = recorded_node(NODE)
    ports = sorted({device.physfn for device in snapshot.devices if device.physfn is not None})
    half = len(ports) // 2
    vfs = {"kind": "vf", "network": "rails"}
    return {
        "resources": [
            {**vfs, "name": BY_PLUGIN, "select": {"pf": ports[:half]}},
            {**vfs, "name": BY_CLAIM, "select": {"pf": ports[half:]}, "offer": "dra"},
        ]
    }


def starts(node: RunningNode, rounds: int, say: Say) -> Figures:
    """Start and end pods, in turn of both kinds, and count what that has the agent write to the API server."""
    say(f"pods: {rounds} by device plugin and as many by claim, in turn")
    stage, cluster = node.stage, node.cluster
    device = cluster.devices(BY_CLAIM)[0]
    by_plugin: list[float] = []
    by_claim: list[float] = []
    slices, status, applies = 0.0, 0.0, 0
    for number in range(-WARM_ROUNDS, rounds):
        if number == 0:
            slices, status, applies = *_written(stage), cluster.applies()
        plugin, claim = f"plugin-{number + WARM_ROUNDS}", f"claim-{number + WARM_ROUNDS}"
        stage.create_pod(plugin, {BY_PLUGIN: 1})
        plugin_ms = _started(stage, plugin)
        cluster.allocate(claim, device, {"name": claim, "uid": f"uid-of-{claim}"})
        _create(stage, claim)
        claim_ms = _started(stage, claim)
        _await_status(cluster, claim)
        stage.end_pods(plugin, claim)
        cluster.remove(claim)
        if number >= 0:
            by_plugin.append(plugin_ms)
            by_claim.append(claim_ms)
    slices, status = (after - before for before, after in zip((slices, status), _written(stage), strict=True))
    if slices + status != cluster.applies() - applies:
        raise RuntimeError(f"the agent tells of {slices + status:g} writes, the API server of another number")
    return {
        **spread("pod_start_plugin", by_plugin),
        **spread("pod_start_claim", by_claim),
        "pod_start_claim_more_ms": quantile(by_claim, 0.5) - quantile(by_plugin, 0.5),
        "slice_writes_per_pod": slices / (2 * rounds),
        "status_writes_per_pod": status / rounds,
    }


def homes(node: RunningNode, rounds: int, say: Say) -> Figures:
    """End pods as kubelet does: DEL, then Unprepare at once; in turn with DEL alone, after which the VF is awaited."""
    say(f"claims: {rounds} times DEL and Unprepare, in turn with DEL alone")
    device = node.cluster.devices(BY_CLAIM)[-1]
    address = device["attributes"]["resource.kubernetes.io/pciBusID"]["string"]
    vf = node.machine.scan().by_address[address]
    unprepare: list[float] = []
    whole: list[float] = []
    alone: list[float] = []
    with closing(Driver(node.stage.folder / "kubelet")) as driver, _hosted(node.stage) as play:
        for number in range(-WARM_ROUNDS, rounds):
            for waits in (number % 2 == 0, number % 2 == 1):
                name = f"home-{number + WARM_ROUNDS}-{waits}".lower()
                claim = node.cluster.allocate(name, device, {"name": name, "uid": f"uid-of-{name}"})
                times = play.end_of(driver, claim, vf, waits=waits)
                node.cluster.remove(name)
                if number < 0:
                    continue
                if waits:
                    alone.append(times[0])
                else:
                    whole.append(times[0])
                    unprepare.append(times[1])
    return {
        **spread("unprepare_home", unprepare),
        **spread("del_unprepare_home", whole),
        **spread("del_home", alone),
    }


class _Play:
    def __init__(self, stage: Stage, program: Program, host: Host) -> None:
        self._stage = stage
        self._program = program
        self._host = host

    def end_of(self, driver: Driver, claim: api_pb2.Claim, vf: PciDevice, *, waits: bool) -> tuple[float, float]:
        """Lead a pod with a claim to its end. Milliseconds from DEL's start, and from Unprepare's, to the VF at home.

        `waits`: the VF is home before Unprepare is called.
        """
        assert vf.netdev is not None
        pod = f"K8S_POD_NAMESPACE=default;K8S_POD_NAME={claim.name};K8S_POD_UID=uid-of-{claim.name}"
        environment = {**self._stage.relay_environment, "CNI_IFNAME": "eth0", "CNI_ARGS": f"IgnoreUnknown=1;{pod}"}
        contender = Contender(self._program, self._host, CHAINED, environment, vf.netdev.name)
        contender.make_pod(self._stage.folder / "netns" / claim.name)
        try:
            driver.prepare(claim)
            pause()
            contender.add(claim.name)
            pause()
            deleted = contender.delete(claim.name)
            if waits:
                _await_home(contender)
                home = time.perf_counter()
                driver.unprepare(claim)
                return (home - deleted.began) * 1000, 0.0
            asked = time.perf_counter()
            driver.unprepare(claim)
            ended = time.perf_counter()
            if not contender.in_host():
                raise RuntimeError(f"Unprepare was answered, and {contender.link} is not home")
            return (ended - deleted.began) * 1000, (ended - asked) * 1000
        finally:
            contender.end_pod()


@contextmanager
def _hosted(stage: Stage) -> Iterator[_Play]:
    with ExitStack() as stack:
        host = Host(fresh=False)
        stack.callback(host.close)
        program = Program(stage.relay.resolve())
        stack.callback(program.close)
        yield _Play(stage, program, host)


def _await_status(cluster: Cluster, claim: str) -> None:
    wait("the claim's status", lambda: cluster.has_status(claim) or None)


def _await_home(contender: Contender) -> None:
    deadline = time.perf_counter() + HOME_SECONDS
    while not contender.in_host():
        if time.perf_counter() > deadline:
            raise RuntimeError(f"{contender.link} is not back {HOME_SECONDS:g} s after its DEL")
        time.sleep(0.001)


def _create(stage: Stage, name: str) -> None:
    """Have kubelet see a pod that names a claim of its own name."""
    spec = {
        "resourceClaims": [{"name": "nic", "resourceClaimName": name}],
        "containers": [{"name": "worker", "resources": {"claims": [{"name": "nic"}]}}],
    }
    metadata = {"namespace": "default", "name": name, "uid": f"uid-of-{name}"}
    text = yaml.safe_dump({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    (stage.folder / "manifests" / f"{name}.yaml").write_text(text)


def _started(stage: Stage, name: str) -> float:
    """Wait until a pod runs, and return the milliseconds that this took kubelet."""
    pause()
    return float(stage.await_pod(name)["timings_ms"]["start"])


def _written(stage: Stage) -> tuple[float, float]:
    """Tell how often the agent wrote slices, and claims."""
    return _accepted(stage, "ResourceSlice"), _accepted(stage, "ResourceClaim")


def _accepted(stage: Stage, kind: str) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(stage.fetch("/metrics"))
        for sample in family.samples
        if sample.name == "nodefabric_api_writes_total" and sample.labels == {"object": kind, "outcome": "accepted"}
    )
