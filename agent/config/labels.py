"""Which labels this node gets, and from which facts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.config.reader import Reader, shown

OF_NODE = ("rails", "hca-count", "hca-model", "hca-firmware", "gpu-count", "gpu-model", "nvlink-domain", "node-name")
OF_NIC = ("leaf-switch", "leaf-chassis", "leaf-port", "hca-model", "hca-firmware", "node-guid")
FACTS = tuple(dict.fromkeys((*OF_NODE, *OF_NIC, "file", "text")))
NEED_LLDP = frozenset({"leaf-switch", "leaf-chassis", "leaf-port"})
PER_NIC_ONLY = frozenset({"leaf-port", "node-guid"})
"""One value for all NICs would say nothing, so the key must have a place for each."""
NIC = "{nic}"
"""In a key: the PCI address of the NIC, dashes for colons."""
DESTINATIONS = ("node", "nfd")
NFD_FILE = Path("/etc/kubernetes/node-feature-discovery/features.d/nodefabric")

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(
    r"(?=.{1,316}$)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*/" + _LABEL, re.ASCII
)
_VALUE = re.compile(_LABEL, re.ASCII)
_KEY_SCHEMA = {"anyOf": [{"enum": [f for f in FACTS if f not in ("file", "text")]}, {"type": "object"}]}


@dataclass(frozen=True, slots=True)
class LabelRule:
    """One label: where its value comes from."""

    key: str
    """May have `{nic}` in it, for a label per NIC."""
    fact: str
    pattern: str | None = None
    """Its first group in the fact is the value; a fact that it does not match has none."""
    path: Path | None = None
    """For fact `file`: whose first line is the value."""
    text: str | None = None
    """For fact `text`: the value."""


@dataclass(frozen=True, slots=True)
class Labels:
    keys: tuple[LabelRule, ...] = ()
    to: str = "node"
    nfd_file: Path = NFD_FILE

    @property
    def need_lldp(self) -> bool:
        """Whether any label comes from what the switches say."""
        return any(rule.fact in NEED_LLDP for rule in self.keys)


def read_labels(reader: Reader) -> Labels:
    """Read the section `topology.labels`."""
    plain = Labels()
    about = "Label key → fact. In the key {nic} stands for each NIC's PCI address"
    schema = {"type": "object", "additionalProperties": _KEY_SCHEMA}
    keys = reader.take("keys", {}, "a mapping", lambda v: isinstance(v, dict), schema=schema, about=about)
    found = Labels(
        keys=tuple(rule for key, value in keys.items() if (rule := _rule(reader, key, value)) is not None),
        to=reader.choice("to", plain.to, DESTINATIONS, about="Patch the Node, or write a file for NFD's worker"),
        nfd_file=reader.path_to("nfdFile", plain.nfd_file, about="The file for NFD's worker"),
    )
    reader.done()
    return found


def _rule(reader: Reader, key: Any, value: Any) -> LabelRule | None:
    where = f"keys.{key}"
    if not isinstance(key, str) or not _KEY.fullmatch(key.replace(NIC, "0000-00-00.0")):
        reader.note("keys", f"a label key must be domain/name, perhaps with {NIC} in the name, is {shown(key)}")
        return None
    inner = Reader({"fact": value} if isinstance(value, str) else value, reader.at(where), reader.problems)
    fact = inner.choice("fact", None, FACTS, about="Where the label's value comes from")
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
    if "fact" not in inner.value:
        inner.note("fact", "is missing")
    if fact is None:
        return None
    for name, its_fact in (("path", "file"), ("text", "text")):
        if fact == its_fact and name not in inner.value:
            inner.note(name, "is missing")
        elif fact != its_fact and name in inner.value:
            inner.note(name, f"is for fact {its_fact} only")
    if NIC in key and fact not in OF_NIC:
        inner.note("fact", f"{fact} is not told for each NIC: leave {NIC} out of the key")
    if NIC not in key and fact in PER_NIC_ONLY:
        inner.note("fact", f"{fact} is told for each NIC: put {NIC} into the key, as in nodefabric.io/{fact}.{NIC}")
    return LabelRule(key, fact, pattern, path, text)


def _is_pattern(value: Any) -> bool:
    if not isinstance(value, str) or len(value) > 200:
        return False
    try:
        return re.compile(value).groups == 1
    except (re.error, OverflowError):
        return False
