"""What tells containers of the devices of their DRA claims.

Files that describe the devices of a claim to containers (KEP-5304), one for each request, lie beside the spec, with
another suffix so that no runtime takes them for specs. A container gets the file bound into it, and keeps the one that
was there when it was created: a newer one takes the name, not the place. What an ADD finds out is in it all the same,
for containers are created after the answer.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.edits.cdi import OWN_PREFIX, SpecFiles
from agent.errors import Unavailable
from agent.model.allocation import Claim

CLAIM = "claim-"
"""How the names of claims' files begin."""
API_VERSION = "metadata.resource.k8s.io/v1alpha1"
IN_CONTAINERS = "/var/run/kubernetes.io/dra-device-attributes"
"""Where containers look for them, whatever the driver."""
SUFFIX = ".metadata"

_NUMBERING = threading.Lock()
"""Held from reading a file until the next one is in its place: the last has seen the newest."""


def metadata_path(folder: Path, uid: str, request: str) -> Path:
    """Tell where the file of a claim's request is."""
    return folder / f"{OWN_PREFIX}{_name(uid)}.{request}{SUFFIX}"


def mounted(edits: Mapping[str, Any], host_path: Path, path: str) -> Mapping[str, Any]:
    """Add a file that tells of devices to containerEdits. Several devices of a request bring the same one."""
    mount = {"hostPath": str(host_path), "containerPath": path, "options": ["ro", "bind", "nosuid", "nodev", "noexec"]}
    return {**edits, "mounts": [*edits.get("mounts", ()), mount]}


def requests_with_files(claim: Claim) -> frozenset[str]:
    """List the requests of a claim whose containers get a file: as its edits say, whatever is configured now."""
    return frozenset(
        device.request
        for device in claim.devices
        for mount in device.edits.get("mounts", ())
        if mount["containerPath"].startswith(f"{IN_CONTAINERS}/")
    )


class ClaimMetadata:
    """Keeps these files, `nodefabric-claim-<uid>.<request>.metadata`. Methods block, briefly."""

    def __init__(self, folder: Path) -> None:
        self._metadata = SpecFiles(folder, CLAIM, "a pod of this claim", SUFFIX)

    def names(self) -> frozenset[str]:
        """List the claims that have a file, as their CDI specs are called."""
        return frozenset(name.partition(".")[0] for name in self._metadata.names())

    def remove(self, claim: str) -> None:
        """Remove the files of a claim, called as its CDI spec. Raises Unavailable."""
        for name in self._metadata.names():
            if name.partition(".")[0] == claim:
                self._metadata.remove(name)

    def write(self, uid: str, request: str, document: Mapping[str, Any]) -> None:
        """Write the file of a request, in place of an earlier one. Raises Unavailable."""
        with _NUMBERING:
            self._replace(f"{_name(uid)}.{request}", document)

    def add_networks(self, uid: str, networks: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
        """Write what devices are in their pod: request → name of the device → `networkData`, empty for nothing to say.

        Raises Unavailable, also if a file is not there.
        """
        with _NUMBERING:
            for request, of_devices in networks.items():
                name = f"{_name(uid)}.{request}"
                document = self._read(name)
                if document is None:
                    raise Unavailable(
                        f"{self._metadata.path(name)} is gone, which the containers of this claim's pod are to have:"
                        " recreate the pod"
                    )
                for device in (each for entry in document["requests"] for each in entry["devices"]):
                    if device["name"] in of_devices:
                        device.pop("networkData", None)
                        device |= {"networkData": told} if (told := of_devices[device["name"]]) else {}
                self._replace(name, document)

    def misses(self, claim: Claim) -> bool:
        """Tell whether a file is not there that a container of the claim is to have."""
        names = (f"{_name(claim.ref.uid)}.{request}" for request in requests_with_files(claim))
        return not all(map(self._metadata.is_there, names))

    def _replace(self, name: str, document: Mapping[str, Any]) -> None:
        before = self._read(name)
        generation = before["metadata"]["generation"] + 1 if before is not None else 1
        meta = document["metadata"] | {"generation": generation}
        self._metadata.write(name, json.dumps({**document, "metadata": meta}) + "\n")

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads(self._metadata.read(name))
        except (OSError, ValueError):
            return None
        return found


def _name(uid: str) -> str:
    return f"{CLAIM}{uid}"
