"""What of this node's topology is published for schedulers, and how often."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from agent.config.labels import Labels, read_labels
from agent.config.reader import Reader

INFORMERS = ("dedicated", "shared", "podresources")
METHODS = ("all", "with-exclusive-resources")
_ANNOTATION = re.compile(
    r"(?=.{1,316}$)[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Which of the node's pods count for the fingerprint in the NodeResourceTopology object."""

    pods: str = "podresources"
    """As the scheduler's informer sees them (dedicated, shared), or those that kubelet lists (podresources)."""
    method: str = "all"


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """How the live bandwidth of ports is told."""

    sample_seconds: float = 15.0
    """How often the counters are read; 0: never."""
    annotation: str | None = None
    """Key of the Node's annotation that tells the load of the ports; None: there is none."""
    annotation_seconds: float = 600.0
    """The load is the mean of so long, and the annotation is written at most once in so long."""


@dataclass(frozen=True, slots=True)
class Topology:
    publish: bool = False
    """Publish a NodeResourceTopology object for this node."""
    volcano: bool = False
    """Publish a Numatopology object for this node."""
    coalesce_seconds: float = 2.0
    heartbeat_seconds: float = 600.0
    start_spread_seconds: float = 60.0
    """The first write comes at a random moment within this time, so that a cluster's nodes do not write at once."""
    kubelet_config: Path = Path("/var/lib/kubelet/config.yaml")
    kubelet_config_dir: Path | None = None
    fingerprint: Fingerprint = Fingerprint()
    labels: Labels = field(default_factory=Labels)
    lldp_netdevs: tuple[str, ...] = ()
    """Interfaces to listen on for the switch's name; empty: each adapter with an RDMA device."""
    bandwidth: Bandwidth = Bandwidth()

    @property
    def needs_api(self) -> bool:
        """Whether anything goes to the API server."""
        return self.publish or self.volcano or self.writes_node

    @property
    def writes_node(self) -> bool:
        """Whether the Node object itself gets labels or an annotation."""
        return bool(self.labels.keys and self.labels.to == "node") or self.bandwidth.annotation is not None

    @property
    def watches_pods(self) -> bool:
        """Whether the pods of the node are watched."""
        return self.publish and self.fingerprint.pods != "podresources"


def read_topology(reader: Reader) -> Topology:
    """Read the section `topology`."""
    plain = Topology()
    found = Topology(
        publish=reader.flag("publish", plain.publish, about="Publish a NodeResourceTopology object for this node"),
        volcano=reader.flag("volcano", plain.volcano, about="Publish a Numatopology object for this node (Volcano)"),
        coalesce_seconds=reader.seconds(
            "coalesceSeconds", plain.coalesce_seconds, 0, 60, about="Changes within this time make one write"
        ),
        heartbeat_seconds=reader.seconds(
            "heartbeatSeconds",
            plain.heartbeat_seconds,
            10,
            86400,
            about="Read what is published this often, and write it again if somebody changed it",
        ),
        start_spread_seconds=reader.seconds(
            "startSpreadSeconds",
            plain.start_spread_seconds,
            0,
            600,
            about="The first write comes at a random moment within this time",
        ),
        kubelet_config=reader.path_to(
            "kubeletConfig", plain.kubelet_config, about="The kubelet's configuration, to read its topology policy from"
        ),
        kubelet_config_dir=reader.path_to("kubeletConfigDir", None, about="The kubelet's folder of drop-ins, if any"),
        fingerprint=_fingerprint(
            reader.section("fingerprint", about="Which pods count for the NodeResourceTopology's fingerprint")
        ),
        labels=read_labels(reader.section("labels", about="Labels for the node, made of stable facts")),
        lldp_netdevs=reader.strings(
            "lldpNetdevs",
            "an interface name",
            _netdev,
            about="Where to listen for the switch's name; default: each adapter with an RDMA device",
        ),
        bandwidth=_bandwidth(reader.section("bandwidth", about="Live bandwidth of the ports")),
    )
    if found.fingerprint.pods == "podresources" and found.fingerprint.method != "all":
        reader.note(
            "fingerprint.method",
            "must be all with pods: podresources, which does not tell what pods ask for",
        )
    return found


def _fingerprint(reader: Reader) -> Fingerprint:
    plain = Fingerprint()
    method = reader.choice("method", plain.method, METHODS, about="Which of these pods count")
    pods = reader.choice(
        "pods",
        plain.pods if method == plain.method else "dedicated",  # kubelet does not tell what the method asks for
        INFORMERS,
        about="What kubelet lists, or the scheduler's informerMode, with a watch of pods (dedicated by default where"
        " the method is not all)",
    )
    reader.done()
    return Fingerprint(pods, method)


def _bandwidth(reader: Reader) -> Bandwidth:
    plain = Bandwidth()
    found = Bandwidth(
        sample_seconds=reader.seconds(
            "sampleSeconds", plain.sample_seconds, 0, 3600, about="How often port counters are read; 0: never"
        ),
        annotation=reader.text(
            "annotation",
            None,
            "domain/name",
            _ANNOTATION,
            about="Annotation of the Node that tells the load of the ports; default: none",
        ),
        annotation_seconds=reader.seconds(
            "annotationSeconds",
            plain.annotation_seconds,
            60,
            86400,
            about="The annotation tells the mean of so long, and is written at most once in so long",
        ),
    )
    if found.annotation is not None and not 0 < found.sample_seconds <= found.annotation_seconds:
        reader.note("annotation", "needs sampleSeconds above 0 and at most annotationSeconds")
    reader.done()
    return found


def _netdev(text: str) -> str:
    if not re.fullmatch(r"[^\s/]{1,15}", text) or text in (".", ".."):
        raise ValueError(text)
    return text
