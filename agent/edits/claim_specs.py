"""The CDI specs of DRA claims: a file for each claim, with a device for each of its results.

A container gets the devices of the requests that it names, and one that is named twice does what it does once: device
files and mounts have their places, and a variable its value.

Beside each spec stands a copy of the claim's rows. Both are gone after a reboot, when kubelet has its claims prepared
anew. Within one boot it does not, so should the books be lost, the copy is what they are made of again.

Files that describe the devices of a claim to containers (KEP-5304), one for each request, lie beside the spec, with
another suffix so that no runtime takes them for specs. A container gets the file bound into it, and keeps the one that
was there when it was created: a newer one takes the name, not the place. What an ADD finds out is in it all the same,
for containers are created after the answer.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agent.edits.cdi import SPEC_FOLDERS, SpecFiles, text_of
from agent.errors import Unavailable
from agent.model.allocation import Claim, ClaimDevice, ClaimRef, ClaimState, PodRef
from agent.model.unit_id import cdi_kind, cdi_name

API_VERSION = "metadata.resource.k8s.io/v1alpha1"
IN_CONTAINERS = "/var/run/kubernetes.io/dra-device-attributes"
"""Where containers look for them, whatever the driver."""
SUFFIX = ".metadata"

_NUMBERING = threading.Lock()
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
        with _NUMBERING:
            self._replace(uid, request, document)

    def add_networks(self, uid: str, networks: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
        """Write what devices are in their pod: request → name of the device → `networkData`, empty for nothing to say.

        Raises Unavailable, also if a file is not there.
        """
        with _NUMBERING:
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
        return any(not self.path(claim.ref.uid, request).exists() for request in requests_with_files(claim))

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


def requests_with_files(claim: Claim) -> frozenset[str]:
    """List the requests of a claim whose containers get a file: as its edits say, whatever is configured now."""
    return frozenset(
        device.request
        for device in claim.devices
        for mount in device.edits.get("mounts", ())
        if mount["containerPath"].startswith(f"{IN_CONTAINERS}/")
    )


KIND = "claim"
_START = f"{KIND}-"
_WHOSE = "a pod of this claim"

_CHANGING = threading.Lock()
"""Held from a look into the books until a claim's spec says so: the last of several who write has seen the newest."""

log = logging.getLogger(__name__)


class ClaimSpecs:
    """One spec file for each claim, `nodefabric-claim-<uid>.json`. Methods block, briefly."""

    def __init__(self, folder: Path = SPEC_FOLDERS[1]) -> None:
        self._files = SpecFiles(folder, _START, _WHOSE)
        self._copies = SpecFiles(folder, _START, _WHOSE, ".claim", mode=0o600)
        self.metadata = MetadataFiles(folder, _START)
        """What tells containers of their devices, for claims that are to have it."""

    def write(self, claim: Claim) -> None:
        """Write the spec of a claim, in place of an earlier one; none if no device has a name. Raises Unavailable."""
        name, text = _name(claim.ref.uid), _text(claim)
        self._copies.write(name, json.dumps(asdict(claim)))
        if text is None:
            self._files.remove(name)
        else:
            self._files.write(name, text)

    def renew(self, known: Callable[[], Claim | None]) -> bool:
        """Have the spec of a claim say what the books do, and tell whether it did not. Raises Unavailable.

        `known` looks into them at the moment of writing; None if nothing is to be written any more. Of a claim that is
        being unprepared nothing is.
        """
        with _CHANGING:
            claim = known()
            if claim is None or claim.state is ClaimState.UNPREPARING or self.is_written(claim):
                return False
            self.write(claim)
            return True

    def remove(self, uid: str) -> None:
        """Remove the spec of a claim, and its files. What is not there is removed already. Raises Unavailable."""
        with _CHANGING:
            self._files.remove(_name(uid))
            self.metadata.remove(uid)
            self._copies.remove(_name(uid))

    def is_written(self, claim: Claim) -> bool:
        """Tell whether the spec of a claim is there and says what the claim does."""
        text = _text(claim)
        return self._files.says(_name(claim.ref.uid), text) if text is not None else True

    def uids(self) -> frozenset[str]:
        """List the claims that have a spec or file of ours. What a killed process has half written is removed."""
        specs = frozenset(name.removeprefix(_START) for name in self._files.names() | self._copies.names())
        return specs | self.metadata.uids()

    def copies(self) -> tuple[Claim, ...]:
        """Read the claims as they were when their specs were written, in the state in which they were then."""
        found = (self._copy(name) for name in sorted(self._copies.names()))
        return tuple(claim for claim in found if claim is not None)

    def _copy(self, name: str) -> Claim | None:
        try:
            return _of_document(json.loads(self._copies.read(name)))
        except (OSError, ValueError, KeyError, TypeError) as error:  # of another version, maybe
            log.error("%s says nothing of a claim: %s", self._copies.path(name), error)
            return None


def qualified(name: str) -> str:
    """Name a claim's device as kubelet and the runtime do: nodefabric.io/claim=<name>."""
    return cdi_name(KIND, name)


def _of_document(document: Mapping[str, Any]) -> Claim:
    parts = {
        "ref": ClaimRef(**document["ref"]),
        "state": ClaimState(document["state"]),
        "devices": tuple(ClaimDevice(**device) for device in document["devices"]),
        "pods": tuple(PodRef(**pod) for pod in document["pods"]),
    }
    return Claim(**{**document, **parts})


def _name(uid: str) -> str:
    return f"{_START}{uid}"


def _text(claim: Claim) -> str | None:
    """Spell the spec of a claim; None for one that needs none."""
    # A runtime refuses a whole spec for one device without edits (CDI's SPEC.md), and its name is told all the same.
    default = {"env": [f"NODEFABRIC_CLAIM={claim.ref}"]}
    devices = [(found.cdi_name, found.edits or default) for found in claim.devices if found.cdi_name]
    return text_of(cdi_kind(KIND), devices) if devices else None
