"""Pods as the kubelet stand-in sees them: ordinary YAML in, values out. Pure but for reading files.

Only what bears on devices and networks is read; the rest of a pod's spec is allowed and ignored.
A static-pod folder is watched by looking at it: a file appears, its pods run; it disappears, they end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

_EXTENDED = re.compile(r"[^/]+/[^/]+")


class ManifestInvalid(ValueError):
    """A file is not a pod manifest that can be used."""


@dataclass(frozen=True, slots=True)
class UsedClaim:
    """A claim of the pod that a container names."""

    name: str
    """As in the pod's spec."""
    request: str = ""
    """One request of it; empty for all."""


@dataclass(frozen=True, slots=True)
class Container:
    name: str
    limits: tuple[tuple[str, int], ...] = ()
    """Extended resources and their counts."""
    claims: tuple[UsedClaim, ...] = ()


@dataclass(frozen=True, slots=True)
class PodClaim:
    """A claim that the pod is to have."""

    name: str
    """In the pod's spec."""
    claim_name: str = ""
    """Of the ResourceClaim; empty if the pod needs none for it."""
    from_template: bool = False
    """It was made for this pod."""


@dataclass(frozen=True, slots=True)
class ExtendedRequest:
    """Which request of the special claim stands for an extended resource of a container."""

    container: str
    resource: str
    request: str


@dataclass(frozen=True, slots=True)
class ExtendedClaim:
    """The claim that the scheduler has made for a pod's extended resources."""

    claim_name: str
    requests: tuple[ExtendedRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class PodSpec:
    namespace: str
    name: str
    annotations: tuple[tuple[str, str], ...] = ()
    init_containers: tuple[Container, ...] = ()
    containers: tuple[Container, ...] = ()
    host_network: bool = False
    uid: str = ""
    """As the API server gave it; kubelet makes one if it is empty."""
    claims: tuple[PodClaim, ...] = ()
    extended: ExtendedClaim | None = None

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def has_claims(self) -> bool:
        return bool(self.claims) or self.extended is not None

    def by_plugins(self, containers: Iterable[Container]) -> tuple[Container, ...]:
        """Return containers without the limits that a claim stands for: device plugins are not asked for those."""
        mapped = {(r.container, r.resource) for r in self.extended.requests} if self.extended is not None else set()
        return tuple(
            replace(c, limits=tuple((name, n) for name, n in c.limits if (c.name, name) not in mapped))
            for c in containers
        )


def read_manifest(text: str, source: str) -> tuple[PodSpec, ...]:
    """Read the pods of one file. Raises ManifestInvalid."""
    try:
        documents = [d for d in yaml.safe_load_all(text) if d is not None]
    except yaml.YAMLError as error:
        raise ManifestInvalid(f"{source}: is not YAML: {' '.join(str(error).split())}") from error
    return tuple(_pod(document, source) for document in documents)


def read_folder(folder: Path) -> tuple[tuple[PodSpec, ...], tuple[str, ...]]:
    """Read all manifests of a folder: the pods, and what is wrong with the files that are left out."""
    pods: dict[str, PodSpec] = {}
    problems = []
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".yaml", ".yml", ".json")):
        try:
            found = read_manifest(path.read_text(), str(path))
        except FileNotFoundError:
            continue
        except (ManifestInvalid, OSError, UnicodeDecodeError) as error:
            problems.append(str(error))
            continue
        for pod in found:
            if pod.key in pods:
                problems.append(f"{path}: pod {pod.key} is in another file already")
            else:
                pods[pod.key] = pod
    return tuple(pods.values()), tuple(problems)


def _pod(document: Any, source: str) -> PodSpec:
    if not isinstance(document, dict) or document.get("kind") != "Pod":
        raise ManifestInvalid(f"{source}: holds something that is not a Pod")
    metadata = _mapping(document, "metadata", source)
    spec = _mapping(document, "spec", source)
    name = metadata.get("name")
    if not isinstance(name, str) or not name:
        raise ManifestInvalid(f"{source}: metadata.name is missing")
    containers = _containers(spec.get("containers"), f"{source}: spec.containers")
    if not containers:
        raise ManifestInvalid(f"{source}: spec.containers is empty")
    return PodSpec(
        namespace=str(metadata.get("namespace") or "default"),
        name=name,
        annotations=tuple(sorted((str(k), str(v)) for k, v in (metadata.get("annotations") or {}).items())),
        init_containers=_containers(spec.get("initContainers"), f"{source}: spec.initContainers"),
        containers=containers,
        host_network=bool(spec.get("hostNetwork", False)),
        uid=str(metadata.get("uid") or ""),
        claims=tuple(_claims(document, source)),
        extended=_extended_claim(document.get("status") or {}),
    )


def _claims(document: Mapping[str, Any], source: str) -> Iterable[PodClaim]:
    """Read the claims, those from templates by the names that the status tells."""
    status = document.get("status") or {}
    made = {s["name"]: s.get("resourceClaimName") or "" for s in status.get("resourceClaimStatuses") or ()}
    for item in document["spec"].get("resourceClaims") or ():
        name, direct = str(item.get("name")), item.get("resourceClaimName")
        if direct:
            yield PodClaim(name, str(direct))
        elif name in made:
            yield PodClaim(name, made[name], from_template=True)
        else:
            raise ManifestInvalid(f"{source}: claim {name}: no ResourceClaim has been made for it yet")


def _extended_claim(status: Mapping[str, Any]) -> ExtendedClaim | None:
    found = status.get("extendedResourceClaimStatus")
    if not found:
        return None
    requests = tuple(
        ExtendedRequest(m["containerName"], m["resourceName"], m["requestName"])
        for m in found.get("requestMappings") or ()
    )
    return ExtendedClaim(found["resourceClaimName"], requests)


def _mapping(document: Mapping[str, Any], key: str, source: str) -> Mapping[str, Any]:
    value = document.get(key)
    if not isinstance(value, dict):
        raise ManifestInvalid(f"{source}: {key} is missing")
    return value


def _containers(value: Any, source: str) -> tuple[Container, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ManifestInvalid(f"{source}: is not a list")
    return tuple(_container(item, f"{source}[{i}]") for i, item in enumerate(value))


def _container(value: Any, source: str) -> Container:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ManifestInvalid(f"{source}: needs a name")
    resources = value.get("resources") or {}
    claims = tuple(UsedClaim(str(c["name"]), str(c.get("request") or "")) for c in resources.get("claims") or ())
    return Container(value["name"], tuple(_extended((resources.get("limits") or {}).items(), source)), claims)


def _extended(limits: Iterable[tuple[Any, Any]], source: str) -> Iterable[tuple[str, int]]:
    """Pick the extended resources; cpu, memory and the like are another manager's."""
    for name, quantity in limits:
        if not _EXTENDED.fullmatch(str(name)):
            continue
        if not str(quantity).isdecimal():
            raise ManifestInvalid(f"{source}: limit {name}: {quantity!r} is not a whole number")
        if int(quantity):
            yield str(name), int(quantity)
