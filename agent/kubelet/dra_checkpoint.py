"""Which claims kubelet has noted, and of which drivers: these it asks before their pods can end.

It notes a claim before any driver is asked to prepare it, and until all have unprepared it (kubelet,
pkg/kubelet/cm/dra/state):

    {"Data": "{\"Entries\": [{\"Namespace\", \"ClaimName\", \"DriverState\": {\"<driver>\": …}}]}", "Checksum"}
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

FILE = Path("dra_manager_state")
"""Below kubelet's folder."""
MAX_BYTES = 64 << 20

log = logging.getLogger(__name__)


def claims_of(kubelet_dir: Path, driver: str) -> tuple[str, ...]:
    """List the claims, as namespace/name, that kubelet has noted of a driver; nothing if that cannot be told."""
    try:
        with (kubelet_dir / FILE).open("rb") as stream:
            entries = json.loads(json.loads(stream.read(MAX_BYTES))["Data"])["Entries"] or ()
        return tuple(f"{e['Namespace']}/{e['ClaimName']}" for e in entries if driver in (e["DriverState"] or ()))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        log.warning("the claims that kubelet has are not known: %s cannot be read: %s", kubelet_dir / FILE, error)
        return ()
