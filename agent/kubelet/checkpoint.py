"""What kubelet keeps on disk: units of each pod's containers, with what plugins answered, and the claims it has noted.

PodResources lists app containers alone (kubelet, pkg/kubelet/apis/podresources). kubelet writes its device manager's
checkpoint after each Allocate, so before a pod's sandbox is made, and by UID:

    {"Data": {"PodDeviceEntries": [
        {"PodUID", "ContainerName", "ResourceName", "DeviceIDs": {"<NUMA>": [ID]}, "AllocResp"}
    ]}}

It is read for the slots that no pod of PodResources has, for the answers that kubelet replays (AllocResp), and for the
device files in other plugins' answers, which show where a GPU is whose ID does not. It is trusted for nothing else:
where it cannot be read, or looks otherwise, init containers go without. Of a pod that has no sandbox yet, or a new one,
it is never out of date: kubelet takes nothing from a pod before that has ended.

kubelet notes a claim before it asks any driver to prepare it, and until all have unprepared it: it asks these drivers
before the claims' pods can end. The form is that of Kubernetes, pkg/kubelet/cm/dra/state: since 1.32

    {"Data": "{\"kind\", \"apiVersion\", \"ClaimInfoStateList\": [
        {\"Namespace\", \"ClaimName\", \"DriverState\": {\"<driver>\": …}}]}", "Checksum"}

and before, with a single driver for each claim, {"version", "entries": [{"Namespace", "ClaimName", "DriverName"}],
"checksum"}.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from agent.errors import Unavailable
from agent.model.unit_id import CDI_VENDOR
from proto.deviceplugin.v1beta1 import api_pb2

FILE = Path("device-plugins/kubelet_internal_checkpoint")
"""Of the device manager, below kubelet's folder."""
CLAIMS_FILE = Path("dra_manager_state")
"""Of the manager of claims, below kubelet's folder."""
MAX_BYTES = 64 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Held:
    """What kubelet gave to one container."""

    container: str
    units: Mapping[str, tuple[str, ...]]
    """Resource name → device IDs, of all plugins."""
    numa_nodes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Resource name and device ID → NUMA node, where kubelet tells of one."""
    answers: Mapping[str, str] = field(default_factory=dict)
    """Resource name → what Allocate answered, as in `Entry`, where kubelet keeps it."""

    def files(self, resource_name: str) -> tuple[str, ...]:
        """List the device files of the host that a resource's plugin gave to the container."""
        answer = answer_of(self.answers.get(resource_name, ""))
        return answer.paths if answer is not None else ()


@dataclass(frozen=True, slots=True)
class Entry:
    """What kubelet gave to one container of one resource."""

    pod_uid: str
    container: str
    resource_name: str
    unit_ids: tuple[str, ...]
    answer: str = ""
    """What Allocate answered, for each start of the container: a ContainerAllocateResponse in Base64."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What kubelet keeps of one answer."""

    paths: tuple[str, ...] = ()
    """Device files of the host."""
    cdi_names: tuple[str, ...] = ()

    @property
    def names_ours(self) -> bool:
        """Return whether it has CDI names of ours."""
        return any(name.startswith(f"{CDI_VENDOR}/") for name in self.cdi_names)


def answer_of(text: str) -> Answer | None:
    """Read an `Entry.answer`; None if it cannot be read."""
    try:
        found = api_pb2.ContainerAllocateResponse.FromString(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError, DecodeError):
        return None
    return Answer(tuple(d.host_path for d in found.devices), tuple(name.name for name in found.cdi_devices))


def containers_of(kubelet_dir: Path, pod_uid: str) -> tuple[Held, ...]:
    """List what the containers of a pod were given, by the pod's UID. Nothing if that is not known.

    Each ADD asks: a pod that the file does not name costs no more than reading it.
    """
    text = _read(kubelet_dir)
    if text is None or pod_uid.encode() not in text:
        return ()
    found: dict[str, list[Entry]] = {}
    for entry in _parsed(kubelet_dir, text) or ():
        if entry.pod_uid == pod_uid:
            found.setdefault(entry.container, []).append(entry)
    return tuple(
        Held(
            container,
            {entry.resource_name: entry.unit_ids for entry in its},
            answers={entry.resource_name: entry.answer for entry in its if entry.answer},
        )
        for container, its in found.items()
    )


def entries(kubelet_dir: Path) -> tuple[Entry, ...] | None:
    """List what the containers of all pods were given; None if that is not known."""
    text = _read(kubelet_dir)
    return _parsed(kubelet_dir, text) if text is not None else None


_NOTHING = b'{"Data": {"PodDeviceEntries": []}}'


def _read(kubelet_dir: Path) -> bytes | None:
    try:
        with (kubelet_dir / FILE).open("rb") as stream:
            return stream.read(MAX_BYTES)
    except FileNotFoundError:
        return _NOTHING  # kubelet has given nothing to anybody yet
    except OSError as error:
        _say(kubelet_dir, error)
        return None


def _parsed(kubelet_dir: Path, text: bytes) -> tuple[Entry, ...] | None:
    try:
        return tuple(
            Entry(
                str(e["PodUID"]),
                str(e["ContainerName"]),
                str(e["ResourceName"]),
                tuple(str(unit) for ids in e["DeviceIDs"].values() for unit in ids or ()),
                str(e.get("AllocResp") or ""),
            )
            for e in json.loads(text)["Data"]["PodDeviceEntries"] or ()
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _say(kubelet_dir, error)
        return None


def _say(kubelet_dir: Path, error: Exception) -> None:
    log.warning("what kubelet gave to init containers is not known: %s cannot be read: %s", kubelet_dir / FILE, error)


_CLAIMS_FORM = ("DRACheckpoint", "checkpoint.dra.kubelet.k8s.io/v1")


def claims_of(kubelet_dir: Path, driver: str) -> tuple[str, ...]:
    """List the claims, as namespace/name, that kubelet has noted of a driver.

    Raises Unavailable if the file cannot be read, or has a form that is not known.
    """
    path = kubelet_dir / CLAIMS_FILE
    try:
        with path.open("rb") as stream:
            entries = _entries(json.loads(stream.read(MAX_BYTES)))
        return tuple(f"{e['Namespace']}/{e['ClaimName']}" for e in entries if driver in _drivers(e))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise Unavailable(f"which claims kubelet has is not known: {path} cannot be read: {why}") from error


def _entries(document: Any) -> Collection[Any]:
    if "Data" not in document:
        if document["version"] != "v1":
            raise ValueError(f"its version {document['version']!r} is not known")
        return document.get("entries") or ()
    data = json.loads(document["Data"])
    if (found := (data["kind"], data["apiVersion"])) != _CLAIMS_FORM:
        raise ValueError(f"its form {found[0]!r} of {found[1]!r} is not known")
    return data["ClaimInfoStateList"] or ()


def _drivers(entry: Any) -> Collection[str]:
    return entry["DriverState"] or () if "DriverState" in entry else (entry["DriverName"],)
