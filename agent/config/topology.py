"""What of this node's topology is published for schedulers, and how often; which labels it gets, from which facts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.config import declare
from agent.config.reader import Reader, is_mapping, shown
from agent.model.device import is_pci_address

OF_NODE = (
    "rails",
    "planes",
    "hca-count",
    "hca-model",
    "hca-firmware",
    "gpu-count",
    "gpu-model",
    "nvlink-domain",
    "node-name",
)
OF_NIC = ("leaf-switch", "leaf-chassis", "leaf-port", "hca-model", "hca-firmware", "node-guid")
FACTS = tuple(dict.fromkeys((*OF_NODE, *OF_NIC, "file", "text")))
NEED_LLDP = frozenset({"leaf-switch", "leaf-chassis", "leaf-port"})
PER_NIC_ONLY = frozenset({"leaf-port", "node-guid"})
"""One value for all NICs would say nothing, so the key must have a place for each."""
NIC, RAIL, PLANE = "{nic}", "{rail}", "{plane}"
"""In a key: the PCI address of the NIC, dashes for colons; the number of its rail; which plane of the rail it is."""
DESTINATIONS = ("node", "nfd")
NFD_FILE = Path("/etc/kubernetes/node-feature-discovery/features.d/nodefabric")

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(
    r"(?=.{1,316}$)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*/" + _LABEL, re.ASCII
)
_VALUE = re.compile(_LABEL, re.ASCII)
_KEY_SCHEMA = {"anyOf": [{"enum": [f for f in FACTS if f not in ("file", "text")]}, {"type": "object"}]}
INFORMERS = ("dedicated", "shared", "podresources")
METHODS = ("all", "with-exclusive-resources")
RULES = ("v0.34", "master")
_ANNOTATION = re.compile(
    r"(?=.{1,316}$)[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class LabelRule:
    """One label: where its value comes from."""

    key: str
    """May have `{nic}`, or `{rail}` and `{plane}`, in it, for a label per NIC."""
    fact: str
    pattern: str | None = None
    """Its first group in the fact is the value; a fact that it does not match has none."""
    path: Path | None = None
    """For fact `file`: whose first line is the value."""
    text: str | None = None
    """For fact `text`: the value."""

    @property
    def is_per_nic(self) -> bool:
        """Whether there is a label for each NIC."""
        return NIC in self.key or RAIL in self.key


def _netdev(text: str) -> str:
    if not re.fullmatch(r"[^\s/]{1,15}", text) or text in (".", ".."):
        raise ValueError(text)
    return text


def _adapter(text: str) -> str:
    return text.lower() if is_pci_address(text.lower()) else _netdev(text)


def _planes(value: Any) -> tuple[str, ...]:
    """Read an entry of `rails`: an adapter, or one for each plane."""
    listed = value if isinstance(value, list) and value else [value]
    if not all(isinstance(each, str) for each in listed):
        raise ValueError(value)
    return tuple(map(_adapter, listed))


@dataclass(frozen=True, slots=True)
class Labels:
    keys: tuple[LabelRule, ...] = ()
    to: str = declare.choice("node", DESTINATIONS, about="Patch the Node, or write a file for NFD's worker")
    nfd_file: Path = declare.path(NFD_FILE, about="The file for NFD's worker")

    @property
    def need_lldp(self) -> bool:
        """Whether any label comes from what the switches say."""
        return any(rule.fact in NEED_LLDP for rule in self.keys)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Which of the node's pods count for the fingerprint in the NodeResourceTopology object."""

    pods: str = "dedicated"
    """As the scheduler's informer sees them (dedicated, shared), or those that kubelet lists (podresources)."""
    method: str = "all"
    rules: str = "v0.34"
    """Whose rules `with-exclusive-resources` follows: those of scheduler-plugins up to v0.34.7, or of its master."""


def _fingerprint(reader: Reader) -> Fingerprint:
    plain = Fingerprint()
    method = reader.choice("method", plain.method, METHODS, about="Which of these pods count")
    pods = reader.choice(
        "pods",
        plain.pods,
        INFORMERS,
        about="The scheduler plugin's informerMode, with a watch of pods; or the pods that kubelet lists, which needs"
        " no right to list pods",
    )
    rules = reader.choice(
        "rules",
        plain.rules,
        RULES,
        about="Which scheduler-plugins runs, for with-exclusive-resources: up to v0.34.7, or its master branch of 2026",
    )
    reader.done()
    return Fingerprint(pods, method, rules)


def _labels(reader: Reader) -> Labels:
    about = (
        "Label key → fact. In the key {nic} stands for each NIC's PCI address, {rail} and {plane} for those of its rail"
    )
    schema = {"type": "object", "additionalProperties": _KEY_SCHEMA}
    keys: Mapping[Any, Any] = reader.take("keys", {}, "a mapping", is_mapping, schema=schema, about=about)
    rules = tuple(rule for key, value in keys.items() if (rule := _rule(reader, key, value)) is not None)
    found = Labels(keys=rules, **declare.read_fields(Labels, reader))
    reader.done()
    return found


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """How the live bandwidth of ports is told."""

    sample_seconds: float = declare.seconds(15.0, 0, 3600, about="How often port counters are read; 0: never")
    annotation: str | None = declare.text(
        None,
        "domain/name",
        _ANNOTATION,
        about="Annotation of the Node that tells the load of the ports; default: none",
    )
    annotation_seconds: float = declare.seconds(
        600.0, 60, 86400, about="The annotation tells the mean of so long, and is written at most once in so long"
    )

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """List what does not go together: a key, and what is wrong there."""
        if self.annotation is not None and not 0 < self.sample_seconds <= self.annotation_seconds:
            yield "annotation", "needs sampleSeconds above 0 and at most annotationSeconds"


@dataclass(frozen=True, slots=True)
class Topology:
    publish: bool = declare.flag(False, about="Publish a NodeResourceTopology object for this node")
    volcano: bool = declare.flag(False, about="Publish a Numatopology object for this node (Volcano)")
    coalesce_seconds: float = declare.seconds(2.0, 0, 60, about="Changes within this time make one write")
    settle_seconds: float = declare.seconds(
        10.0,
        0,
        600,
        about="One more write of the NodeResourceTopology comes this long after the last change; longer than the"
        " scheduler plugin's cacheResyncPeriodSeconds; 0: none",
    )
    heartbeat_seconds: float = declare.seconds(
        600.0, 10, 86400, about="Read what is published this often, and write it again if somebody changed it"
    )
    start_spread_seconds: float = declare.seconds(
        60.0, 0, 600, about="The first write comes at a random moment within this time"
    )
    """So that a cluster's nodes do not write at once."""
    kubelet_config: Path = declare.path(
        Path("/var/lib/kubelet/config.yaml"),
        about="The kubelet's configuration, to read its topology policy from",
    )
    kubelet_config_dir: Path | None = declare.path(None, about="The kubelet's folder of drop-ins, if any")
    fingerprint: Fingerprint = declare.section(
        Fingerprint, by=_fingerprint, about="Which pods count for the NodeResourceTopology's fingerprint"
    )
    labels: Labels = declare.section(Labels, by=_labels, about="Labels for the node, made of stable facts")
    lldp_netdevs: tuple[str, ...] = declare.strings(
        "an interface name",
        _netdev,
        about="Where to listen for the switch's name; default: each adapter with an RDMA device",
    )
    rails: tuple[tuple[str, ...], ...] = declare.listed(
        "the interface or the PCI address of an adapter, or a list of such for the planes of one rail",
        _planes,
        schema={"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"type": "string"}}]},
        about="The adapters to the fabric, by interface or PCI address, rail 0 first, where a rail has planes a list of"
        " these; default: those that resources take (if none does, all) with an RDMA device that are nearest to a GPU"
        " (without GPUs all of these), by PCI address",
    )
    bandwidth: Bandwidth = declare.section(Bandwidth, about="Live bandwidth of the ports")

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

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """List what does not go together: a key, and what is wrong there."""
        if self.fingerprint.pods == "podresources" and self.fingerprint.method != "all":
            yield "fingerprint.method", "must be all with pods: podresources, which does not tell what pods ask for"
        first: dict[str, int] = {}
        for i, name in ((i, name) for i, planes in enumerate(self.rails) for name in planes):
            if name in first:
                yield f"rails[{i}]", f"{name} is rail {first[name]} already: name each adapter once"
            first.setdefault(name, i)


def _rule(reader: Reader, key: Any, value: Any) -> LabelRule | None:
    where = f'keys."{key}"'
    plain = str(key).replace(NIC, "0000-00-00.0").replace(RAIL, "00").replace(PLANE, "0")
    if not isinstance(key, str) or not _KEY.fullmatch(plain):
        words = f"{NIC}, or {RAIL} and {PLANE},"
        reader.note("keys", f"a label key must be domain/name, perhaps with {words} in the name, is {shown(key)}")
        return None
    inner = Reader({} if isinstance(value, str) else value, reader.at(where), reader.problems)
    plainly = Reader({where: value}, reader.path, reader.problems)
    holder, at = (plainly, where) if isinstance(value, str) else (inner, "fact")
    fact = holder.choice(at, None, FACTS, about="Where the label's value comes from")
    path = inner.path_to("path", None, about="For fact file: the file whose first line is the value")
    text = inner.text("text", None, "a label value", _VALUE, about="For fact text: the value")
    pattern = inner.take(
        "pattern",
        None,
        "a regular expression with one group",
        _is_pattern,
        schema={"type": "string"},
        about="The first group of this regular expression in the fact is the value",
    )
    inner.done()
    if at not in holder.value:
        holder.note(at, "is missing")
    if fact is None:
        return None
    for name, its_fact in (("path", "file"), ("text", "text")):
        if fact == its_fact and name not in inner.value:
            inner.note(name, "is missing")
        elif fact != its_fact and name in inner.value:
            inner.note(name, f"is for fact {its_fact} only")
    rule = LabelRule(key, fact, pattern, path, text)
    if PLANE in key and not rule.is_per_nic:
        holder.note(at, f"{PLANE} in the key needs {RAIL}, as in nodefabric.io/leaf.{RAIL}-{PLANE}")
    elif rule.is_per_nic and fact not in OF_NIC:
        holder.note(at, f"{fact} is not told for each NIC: leave {NIC if NIC in key else RAIL} out of the key")
    elif not rule.is_per_nic and fact in PER_NIC_ONLY:
        holder.note(at, f"{fact} is told for each NIC: put {NIC} into the key, as in nodefabric.io/{fact}.{NIC}")
    return rule


def _is_pattern(value: Any) -> bool:
    if not isinstance(value, str) or len(value) > 200:
        return False
    try:
        return re.compile(value).groups == 1
    except (re.error, OverflowError):
        return False
