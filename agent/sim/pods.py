"""Pods as the kubelet stand-in sees them: ordinary YAML in, values out. Pure but for reading files.

Only what bears on devices and networks is read; the rest of a pod's spec is allowed and ignored.
A static-pod folder is watched by looking at it: a file appears, its pods run; it disappears, they end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_EXTENDED = re.compile(r"[^/]+/[^/]+")


class ManifestInvalid(ValueError):
    """A file is not a pod manifest that can be used."""


@dataclass(frozen=True, slots=True)
class Container:
    name: str
    limits: tuple[tuple[str, int], ...] = ()
    """Extended resources and their counts."""


@dataclass(frozen=True, slots=True)
class PodSpec:
    namespace: str
    name: str
    annotations: tuple[tuple[str, str], ...] = ()
    init_containers: tuple[Container, ...] = ()
    containers: tuple[Container, ...] = ()
    host_network: bool = False

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


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
    )


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
    limits = (value.get("resources") or {}).get("limits") or {}
    return Container(value["name"], tuple(_extended(limits.items(), source)))


def _extended(limits: Iterable[tuple[Any, Any]], source: str) -> Iterable[tuple[str, int]]:
    """Pick the extended resources; cpu, memory and the like are another manager's."""
    for name, quantity in limits:
        if not _EXTENDED.fullmatch(str(name)):
            continue
        if not str(quantity).isdecimal():
            raise ManifestInvalid(f"{source}: limit {name}: {quantity!r} is not a whole number")
        if int(quantity):
            yield str(name), int(quantity)
