"""Writes images and charts as OCI archives: the tar files that skopeo, containerd and Docker take.

The same content gives the same file. https://specs.opencontainers.org/image-spec/image-layout/
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CHART_CONFIG = "application/vnd.cncf.helm.config.v1+json"
CHART_CONTENT = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
"""Both from https://helm.sh/docs/topics/registries/."""

Document = dict[str, Any]


def write_index(archives: Iterable[Path], target: Path, epoch: int) -> str:
    """Join archives of one architecture's image each into one archive of one index. Returns the index's digest."""
    blobs: dict[str, bytes] = {}
    manifests = []
    for archive in archives:
        (descriptor,), found = _read(archive)
        manifest = json.loads(found[descriptor["digest"]])
        config = json.loads(found[manifest["config"]["digest"]])
        platform = {key: config[key] for key in ("architecture", "os")}
        wanted = (descriptor, manifest["config"], *manifest["layers"])
        blobs |= {each["digest"]: found[each["digest"]] for each in wanted}
        manifests.append({**_described(descriptor["mediaType"], found[descriptor["digest"]]), "platform": platform})
    index = _json({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests})
    return _write(target, INDEX, index, blobs, epoch)


def write_chart(chart: Path, target: Path, epoch: int) -> str:
    """Write a packed chart as `helm push` would push it. Returns its digest."""
    content = chart.read_bytes()
    with tarfile.open(chart) as packed:
        (name,) = [
            member.name for member in packed if member.name.count("/") == 1 and member.name.endswith("/Chart.yaml")
        ]
        file = packed.extractfile(name)
        assert file is not None
        about: Document = yaml.safe_load(file)
    config = _json(about)
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": _described(CHART_CONFIG, config),
            "layers": [_described(CHART_CONTENT, content)],
            "annotations": {
                "org.opencontainers.image.title": about["name"],
                "org.opencontainers.image.description": about["description"],
                "org.opencontainers.image.version": about["version"],
            },
        }
    )
    return _write(target, MANIFEST, manifest, {_digest(blob): blob for blob in (config, content)}, epoch)


def write_tar(target: Path, files: Mapping[str, bytes], epoch: int) -> None:
    """Write files of root's, in the order of their names and all of one time."""
    with target.open("wb") as raw:
        if target.suffix == ".tgz":
            with gzip.GzipFile("", "wb", 9, raw, mtime=epoch) as compressed:
                _write_members(compressed, files, epoch)
        else:
            _write_members(raw, files, epoch)


def _write_members(stream: Any, files: Mapping[str, bytes], epoch: int) -> None:
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode = len(files[name]), epoch, 0o644
            tar.addfile(member, io.BytesIO(files[name]))


def _write(target: Path, kind: str, top: bytes, blobs: Mapping[str, bytes], epoch: int) -> str:
    digest = _digest(top)
    index = _json({"schemaVersion": 2, "mediaType": INDEX, "manifests": [_described(kind, top)]})
    files = {"oci-layout": _json({"imageLayoutVersion": "1.0.0"}), "index.json": index}
    for each, blob in {**blobs, digest: top}.items():
        files[f"blobs/{each.replace(':', '/')}"] = blob
    write_tar(target, files, epoch)
    return digest


def _read(archive: Path) -> tuple[Sequence[Document], dict[str, bytes]]:
    """Return the descriptors that an archive begins with, and its blobs by digest."""
    files: dict[str, bytes] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            if (file := tar.extractfile(member)) is not None:
                files[member.name.removeprefix("./")] = file.read()
    blobs = {n.removeprefix("blobs/").replace("/", ":"): blob for n, blob in files.items() if n.startswith("blobs/")}
    return json.loads(files["index.json"])["manifests"], blobs


def _described(kind: str, blob: bytes) -> Document:
    return {"mediaType": kind, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _json(document: Document) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
