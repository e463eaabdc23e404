"""Checks of what runs on the node: agent, kubelet, container runtime, CNI plugin, and what claims (DRA) need. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from agent.model.printable import some
from agent.report.doctor.facts import (
    UNLIMITED,
    ContainerRuntime,
    Facts,
    Result,
    Severity,
    error,
    fine,
    note,
    unseen,
    warning,
)

PLUGIN = "nodefabric"
ENOUGH_MEMLOCK_BYTES = 16 << 30
"""What is registered with an adapter is locked; a training job registers gigabytes."""
_IPAM_PLUGINS = ("host-local", "static", "dhcp", "whereabouts")
OLDEST_KUBELET = (1, 32)
"""What an API server of Kubernetes 1.34, the first with resource.k8s.io/v1, may have on its nodes is no older."""
GATED_BEFORE = (1, 34)
"""kubelet has the feature on from there."""
STUCK_SECONDS = 900.0
MOUNTS = "let the container see it: the chart does so by itself, with kustomize add the component dra"


def configuration(facts: Facts) -> Iterator[Result]:
    """The agent's own configuration."""
    if facts.config is None:
        for problem in facts.config_problems or ("is not there",):
            yield error(f"{facts.config_path}: {problem}", "correct it, or name another file with --config")
    elif not facts.config.resources:
        yield warning(f"{facts.config_path} has no resources: the agent offers nothing", "write some under `resources`")
    else:
        yield fine(f"{len(facts.config.resources)} resources")


def cdi(facts: Facts) -> Iterator[Result]:
    """Whether the runtime resolves CDI names."""
    runtime = facts.runtime
    resources = facts.config.resources if facts.config is not None else ()
    claims = any(r.offer == "dra" for r in resources)
    late = claims or any(r.binding == "late" for r in resources)
    by_name = facts.config is not None and facts.config.cdi_names and any(r.kind != "gpu" for r in resources)
    who = "claims need" if claims else "late binding needs" if late else "units that stay true after a reboot need"
    if runtime is None:
        told = "neither containerd's nor CRI-O's socket is to be seen"
        if facts.config is not None and facts.config.runtime_socket is not None:
            told = f"{facts.config.runtime_socket}, which runtimeSocket names, is not to be seen"
        yield unseen(told)
        return
    if runtime.resolves_cdi is None:
        text = f"whether {runtime.name} resolves CDI names: {runtime.problem or 'it does not show its configuration'}"
        yield unseen(text, "run doctor as root on the host" if runtime.problem else "")
        return
    named = f"{runtime.name} {runtime.version}".rstrip()
    if runtime.resolves_cdi:
        yield fine(f"{named} resolves CDI names")
        return
    yield Result(
        Severity.ERROR if late else Severity.WARNING,
        f"{named} does not resolve CDI names: "
        + (f"{who} it" if late or by_name else "GPUs by CDI name and late binding need it"),
        _switch_cdi_on(runtime) + ("" if late or not by_name else "; or set cdiNames: false"),
    )


def _switch_cdi_on(runtime: ContainerRuntime) -> str:
    """containerd merges imported files, so only its own dump shows which one counts."""
    plugin = "io.containerd.cri.v1.runtime" if runtime.major >= 2 else "io.containerd.grpc.v1.cri"
    file = f"{runtime.config_file}, or a file that it imports" if runtime.config_file else "its configuration"
    return (
        f'set enable_cdi = true below plugins."{plugin}" in {file} (containerd config dump shows what it has loaded),'
        " and restart containerd"
    )


def memlock(facts: Facts) -> Iterator[Result]:
    """How much memory containers may lock: RDMA registers memory, which locks it."""
    limit = facts.runtime.memlock_bytes if facts.runtime is not None else None
    if limit is None:
        yield unseen("the runtime's process is not to be seen", "run doctor as root on the host")
    elif limit == UNLIMITED or limit >= ENOUGH_MEMLOCK_BYTES:
        told = "no limit" if limit == UNLIMITED else f"{limit >> 30} GiB"
        yield fine(f"containers inherit {told} from the runtime")
    else:
        yield warning(
            f"containers inherit a limit of {limit >> 10} KiB of locked memory: registering memory with an adapter"
            " fails unless they have CAP_IPC_LOCK",
            "write [Service] LimitMEMLOCK=infinity into a drop-in of the runtime's unit and restart it, or give pods"
            " the capability IPC_LOCK",
        )


def kubelet(facts: Facts) -> Iterator[Result]:
    """kubelet's sockets, and how it aligns what pods get."""
    if not facts.kubelet_sockets:
        yield unseen("kubelet's folder is not to be seen")
        return
    broken = [(path, wrong) for path, wrong in facts.kubelet_sockets if wrong is not None]
    for path, wrong in broken:
        yield error(f"nobody answers at {path}: {wrong}", "start kubelet, or name its folder with kubeletDir (as root)")
    if not broken:
        yield fine("listens for device plugins, and shows what pods hold")
    if facts.topology_policy == "none" and facts.snapshot.all_gpus and len(facts.snapshot.numa_nodes) > 1:
        yield note(
            "topologyManagerPolicy is none: pods get a NIC beside their GPU by preference, and CPUs from anywhere",
            "set topologyManagerPolicy: best-effort (or restricted) and cpuManagerPolicy: static in kubelet's"
            " configuration",
        )


def cni(facts: Facts) -> Iterator[Result]:
    """Whether the runtime finds the plugin, and a network calls it."""
    if facts.plugins is None:
        yield unseen("/opt/cni/bin is not to be seen")
    elif PLUGIN not in facts.plugins:
        yield error(
            f"/opt/cni/bin has no plugin {PLUGIN}: pods with VFs will not start",
            "nodefabric install-cni (the DaemonSet's first container does that)",
        )
    else:
        yield fine(f"/opt/cni/bin/{PLUGIN} is in place")
    yield from _networks(facts)
    yield from _leases(facts)


def agent(facts: Facts) -> Iterator[Result]:
    """Whether the agent runs, and what keeps it from its work."""
    if not facts.agent:
        yield unseen("the agent is asked only on its own node, with its configuration")
        return
    for name, what in facts.agent["obstacles"].items():
        severity = Severity.ERROR if name == "agent" else Severity.WARNING
        yield Result(severity, f"{name}: {what}", "nodefabric status and the agent's log tell more")
    if not facts.agent["obstacles"]:
        yield fine("runs, and is ready")


def _networks(facts: Facts) -> Iterator[Result]:
    if facts.networks is None or not facts.networks:
        text = "/etc/cni/net.d " + ("is not to be seen" if facts.networks is None else "holds no network")
        severity = Severity.UNSEEN if facts.networks is None else Severity.WARNING
        yield Result(severity, text, "install the cluster network first" if facts.networks is not None else "")
        return
    first = facts.networks[0]
    if PLUGIN in first.types:
        yield fine(f"{first.name} calls {PLUGIN}")
    elif any("multus" in kind for network in facts.networks for kind in network.types):
        yield fine("Multus is there; it calls the plugin by NetworkAttachmentDefinitions")
    elif facts.config is not None and any(r.network for r in facts.config.resources):
        yield warning(
            f"{first.name}, the network that the runtime uses, does not call {PLUGIN}: granted VFs stay in the host",
            "nodefabric install-cni --chain, or use Multus",
        )


def _leases(facts: Facts) -> Iterator[Result]:
    """The plugins that give out addresses for the configured networks."""
    if facts.plugins is None or facts.config is None:
        return
    for network in facts.config.networks:
        kind = (network.setup.ipam or {}).get("type")
        if kind is not None and kind not in facts.plugins:
            yield error(
                f"the network {network.name} takes its addresses from {kind}, which /opt/cni/bin has not",
                f"install the CNI plugin {kind}" + ("" if kind in _IPAM_PLUGINS else ", or correct ipam.type"),
            )


# ------------------------------------------------------------------- claims


def driver(facts: Facts) -> Iterator[Result]:
    """Whether kubelet can find the driver, and has."""
    config, found = facts.config, facts.claims
    if config is None or found is None:
        return
    missing = [(path, wrong) for path, wrong in found.folders if wrong is not None]
    for path, why in missing:
        remedy = f"start kubelet, or name its folder with kubeletDir; {MOUNTS}"
        yield error(f"{path}, which kubelet and the DRA driver share, {why}", remedy)
    for path, wrong in found.sockets:
        if wrong is not None:
            remedy = "restart the agent: it removes what earlier ones have left"
            yield warning(f"nobody answers at {path}: {wrong}", remedy)
    answering = [path for path, wrong in found.sockets if wrong is None]
    if len(answering) > 1:
        text = f"{' and '.join(answering)} both answer: more than one agent serves {config.dra.driver} on this node"
        yield error(text, "let one DaemonSet run here, or give each a dra.driver of its own")
    version = _version(found.kubelet_version)
    if version is not None and version < OLDEST_KUBELET:
        text = f"kubelet is {found.kubelet_version}, and claims need 1.32, in a cluster of 1.34 or later"
        yield error(text, "upgrade kubelet, or offer devicePlugin on this node")
    dra = facts.agent.get("dra")
    if dra is None:
        yield unseen("how the driver stands with kubelet: the agent does not tell")
    elif not dra["registered"]:
        text = f"kubelet does not know the DRA driver {dra['driver']}: {dra['problem']}"
        remedy = "kubeletDir must be kubelet's own folder; journalctl -u kubelet says what it does not accept"
        if version is not None and version < GATED_BEFORE:
            remedy = (
                "in a cluster of Kubernetes 1.34 or later set featureGates.DynamicResourceAllocation: true in kubelet's"
                " configuration, and restart it; an older cluster has no claims for this agent: offer devicePlugin"
            )
        yield error(text, remedy)
    elif not missing:
        yield fine(f"kubelet has the driver {dra['driver']} registered")


def slices(facts: Facts) -> Iterator[Result]:
    """Whether the scheduler sees the node's devices, and all that they need."""
    config, found = facts.config, facts.claims
    dra = facts.agent.get("dra")
    if config is None or found is None or dra is None:
        return
    if dra["slices"] is None:
        yield warning(
            "nobody knows yet whether the node's ResourceSlices are at the API server",
            "nodefabric status says what keeps the agent from writing them",
        )
    counts = dict.fromkeys((r.name for r in config.claimable), 0)
    for each in dra["devices"]:
        counts[each["resource"]] = counts.get(each["resource"], 0) + each["count"]
    bare = [resource for resource, count in counts.items() if not count]
    if bare:
        text = f"no device of this node is offered to claims for {some(bare)}"
        yield warning(text, "nodefabric topology shows what there is: does `select` take it?")
    if dra["slices"] is not None and not bare:
        yield fine(f"{sum(counts.values())} devices in {dra['slices']} slices")


def held(facts: Facts) -> Iterator[Result]:
    """Whether the prepared claims are somebody's, and go back when they are asked for."""
    found = facts.claims
    prepared = facts.agent.get("claims")
    if found is None or prepared is None:
        return
    old = [claim for claim in prepared if found.now - claim["since"] > STUCK_SECONDS]
    lost = [f"{claim['namespace']}/{claim['name']}" for claim in old if not claim["pods"]]
    stuck = [f"{claim['namespace']}/{claim['name']}" for claim in old if claim["state"] == "unpreparing"]
    if lost:
        yield warning(
            f"{some(lost)}: prepared, and for no pod that is known",
            "kubectl get resourceclaim shows whom it is reserved for; the agent takes back what nobody has",
        )
    if stuck:
        yield warning(
            f"{some(stuck)}: on its way back for more than {STUCK_SECONDS / 60:.0f} minutes",
            "nodefabric events says which sandbox has its device; end that pod, or the sandbox with crictl",
        )
    if not lost and not stuck:
        told = f"{len(prepared)} prepared, each for a pod" if prepared else "none is prepared"
        yield fine(told)


def _version(text: str) -> tuple[int, int] | None:
    found = re.match(r"v?(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found is not None else None
