"""The kinds of objects that the stand-in for the API server knows, and which of them a path means. Pure.

Source of paths and names: Kubernetes 1.36, staging/src/k8s.io/api (core/v1, apps/v1, resource/v1, register.go of each).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from hack.sim.cluster.definitions import Definition

_PATH = re.compile(r"/(?:api|apis/[^/]+)/[^/]+(?:/namespaces/([^/]+))?/([^/]+)(?:/([^/]+)(?:/(status))?)?")


@dataclass(frozen=True, slots=True)
class Kind:
    api_version: str
    kind: str
    plural: str
    namespaced: bool = False
    fields: tuple[str, ...] = ("metadata.name",)
    """What a field selector may name."""
    has_status: bool = False
    """Whether its status is written by a path of its own, and by no other."""

    @property
    def group(self) -> str:
        """For messages: `ResourceSlice.resource.k8s.io`."""
        group, slash, _ = self.api_version.partition("/")
        return f"{self.kind}.{group}" if slash else self.kind


@dataclass(frozen=True, slots=True)
class Target:
    """What a path means."""

    kind: Kind
    namespace: str = ""
    name: str = ""
    """Empty for the collection."""
    of_status: bool = False

    @property
    def key(self) -> str:
        """The object's name among those of its kind: `name`, or `namespace/name`."""
        return f"{self.namespace}/{self.name}" if self.kind.namespaced else self.name


_NAMED = ("metadata.name", "metadata.namespace")
NODE = Kind("v1", "Node", "nodes")
POD = Kind("v1", "Pod", "pods", True, (*_NAMED, "spec.nodeName"))
DAEMON_SET = Kind("apps/v1", "DaemonSet", "daemonsets", True, _NAMED)
DRA = "resource.k8s.io/v1"
SLICE = Kind(DRA, "ResourceSlice", "resourceslices", False, ("metadata.name", "spec.driver", "spec.nodeName"))
CLAIM = Kind(DRA, "ResourceClaim", "resourceclaims", True, _NAMED, True)
TEMPLATE = Kind(DRA, "ResourceClaimTemplate", "resourceclaimtemplates", True, _NAMED)
CLASS = Kind(DRA, "DeviceClass", "deviceclasses")
BUILT_IN = (NODE, POD, DAEMON_SET, SLICE, CLAIM, TEMPLATE, CLASS)


class Kinds:
    """All kinds of a cluster."""

    def __init__(self, definitions: Iterable[Definition]) -> None:
        custom = [Kind(d.api_version, d.kind, d.plural) for d in definitions]
        self._by_name = {kind.kind: kind for kind in (*BUILT_IN, *custom)}

    def named(self, kind: str) -> Kind:
        """Return the kind of this name."""
        return self._by_name[kind]

    def target(self, path: str) -> Target | None:
        """Return what a path means; None if nothing that is known."""
        if (match := _PATH.fullmatch(path)) is None:
            return None
        namespace, plural, name, status = (unquote(part or "") for part in match.groups())
        for kind in self._by_name.values():
            root = "apis" if "/" in kind.api_version else "api"
            if kind.plural != plural or not path.startswith(f"/{root}/{kind.api_version}/"):
                continue
            if (namespace and not kind.namespaced) or (name and kind.namespaced and not namespace):
                return None
            if status and not kind.has_status:
                return None
            return Target(kind, namespace, name, bool(status))
        return None


def selected(kind: Kind, selector: str) -> dict[str, str]:
    """Read a field selector. Raises LookupError for a field that the kind cannot be selected by."""
    found = dict(term.split("=", 1) for term in selector.replace("==", "=").split(",")) if selector else {}
    for field in found:
        if field not in kind.fields:
            raise LookupError(f"field label not supported: {field}")
    return found


def is_selected(document: Mapping[str, Any], fields: Mapping[str, str]) -> bool:
    """Tell whether a document has these values at these paths."""
    for path, value in fields.items():
        inner: Any = document
        for part in path.split("."):
            inner = inner.get(part, "") if isinstance(inner, Mapping) else ""
        if inner != value:
            return False
    return True
