"""The manifests as data, and the programs that people render them with."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agent import config

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "daemonset"
BASE = FOLDER / "base"
CHART = FOLDER / "chart"
COMPONENTS = sorted(path.parent.name for path in (FOLDER / "components").glob("*/kustomization.yaml"))

RELEASED = yaml.safe_load((CHART / "values.yaml").read_text())["image"]["repository"]
"""The image as releases name it."""
VERSION: str = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]

Document = dict[str, Any]
SWITCHES: dict[str, Document] = yaml.safe_load(Path(__file__).with_name("switches.yaml").read_text())
"""What in the chart's values each component of kustomize stands for."""


def documents(path: Path) -> list[Document]:
    return parsed(path.read_text())


def parsed(text: str) -> list[Document]:
    return [document for document in yaml.safe_load_all(text) if document is not None]


def container(spec: Document, name: str) -> Document:
    (found,) = [c for c in (*spec["containers"], *spec.get("initContainers", ())) if c["name"] == name]
    return dict(found)


def base_config() -> config.Config:
    path = BASE / "config.yaml"
    return config.parse(path.read_text(), str(path))


def host_paths(spec: Document) -> dict[str, str]:
    """Return the paths of the host that a pod's volumes show, by the volume's name."""
    return {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}


@dataclass(frozen=True)
class Kube:
    """helm and kubectl, as hack/fetch-kube puts them into the cache."""

    folder: Path

    @classmethod
    def find(cls) -> Kube | None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nodefabric/kube"
        found = [path.parent for path in cache.glob("*/kubectl") if (path.parent / "helm").exists()]
        return cls(found[-1]) if found else None

    def run(self, program: str, *arguments: str | Path, text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.folder / program, *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={"HOME": "/nonexistent", "HELM_CACHE_HOME": "/nonexistent"},
        )

    def template(
        self, values: Mapping[str, Any] | None = None, namespace: str = "nodefabric", release: str = "nodefabric"
    ) -> list[Document]:
        """Render the chart, by default as the release that the base is."""
        return parsed(self.template_text(values, namespace, release))

    def template_text(
        self, values: Mapping[str, Any] | None = None, namespace: str = "nodefabric", release: str = "nodefabric"
    ) -> str:
        words = ("template", release, CHART, "-n", namespace, "--values", "-")
        done = self.run("helm", *words, text=json.dumps(values or {}))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def kustomize(self, folder: Path) -> list[Document]:
        done = self.run("kubectl", "kustomize", "--load-restrictor=LoadRestrictionsNone", folder)
        assert done.returncode == 0, done.stderr
        return parsed(done.stdout)


def identity(document: Document) -> str:
    """Tell an object from others."""
    metadata = document["metadata"]
    return f"{document['apiVersion']}/{document['kind']} {metadata.get('namespace', '')}/{metadata['name']}"


def overlay(folder: Path, *components: str, config_text: str | None = None) -> Path:
    """Write an overlay of the base as README tells to make one."""
    folder.mkdir(parents=True, exist_ok=True)
    kustomization: Document = {
        "resources": [os.path.relpath(BASE, folder.resolve())],
        "components": [os.path.relpath(FOLDER / "components" / name, folder.resolve()) for name in components],
        "images": [{"name": RELEASED, "newName": "registry.example/nodefabric"}],
    }
    if config_text is not None:
        (folder / "config.yaml").write_text(config_text)
        kustomization["configMapGenerator"] = [
            {"name": "nodefabric", "namespace": "nodefabric", "behavior": "replace", "files": ["config.yaml"]}
        ]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return folder


def named(found: list[Document], kind: str) -> Document:
    """Return the one object of a kind."""
    (document,) = [d for d in found if d["kind"] == kind]
    return document


def pod(found: list[Document]) -> Document:
    """Return what the DaemonSet makes its pods of."""
    spec: Document = named(found, "DaemonSet")["spec"]["template"]["spec"]
    return spec
