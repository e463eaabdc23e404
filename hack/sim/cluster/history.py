"""What has happened to objects, in order, for those who watch.

Source of the events: Kubernetes 1.36, staging/src/k8s.io/apimachinery/pkg/watch and pkg/apis/meta/v1/watch.go.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hack.sim.cluster.kinds import Target, is_selected


@dataclass(frozen=True, slots=True)
class Event:
    version: int
    type: str
    kind: str
    document: Mapping[str, Any]


class History:
    """Safe to use from any thread; `guard` is the lock of all that has versions."""

    def __init__(self) -> None:
        self.guard = threading.Condition(threading.RLock())
        self.version = 1
        self._events: list[Event] = []
        self.compacted = 0
        self._watches_to_break = 0

    def happen(self, type_: str, kind: str, document: Mapping[str, Any], version: int | None = None) -> None:
        """Note an event, as the next version if it has none."""
        with self.guard:
            if version is None:
                self.version += 1
                version = self.version
            copy = json.loads(json.dumps(document))
            copy["metadata"]["resourceVersion"] = str(version)
            self._events.append(Event(version, type_, kind, copy))
            self.guard.notify_all()

    def compact(self) -> None:
        """Forget what has happened so far, as etcd does every few minutes."""
        with self.guard:
            self._events.clear()
            self.compacted = self.version

    def break_watches(self) -> None:
        """Cut the connections of all watches."""
        with self.guard:
            self._watches_to_break += 1
            self.guard.notify_all()

    def watch(
        self,
        target: Target,
        fields: Mapping[str, str],
        since: int,
        times: tuple[float, float],
        send: Callable[[Any], None],
    ) -> str:
        """Send the events after a version until the time is over, the connection is cut, or the version is too old.

        `times`: seconds of the watch, and between bookmarks. Returns which of the three: over, cut or gone.
        """
        until = time.monotonic() + times[0]
        kind = target.kind
        with self.guard:
            breaks = self._watches_to_break
        while True:
            with self.guard:
                if since < self.compacted:
                    return "gone"
                news = [event for event in self._events if event.version > since]
                if not news:
                    left = until - time.monotonic()
                    if left <= 0:
                        return "over"
                    self.guard.wait(min(left, times[1]))
                if breaks != self._watches_to_break:
                    return "cut"
                news = [event for event in self._events if event.version > since]
                version = self.version
            for event in news:
                metadata = event.document["metadata"]
                if event.kind != kind.kind or (target.namespace and metadata["namespace"] != target.namespace):
                    continue
                if is_selected(event.document, fields):
                    send({"type": event.type, "object": event.document})
            if not news:
                metadata = {"resourceVersion": str(version)}
                send(
                    {
                        "type": "BOOKMARK",
                        "object": {"kind": kind.kind, "apiVersion": kind.api_version} | {"metadata": metadata},
                    }
                )
            since = max([since, *(event.version for event in news)]) if news else version
