"""Which claims kubelet has noted, and of which drivers: it asks these drivers before the claims' pods can end.

kubelet notes a claim before it asks any driver to prepare it, and until all have unprepared it. The form is that of
Kubernetes, pkg/kubelet/cm/dra/state: since 1.32

    {"Data": "{\"kind\", \"apiVersion\", \"ClaimInfoStateList\": [
        {\"Namespace\", \"ClaimName\", \"DriverState\": {\"<driver>\": …}}]}", "Checksum"}

and before, with a single driver for each claim, {"version", "entries": [{"Namespace", "ClaimName", "DriverName"}],
"checksum"}.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from agent.errors import Unavailable

FILE = Path("dra_manager_state")
"""Below kubelet's folder."""
MAX_BYTES = 64 << 20
_KNOWN = ("DRACheckpoint", "checkpoint.dra.kubelet.k8s.io/v1")


def claims_of(kubelet_dir: Path, driver: str) -> tuple[str, ...]:
    """List the claims, as namespace/name, that kubelet has noted of a driver.

    Raises Unavailable if the file cannot be read, or has a form that is not known.
    """
    path = kubelet_dir / FILE
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
    if (found := (data["kind"], data["apiVersion"])) != _KNOWN:
        raise ValueError(f"its form {found[0]!r} of {found[1]!r} is not known")
    return data["ClaimInfoStateList"] or ()


def _drivers(entry: Any) -> Collection[str]:
    return entry["DriverState"] or () if "DriverState" in entry else (entry["DriverName"],)
