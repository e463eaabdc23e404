"""Files that tell containers of the devices of their claims (KEP-5304): one for each request of a claim.

A container gets the file bound into it, and keeps the one that was there when it was created: a newer one takes the
name, not the place. What an ADD finds out is in it all the same, for containers are created after the answer.

They lie beside the claims' CDI specs, with another suffix, so that no runtime takes them for specs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.edits.spec_files import SpecFiles
from agent.errors import Unavailable
from agent.model.claims import Claim

API_VERSION = "metadata.resource.k8s.io/v1alpha1"
IN_CONTAINERS = "/var/run/kubernetes.io/dra-device-attributes"
"""Where containers look for them, whatever the driver."""
SUFFIX = ".metadata"

_CHANGING = threading.Lock()
"""Held from reading a file until the next one is in its place: each has a number of its own."""


class MetadataFiles:
    """The files of claims, `nodefabric-claim-<uid>.<request>.metadata`. Methods block, briefly."""

    def __init__(self, folder: Path, start: str) -> None:
        """`start` is how names of claims begin in this folder."""
        self._files = SpecFiles(folder, start, "a pod of this claim", SUFFIX)
        self._start = start

    def path(self, uid: str, request: str) -> Path:
        """Tell where the file of a request is."""
        return self._files.path(self._name(uid, request))

    def write(self, uid: str, request: str, document: Mapping[str, Any]) -> None:
        """Write the file of a request, in place of an earlier one. Raises Unavailable."""
        with _CHANGING:
            self._replace(uid, request, document)

    def tell(self, uid: str, networks: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
        """Say what devices are in their pod: request → name of the device → `networkData`, empty for nothing to say.

        Raises Unavailable, also if a file is not there.
        """
        with _CHANGING:
            for request, of_devices in networks.items():
                document = self._read(uid, request)
                if document is None:
                    raise Unavailable(
                        f"{self.path(uid, request)} is gone, which the containers of this claim's pod are to have:"
                        " recreate the pod"
                    )
                for device in (each for entry in document["requests"] for each in entry["devices"]):
                    if device["name"] in of_devices:
                        device.pop("networkData", None)
                        device |= {"networkData": told} if (told := of_devices[device["name"]]) else {}
                self._replace(uid, request, document)

    def remove(self, uid: str) -> None:
        """Remove all files of a claim. Raises Unavailable."""
        for name in self._files.names():
            if name.startswith(self._name(uid, "")):
                self._files.remove(name)

    def uids(self) -> frozenset[str]:
        """List the claims that have a file."""
        return frozenset(name.removeprefix(self._start).partition(".")[0] for name in self._files.names())

    def missing(self, claim: Claim) -> bool:
        """Tell whether a file is not there that a container of the claim is to have."""
        return any(not self.path(claim.ref.uid, request).exists() for request in requests_told(claim))

    def _replace(self, uid: str, request: str, document: Mapping[str, Any]) -> None:
        before = self._read(uid, request)
        generation = before["metadata"]["generation"] + 1 if before is not None else 1
        meta = document["metadata"] | {"generation": generation}
        self._files.write(self._name(uid, request), json.dumps({**document, "metadata": meta}) + "\n")

    def _read(self, uid: str, request: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads(self._files.read(self._name(uid, request)))
        except (OSError, ValueError):
            return None
        return found

    def _name(self, uid: str, request: str) -> str:
        return f"{self._start}{uid}.{request}"


def mounted(edits: Mapping[str, Any], host_path: Path, path: str) -> Mapping[str, Any]:
    """Add a file that tells of devices to containerEdits. Several devices of a request bring the same one."""
    mount = {"hostPath": str(host_path), "containerPath": path, "options": ["ro", "bind", "nosuid", "nodev", "noexec"]}
    return {**edits, "mounts": [*edits.get("mounts", ()), mount]}


def requests_told(claim: Claim) -> frozenset[str]:
    """List the requests of a claim whose containers get a file: as its edits say, whatever is configured now."""
    return frozenset(
        device.request
        for device in claim.devices
        for mount in device.edits.get("mounts", ())
        if mount["containerPath"].startswith(f"{IN_CONTAINERS}/")
    )
