"""Tells whose configuration a text is: ours, or that of a device plugin that we can stand in for.

A ConfigMap, as `kubectl get configmap -o yaml` prints it, stands for the one configuration that it holds.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from agent.config.go_json import Pairs, decode
from agent.config.reader import read_document
from agent.errors import ConfigError

USUAL_KEYS = ("config.yaml", "config.json", "config.yml")


class Shape(Enum):
    OWN = "nodefabric"
    SRIOV = "sriov-network-device-plugin"
    SHARED = "k8s-rdma-shared-dev-plugin"


_MARKS = {
    "resourcelist": Shape.SRIOV,
    "configlist": Shape.SHARED,
    "periodicupdateinterval": Shape.SHARED,
    "mode": Shape.SHARED,
}
# Not read from there: what the values leave out is the chart's to fill in.
_OF_CHART = (
    "these are values of the chart: check what it makes of them, as"
    " helm template daemonset/chart --values FILE --show-only templates/config.yaml prints it"
)


def read_any(text: str | bytes, source: str) -> tuple[Shape, Any]:
    """Read text of any shape: the shape, and the document as that shape's reader wants it. Raises ConfigError."""
    spelled = text.decode("utf-8-sig", "replace") if isinstance(text, bytes) else text
    if spelled.lstrip().startswith("{") and any(f'"{mark}"' in spelled.lower() for mark in _MARKS):
        found = decode(spelled, source)
        shape = _shape(found)
        if shape is not Shape.OWN:  # networks of our own have a `mode`, too
            return shape, found
    document = read_document(text, source)
    if isinstance(document, dict) and document.get("kind") == "ConfigMap" and "resources" not in document:
        return read_any(_only_text(document, source), source)
    if isinstance(document, dict) and isinstance(document.get("config"), dict):
        raise ConfigError(source, [_OF_CHART])
    return Shape.OWN, document


def _shape(document: Any) -> Shape:
    marks = [_MARKS[key] for key in document if key in _MARKS] if isinstance(document, Pairs) else []
    return marks[0] if marks else Shape.OWN


def _only_text(document: dict[str, Any], source: str) -> str:
    data = document.get("data")
    texts = {key: text for key, text in data.items() if isinstance(text, str)} if isinstance(data, dict) else {}
    for key in USUAL_KEYS:
        if key in texts:
            return texts[key]
    if len(texts) != 1:
        names = ", ".join(map(str, texts)) or "nothing"
        raise ConfigError(
            source, [f"data: must hold one configuration, holds {names}: save the one you mean as a file"]
        )
    return next(iter(texts.values()))
