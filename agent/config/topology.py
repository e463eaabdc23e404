"""What of this node's topology is published for schedulers, and how often; which labels it gets, from which facts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from agent.config.section import (
    FOLDER,
    Flag,
    Folder,
    Many,
    Refusal,
    Section,
    Through,
    choice,
    matching,
    must_be,
    refuse,
    seconds,
    shown,
    string,
    value,
    wrong,
)
from agent.model.device import is_pci_address

OF_NODE = (
    *("rails", "planes", "hca-count", "hca-model", "hca-firmware", "gpu-count", "gpu-model", "nvlink-domain"),
    "node-name",
)
OF_NIC = ("leaf-switch", "leaf-chassis", "leaf-port", "hca-model", "hca-firmware", "node-guid")
FACTS = tuple(dict.fromkeys((*OF_NODE, *OF_NIC, "file", "text")))
NEED_LLDP = frozenset({"leaf-switch", "leaf-chassis", "leaf-port"})
PER_NIC_ONLY = frozenset({"leaf-port", "node-guid"})
"""One value for all NICs would say nothing, so the key must have a place for each."""
NIC, RAIL, PLANE = "{nic}", "{rail}", "{plane}"
"""In a key: the PCI address of the NIC, dashes for colons; the number of its rail; which plane of the rail it is."""

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


def _planes(given: Any) -> tuple[str, ...]:
    """Read an entry of `rails`: an adapter, or one for each plane."""
    listed = given if isinstance(given, list) and given else [given]
    if not all(isinstance(each, str) for each in listed):
        raise ValueError
    return tuple(each.lower() if is_pci_address(each.lower()) else _netdev(each) for each in listed)


_RAIL = value(
    "the interface or the PCI address of an adapter, or a list of such for the planes of one rail",
    _planes,
    {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"type": "string"}}]},
)


def _pattern(given: str) -> str:
    try:
        is_fine = len(given) <= 200 and re.compile(given).groups == 1
    except (re.error, OverflowError):
        is_fine = False
    if not is_fine:
        raise ValueError
    return given


@dataclass(frozen=True, slots=True)
class Fact(Section):
    """Where a label's value comes from."""

    fact: Annotated[str, choice(*FACTS)]
    """Where the label's value comes from"""
    path: Annotated[Path | None, FOLDER] = None
    """For fact file: the file whose first line is the value"""
    text: Annotated[str | None, matching("a label value", _VALUE)] = None
    """For fact text: the value"""
    pattern: Annotated[str | None, string("a regular expression with one group", _pattern)] = None
    """The first group of this regular expression in the fact is the value"""

    def contradictions(self) -> Iterator[Refusal]:
        for name, its_fact in (("path", "file"), ("text", "text")):
            is_given = getattr(self, name) is not None
            if self.fact == its_fact and not is_given:
                yield Refusal((name,), "is missing")
            elif self.fact != its_fact and is_given:
                yield Refusal((name,), f"is for fact {its_fact} only")


def _expanded(given: Any) -> dict[str, Any]:
    """Check the keys of labels. A fact alone may stand for its mapping."""
    if not isinstance(given, dict):
        raise must_be("a mapping")
    for key in given:
        plain = str(key).replace(NIC, "0000-00-00.0").replace(RAIL, "00").replace(PLANE, "0")
        if not isinstance(key, str) or not _KEY.fullmatch(plain):
            words = f"{NIC}, or {RAIL} and {PLANE},"
            raise wrong(f"a label key must be domain/name, perhaps with {words} in the name, is {shown(key)}")
    unknown = [key for key, said in given.items() if isinstance(said, str) and said not in FACTS]
    refuse(Refusal((key,), f"must be one of {', '.join(FACTS)}, is {shown(given[key])}") for key in unknown)
    return {key: {"fact": said} if isinstance(said, str) else said for key, said in given.items()}


def _rules(found: Mapping[str, Fact]) -> tuple[LabelRule, ...]:
    rules = tuple(LabelRule(key, fact.fact, fact.pattern, fact.path, fact.text) for key, fact in found.items())
    refuse(Refusal((rule.key,), text) for rule in rules for text in _unfit(rule))
    return rules


def _unfit(rule: LabelRule) -> Iterator[str]:
    key, fact = rule.key, rule.fact
    if PLANE in key and not rule.is_per_nic:
        yield f"{PLANE} in the key needs {RAIL}, as in nodefabric.io/leaf.{RAIL}-{PLANE}"
    elif rule.is_per_nic and fact not in OF_NIC:
        yield f"{fact} is not known for each NIC: leave {NIC if NIC in key else RAIL} out of the key"
    elif not rule.is_per_nic and fact in PER_NIC_ONLY:
        yield f"{fact} is known for each NIC: put {NIC} into the key, as in nodefabric.io/{fact}.{NIC}"


@dataclass(frozen=True, slots=True)
class Labels(Section):
    keys: Annotated[
        tuple[LabelRule, ...],
        Through(Annotated[dict[str, Fact], BeforeValidator(_expanded)], _rules),
        WithJsonSchema({"type": "object", "additionalProperties": _KEY_SCHEMA}),
    ] = ()
    """Label key → fact; a key may have {nic} (PCI address), {rail} and {plane}"""

    @property
    def need_lldp(self) -> bool:
        """Whether any label comes from what the switches say."""
        return any(rule.fact in NEED_LLDP for rule in self.keys)


@dataclass(frozen=True, slots=True)
class Fingerprint(Section):
    """Which of the node's pods count for the fingerprint in the NodeResourceTopology object."""

    # As the scheduler's informer sees them (dedicated, shared), or those that kubelet lists (podresources).
    pods: Annotated[str, choice(*INFORMERS)] = "dedicated"
    """The scheduler plugin's informerMode; or the pods that kubelet lists"""
    method: Annotated[str, choice(*METHODS)] = "all"
    """Which of these pods count"""
    # Whose rules `with-exclusive-resources` follows: those of scheduler-plugins up to v0.34.7, or of its master.
    rules: Annotated[str, choice(*RULES)] = "v0.34"
    """Version of scheduler-plugins, for with-exclusive-resources"""

    def contradictions(self) -> Iterator[Refusal]:
        if self.pods == "podresources" and self.method != "all":
            text = "must be all with pods: podresources, which does not show what pods ask for"
            yield Refusal(("method",), text)


@dataclass(frozen=True, slots=True)
class Bandwidth(Section):
    """How the live bandwidth of ports is published."""

    annotation: Annotated[str | None, matching("domain/name", _ANNOTATION)] = None
    """Annotation of the Node that shows the load of the ports; default: none"""


@dataclass(frozen=True, slots=True)
class Topology(Section):
    publish: Flag = False
    """Publish a NodeResourceTopology object for this node"""
    volcano: Flag = False
    """Publish a Numatopology object for this node (Volcano)"""
    settle_seconds: Annotated[float, seconds(0, 600)] = 10.0
    """The NodeResourceTopology is written once more this long after the last change (longer than the scheduler
    plugin's cacheResyncPeriodSeconds); 0: not"""
    heartbeat_seconds: Annotated[float, seconds(10, 86400)] = 600.0
    """How often published objects are read, and written again if somebody changed them"""
    # So that a cluster's nodes do not write at once.
    start_spread_seconds: Annotated[float, seconds(0, 600)] = 60.0
    """The first write comes at random within this time"""
    kubelet_config: Folder = Path("/var/lib/kubelet/config.yaml")
    """kubelet's configuration, for its topology policy"""
    kubelet_config_dir: Annotated[Path | None, FOLDER] = None
    """kubelet's folder of drop-ins"""
    fingerprint: Fingerprint = Fingerprint()
    """Which pods count for the NodeResourceTopology's fingerprint"""
    labels: Labels = Labels()
    """Labels for the node, made of stable facts"""
    lldp_netdevs: Many[Annotated[str, string("an interface name", _netdev)]] = ()
    """Interfaces to listen on for the switch's name; default: each adapter with an RDMA device"""
    rails: Many[Annotated[tuple[str, ...], _RAIL]] = ()
    """Adapters to the fabric by interface or PCI address, rail 0 first; a list for a rail with planes; default:
    the RDMA adapters nearest to GPUs that resources take (docs/rails.md)"""
    bandwidth: Bandwidth = Bandwidth()
    """Live bandwidth of the ports"""

    @property
    def needs_api(self) -> bool:
        """Whether anything goes to the API server."""
        return self.publish or self.volcano or self.writes_node

    @property
    def writes_node(self) -> bool:
        """Whether the Node object itself gets labels or an annotation."""
        return bool(self.labels.keys) or self.bandwidth.annotation is not None

    @property
    def watches_pods(self) -> bool:
        """Whether the pods of the node are watched."""
        return self.publish and self.fingerprint.pods != "podresources"

    def contradictions(self) -> Iterator[Refusal]:
        first: dict[str, int] = {}
        for i, name in ((i, name) for i, planes in enumerate(self.rails) for name in planes):
            if name in first:
                yield Refusal(("rails", i), f"{name} is rail {first[name]} already: name each adapter once")
            first.setdefault(name, i)
