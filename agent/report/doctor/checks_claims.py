"""Checks of what claims (DRA) need. They say nothing where no resource is offered to claims. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from agent.config import Config, Resource
from agent.model.listed import some
from agent.report.doctor.claim_facts import ClaimFacts, DeviceClass
from agent.report.doctor.facts import Facts
from agent.report.doctor.findings import Finding, Severity

CHECK = "claims"
OLDEST_KUBELET = (1, 32)
"""What an API server of Kubernetes 1.34, the first with resource.k8s.io/v1, may have on its nodes is no older."""
GATED_BEFORE = (1, 34)
"""kubelet has the feature on from there."""
STUCK_SECONDS = 900.0
MOUNTS = "let the container see it: the chart does so by itself, with kustomize add the component dra"
_RESOURCE = re.compile(r"""\.resource\s*==\s*["']([^"']+)["']""")
_GATES = {
    "taints": (
        "taints are dropped: devices that are unhealthy are left out of the slices instead",
        "DRADeviceTaints",
    ),
    "capacity": (
        "shared capacity is dropped",
        "DRAConsumableCapacity",
    ),
    "listAttributes": (
        "lists of attributes are refused: of several nearest GPUs the first is told",
        "DRAListTypeAttributes",
    ),
}


def driver(facts: Facts) -> Iterator[Finding]:
    """Whether kubelet can find the driver, and has."""
    config, found = facts.config, facts.claims
    if config is None or found is None:
        return
    missing = [(path, wrong) for path, wrong in found.folders if wrong is not None]
    for path, why in missing:
        remedy = f"start kubelet, or name its folder with kubeletDir; {MOUNTS}"
        yield Finding(CHECK, Severity.ERROR, f"{path}, which kubelet and the DRA driver share, {why}", remedy)
    for path, wrong in found.sockets:
        if wrong is not None:
            remedy = "restart the agent: it removes what earlier ones have left"
            yield Finding(CHECK, Severity.WARNING, f"nobody answers at {path}: {wrong}", remedy)
    answering = [path for path, wrong in found.sockets if wrong is None]
    if len(answering) > 1:
        text = f"{' and '.join(answering)} both answer: more than one agent serves {config.dra.driver} on this node"
        yield Finding(CHECK, Severity.ERROR, text, "let one DaemonSet run here, or give each a dra.driver of its own")
    version = _version(found.cluster.kubelet_version)
    if version is not None and version < OLDEST_KUBELET:
        text = f"kubelet is {found.cluster.kubelet_version}, and claims need 1.32, in a cluster of 1.34 or later"
        yield Finding(CHECK, Severity.ERROR, text, "upgrade kubelet, or offer devicePlugin on this node")
    if found.state is None:
        yield Finding(CHECK, Severity.UNSEEN, "how the driver stands with kubelet: the agent does not tell")
    elif not found.state.is_registered:
        text = f"kubelet does not know the DRA driver {found.state.name}: {found.state.problem}"
        remedy = "kubeletDir must be kubelet's own folder; journalctl -u kubelet tells what it does not like"
        if version is not None and version < GATED_BEFORE:
            remedy = (
                "in a cluster of Kubernetes 1.34 or later set featureGates.DynamicResourceAllocation: true in kubelet's"
                " configuration, and restart it; an older cluster has no claims for this agent: offer devicePlugin"
            )
        yield Finding(CHECK, Severity.ERROR, text, remedy)
    elif not missing:
        yield Finding(CHECK, Severity.FINE, f"kubelet has the driver {found.state.name} registered")


def slices(facts: Facts) -> Iterator[Finding]:
    """Whether the scheduler sees the node's devices, and all that they need."""
    config, found = facts.config, facts.claims
    if config is None or found is None or found.state is None:
        return
    state = found.state
    for word in sorted(state.dropped):
        text, gate = _GATES.get(word, (f"{word} is dropped", "that it belongs to"))
        severity, remedy = Severity.NOTE, f"enable the feature gate {gate} in the cluster (Kubernetes 1.36 has most on)"
        if word == "capacity":
            affected = [r.name for r in config.claimable if _needs_capacity(r, config)]
            if not affected:
                continue
            severity, text = Severity.ERROR, f"{text}: {some(affected)} can offer nothing"
            remedy += ", or set dra.shares: devices"
        yield Finding(CHECK, severity, f"of ResourceSlices {text}", remedy)
    if state.slices is None:
        yield Finding(
            check=CHECK,
            severity=Severity.WARNING,
            text="nobody knows yet whether the node's ResourceSlices are at the API server",
            remedy="nodefabric status says what keeps the agent from writing them",
        )
    counts = dict.fromkeys((r.name for r in config.claimable), 0)
    for resource, _, count in state.devices:
        counts[resource] = counts.get(resource, 0) + count
    bare = [resource for resource, count in counts.items() if not count]
    if bare:
        text = f"no device of this node is offered to claims for {some(bare)}"
        yield Finding(CHECK, Severity.WARNING, text, "nodefabric topology shows what there is: does `select` take it?")
    if state.slices is not None and not bare:
        yield Finding(CHECK, Severity.FINE, f"{sum(counts.values())} devices in {state.slices} slices")


def classes(facts: Facts) -> Iterator[Finding]:
    """Whether each resource has a DeviceClass by which pods can ask for it, and each class a resource.

    Read from the text of the classes' expressions: nobody here evaluates CEL.
    """
    config, found = facts.config, facts.claims
    if config is None or found is None:
        return
    if found.cluster.classes is None:
        yield Finding(CHECK, Severity.UNSEEN, f"the cluster's DeviceClasses: {found.cluster.problem}")
        return
    ours = [one for one in found.cluster.classes if _is_ours(one, config)]
    bare = [r.name for r in config.claimable if not any(_selects(one, r.name) for one in ours)]
    if bare:
        yield Finding(
            check=CHECK,
            severity=Severity.WARNING,
            text=f"no DeviceClass selects {some(bare)}: no claim can ask for it",
            remedy="let the chart write the classes (deviceClasses.enabled), or write one as docs/dra.md shows",
        )
    offered = {resource.name for resource in config.resources}
    for one in ours:
        named = {name for expression in one.expressions for name in _RESOURCE.findall(expression)}
        if named and not named & offered:
            text = f"the DeviceClass {one.name} selects {some(sorted(named))}, which this node does not offer"
            yield Finding(CHECK, Severity.NOTE, text, "fine if other nodes do; else delete the class or correct it")
    if not bare:
        yield Finding(CHECK, Severity.FINE, "each resource has a DeviceClass")


def held(facts: Facts) -> Iterator[Finding]:
    """Whether the prepared claims are somebody's, and go back when they are asked for."""
    found = facts.claims
    if found is None or found.state is None:
        return
    lost = [claim.name for claim in found.claims if not claim.pods and _is_old(found, claim.since)]
    stuck = [c.name for c in found.claims if c.state == "unpreparing" and _is_old(found, c.since)]
    if lost:
        yield Finding(
            check=CHECK,
            severity=Severity.WARNING,
            text=f"{some(lost)}: prepared, and for no pod that is known",
            remedy="kubectl get resourceclaim shows whom it is reserved for; the agent takes back what nobody has",
        )
    if stuck:
        yield Finding(
            check=CHECK,
            severity=Severity.WARNING,
            text=f"{some(stuck)}: on its way back for more than {STUCK_SECONDS / 60:.0f} minutes",
            remedy="nodefabric events says which sandbox has its device; end that pod, or the sandbox with crictl",
        )
    if not lost and not stuck:
        told = f"{len(found.claims)} prepared, each for a pod" if found.claims else "none is prepared"
        yield Finding(CHECK, Severity.FINE, told)


def _is_old(found: ClaimFacts, since: float) -> bool:
    return found.now - since > STUCK_SECONDS


def _needs_capacity(resource: Resource, config: Config) -> bool:
    return config.dra.shares == "capacity" and (resource.binding == "late" or resource.kind == "hca")


def _is_ours(one: DeviceClass, config: Config) -> bool:
    return any(re.search(rf"""["']{re.escape(config.dra.driver)}["']""", text) for text in one.expressions)


def _selects(one: DeviceClass, resource: str) -> bool:
    """Tell whether a class may select a resource: it names it, or it does not go by resources."""
    text = " ".join(one.expressions)
    return ".resource" not in text or re.search(rf"""["']{re.escape(resource)}["']""", text) is not None


def _version(text: str) -> tuple[int, int] | None:
    found = re.match(r"v?(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found is not None else None
