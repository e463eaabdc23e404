"""Checks of what runs on the node: the container runtime, kubelet, the CNI plugin, the agent. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from agent.report.doctor.facts import UNLIMITED, Facts
from agent.report.doctor.findings import Finding, Severity

PLUGIN = "nodefabric"
ENOUGH_MEMLOCK_BYTES = 16 << 30
"""What is registered with an adapter is locked; a training job registers gigabytes."""
_LEASES = {"host-local": "host-local", "static": "static", "dhcp": "dhcp", "whereabouts": "whereabouts"}


def configuration(facts: Facts) -> Iterator[Finding]:
    """The agent's own configuration."""
    if facts.config is None:
        for problem in facts.config_problems or ("is not there",):
            yield Finding(
                check="config",
                severity=Severity.ERROR,
                text=f"{facts.config_path}: {problem}",
                remedy="nodefabric check-config FILE tells more; name another file with --config",
            )
    elif not facts.config.resources:
        yield Finding(
            check="config",
            severity=Severity.WARNING,
            text=f"{facts.config_path} has no resources: the agent offers nothing",
            remedy="write some under `resources`",
        )
    else:
        yield Finding("config", Severity.FINE, f"{len(facts.config.resources)} resources")


def cdi(facts: Facts) -> Iterator[Finding]:
    """Whether the runtime resolves CDI names, and the agent can write what they stand for."""
    runtime = facts.runtime
    resources = facts.config.resources if facts.config is not None else ()
    claims = any(r.offer == "dra" for r in resources)
    late = claims or any(r.binding == "late" for r in resources)
    by_name = facts.config is not None and facts.config.cdi_names and any(r.kind != "gpu" for r in resources)
    who = "claims need" if claims else "late binding needs" if late else "units that stay true after a reboot need"
    if (late or by_name) and facts.config is not None and facts.cdi_read_only:
        yield Finding(
            check="cdi",
            severity=Severity.ERROR if late else Severity.WARNING,
            text=f"{facts.config.cdi_dir} is mounted read-only, and {who} to write to it",
            remedy="mount it read-write, as base and chart do" + ("" if late else ", or set cdiNames: false"),
        )
    if runtime is None:
        told = "neither containerd's nor CRI-O's socket or configuration is to be seen"
        if facts.config is not None and facts.config.runtime_socket is not None:
            told = f"{facts.config.runtime_socket}, which runtimeSocket names, is not to be seen"
        yield Finding("cdi", Severity.UNSEEN, told)
        return
    if runtime.problem:
        yield Finding("cdi", Severity.ERROR, f"the runtime's configuration cannot be read: {runtime.problem}")
        return
    named = f"{runtime.name} {runtime.version}".rstrip()
    if runtime.resolves_cdi is None:
        told = f"{named} resolves CDI names if its configuration, wherever that is, says enable_cdi = true"
        yield Finding("cdi", Severity.UNSEEN, told)
    elif not runtime.resolves_cdi:
        severity = Severity.ERROR if late else Severity.WARNING
        why = f"{who} it" if late or by_name else "GPUs by CDI name and late binding need it"
        plugin = "io.containerd.cri.v1.runtime" if (runtime.config_version or 0) >= 3 else "io.containerd.grpc.v1.cri"
        yield Finding(
            check="cdi",
            severity=severity,
            text=f"{named} does not resolve CDI names: {why}",
            remedy=f'set enable_cdi = true below plugins."{plugin}" in {runtime.cdi_file}, and restart containerd'
            + ("" if late or not by_name else "; or set cdiNames: false"),
        )
    else:
        yield Finding("cdi", Severity.FINE, f"{named} resolves CDI names")


def memlock(facts: Facts) -> Iterator[Finding]:
    """How much memory containers may lock: RDMA registers memory, which locks it."""
    limit = facts.runtime.memlock_bytes if facts.runtime is not None else None
    if limit is None:
        yield Finding("memlock", Severity.UNSEEN, "neither the runtime's process nor its systemd unit is to be seen")
    elif limit == UNLIMITED or limit >= ENOUGH_MEMLOCK_BYTES:
        told = "no limit" if limit == UNLIMITED else f"{limit >> 30} GiB"
        yield Finding("memlock", Severity.FINE, f"containers inherit {told} from the runtime")
    else:
        yield Finding(
            "memlock",
            Severity.WARNING,
            f"containers inherit a limit of {limit >> 10} KiB of locked memory: registering memory with an adapter"
            " fails unless they have CAP_IPC_LOCK",
            "write [Service] LimitMEMLOCK=infinity into a drop-in of the runtime's unit and restart it, or give pods"
            " the capability IPC_LOCK",
        )


def kubelet(facts: Facts) -> Iterator[Finding]:
    """kubelet's sockets, and how it aligns what pods get."""
    if not facts.kubelet_sockets:
        yield Finding("kubelet", Severity.UNSEEN, "kubelet's folder is not to be seen")
        return
    broken = [(path, wrong) for path, wrong in facts.kubelet_sockets if wrong is not None]
    for path, wrong in broken:
        yield Finding(
            check="kubelet",
            severity=Severity.ERROR,
            text=f"nobody answers at {path}: {wrong}",
            remedy="start kubelet, or name its folder with kubeletDir (as root)",
        )
    if not broken:
        yield Finding("kubelet", Severity.FINE, "listens for device plugins, and tells what pods hold")
    if facts.topology_policy == "none" and facts.snapshot.all_gpus and len(facts.snapshot.numa_nodes) > 1:
        yield Finding(
            "kubelet",
            Severity.NOTE,
            "topologyManagerPolicy is none: pods get a NIC beside their GPU by preference, and CPUs from anywhere",
            "set topologyManagerPolicy: best-effort (or restricted) and cpuManagerPolicy: static in kubelet's"
            " configuration",
        )


def cni(facts: Facts) -> Iterator[Finding]:
    """Whether the runtime finds the plugin, and a network calls it."""
    if facts.plugins is None:
        yield Finding("cni", Severity.UNSEEN, "/opt/cni/bin is not to be seen")
    elif PLUGIN not in facts.plugins:
        yield Finding(
            check="cni",
            severity=Severity.ERROR,
            text=f"/opt/cni/bin has no plugin {PLUGIN}: pods with VFs will not start",
            remedy="nodefabric install-cni (the DaemonSet's first container does that)",
        )
    else:
        yield Finding("cni", Severity.FINE, f"/opt/cni/bin/{PLUGIN} is in place")
    yield from _networks(facts)
    yield from _leases(facts)


def agent(facts: Facts) -> Iterator[Finding]:
    """Whether the agent runs, and what keeps it from its work."""
    if not facts.agent:
        yield Finding("agent", Severity.UNSEEN, "the agent is asked only on its own node, with its configuration")
        return
    wrong = [(path, text) for path, text in facts.agent if text is not None]
    for path, text in wrong:
        severity = Severity.ERROR if path == "healthz" else Severity.WARNING
        yield Finding("agent", severity, text, "nodefabric status and the agent's log tell more")
    if not wrong:
        yield Finding("agent", Severity.FINE, "runs, and is ready")


def _networks(facts: Facts) -> Iterator[Finding]:
    if facts.networks is None or not facts.networks:
        text = "/etc/cni/net.d " + ("is not to be seen" if facts.networks is None else "holds no network")
        severity = Severity.UNSEEN if facts.networks is None else Severity.WARNING
        yield Finding("cni", severity, text, "install the cluster network first" if facts.networks is not None else "")
        return
    first = facts.networks[0]
    if PLUGIN in first.types:
        yield Finding("cni", Severity.FINE, f"{first.name} calls {PLUGIN}")
    elif any("multus" in kind for network in facts.networks for kind in network.types):
        yield Finding("cni", Severity.FINE, "Multus is there; it calls the plugin by NetworkAttachmentDefinitions")
    elif facts.config is not None and any(r.network for r in facts.config.resources):
        yield Finding(
            "cni",
            Severity.WARNING,
            f"{first.name}, the network that the runtime uses, does not call {PLUGIN}: granted VFs stay in the host",
            "nodefabric install-cni --chain, or use Multus",
        )


def _leases(facts: Facts) -> Iterator[Finding]:
    """The plugins that give out addresses for the configured networks."""
    if facts.plugins is None or facts.config is None:
        return
    for network in facts.config.networks:
        kind = (network.setup.ipam or {}).get("type")
        if kind is not None and kind not in facts.plugins:
            yield Finding(
                check="cni",
                severity=Severity.ERROR,
                text=f"the network {network.name} takes its addresses from {kind}, which /opt/cni/bin has not",
                remedy=f"install the CNI plugin {kind}" if kind in _LEASES else f"install {kind}, or correct ipam.type",
            )
