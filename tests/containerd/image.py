"""Container images made on the spot: one static program, as an OCI image layout that a runtime can import.

https://github.com/opencontainers/image-spec: a tar archive of blobs named by their hash, and an index of them.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path
from typing import Any

POD = "nodefabric.test/pod:1"
PAUSE = "nodefabric.test/pause:1"
SLEEP = ("/bin/busybox", "sleep", "1000000")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_OCI = "application/vnd.oci.image"


def write(path: Path, busybox: Path) -> None:
    """Write the archive: one image under two names, for pods and for their sandboxes."""
    layer = _layer(busybox)
    machine = platform.machine()
    config = {
        "architecture": _ARCHITECTURES.get(machine, machine),
        "os": "linux",
        "config": {"Cmd": list(SLEEP), "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    blobs = [layer, _json(config)]
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{_OCI}.manifest.v1+json",
            "config": _descriptor(f"{_OCI}.config.v1+json", blobs[1]),
            "layers": [_descriptor(f"{_OCI}.layer.v1.tar", layer)],
        }
    )
    manifests = [
        {**_descriptor(f"{_OCI}.manifest.v1+json", manifest), "annotations": {"io.containerd.image.name": name}}
        for name in (POD, PAUSE)
    ]
    with tarfile.open(path, "w") as archive:
        _add(archive, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        _add(archive, "index.json", _json({"schemaVersion": 2, "manifests": manifests}))
        for blob in (*blobs, manifest):
            _add(archive, f"blobs/sha256/{_digest(blob).removeprefix('sha256:')}", blob)


def _layer(busybox: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for folder in ("bin", "dev", "etc", "proc", "sys", "tmp"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        _add(archive, "bin/busybox", busybox.read_bytes(), 0o755)
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))


def _descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _json(document: Any) -> bytes:
    return json.dumps(document).encode()
