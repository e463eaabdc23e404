"""The taint by which the scheduler leaves the own Node out while the agent is not there.

kubelet refuses a pod for good that asks for devices which no plugin offers at that moment. Listing them as unhealthy
before the end would not help: kubelet refuses at once, and the scheduler hears of it up to ten seconds later. A taint
it hears of within milliseconds. It is put before an end that is planned, and taken away once kubelet has the lists
again; by then, or ten seconds later at the latest, what the Node's status says of our devices is true.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.cluster.apiserver import DAEMONSET, NODE, ApiServer, on_own_thread
from agent.config import Restart
from agent.errors import ConfigError, Conflicted, Refused, Unavailable
from agent.model.fields import at, objects_at
from agent.process.backoff import Backoff

KEY = "nodefabric.io/agent-not-ready"
DAEMON_SET = "NODEFABRIC_DAEMONSET"
"""Variable that names the DaemonSet of the agent, as namespace/name. Agents that take no taint away have none."""
TAINT: Mapping[str, str] = {"key": KEY, "effect": "NoSchedule"}
RETRY = Backoff(first=1.0, longest=5.0, jitter=0.1)
REFUSED = Backoff(first=5.0, longest=60.0, jitter=0.1)
MOST_TRIES = 5
"""Somebody else may change the Node between a look at it and the change, though hardly so often."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Times:
    """Times in seconds."""

    put: float = 2.0
    """So long an end waits for the API server."""
    longest: float = 60.0
    """After so long the taint goes though kubelet has no lists: the Node's status has long shown it, and pods that
    need nothing of ours must not wait for us."""
    retry: Backoff = RETRY
    """Between attempts to take it away while the API server does not answer."""
    refused: Backoff = REFUSED
    """Between attempts while it says no: rights may come later, and a server that starts knows none yet."""


DEFAULT_TIMES = Times()


class NodeTaint:
    """The taint of one Node. All of it belongs to the event loop."""

    def __init__(
        self,
        open_api: Callable[[], ApiServer],
        node_name: str,
        daemon_set: str | None = None,
        times: Times = DEFAULT_TIMES,
    ) -> None:
        """`open_api` raises ConfigError where there is no account; its client is used by nobody else, so that no other
        request holds this up. `daemon_set` (namespace/name) is what starts the agent again after its end."""
        self._open_api = open_api
        self._node_name = node_name
        self._daemon_set = daemon_set
        self._times = times
        self._api: ApiServer | None = None
        self._changing = threading.Lock()
        self._is_leaving = False
        self.settings = Restart()
        self.registered = asyncio.Event()
        """Set once kubelet has all lists."""

    @property
    def leave_seconds(self) -> float:
        """How many seconds `leave` takes at most."""
        is_put = self.settings.taint and self.registered.is_set()
        return self._times.put + self.settings.wait_seconds if is_put else 0.0

    async def lift(self) -> None:
        """Take the taint away once kubelet has the lists, and after a while before that. Whoever put it."""
        try:
            async with asyncio.timeout(self._times.longest):
                await self.registered.wait()
        except TimeoutError:
            await self._lift()
            await self.registered.wait()  # it may have been another agent's turn, which puts the taint at its end
        await self._lift()

    async def _lift(self) -> None:
        said, failures = "", 0
        while True:
            failures, retry = failures + 1, self._times.retry
            try:
                if await on_own_thread(self._change, tainted=False):
                    why = (
                        "kubelet has all lists" if self.registered.is_set() else "kubelet has had no lists for too long"
                    )
                    log.info("took the taint %s from the Node: %s", KEY, why)
                return
            except ConfigError as error:
                log.debug("no taint is looked for: %s", error)
                return
            except Refused as error:
                if str(error) != said:
                    log.warning("a taint %s stays on the Node for now, if there is one: %s", KEY, error)
                said, retry = str(error), self._times.refused
            except Unavailable as error:
                log.warning("the taint %s is on the Node still, if there is one: %s", KEY, error)
            await asyncio.sleep(retry.after(failures, chance=random.SystemRandom().random()))

    async def leave(self) -> None:
        """Taint the Node if that is wanted, and wait for pods that were placed on it before.

        Not unless kubelet had our lists, nor where nobody would take the taint away again.
        """
        if self.leave_seconds and await self._put():
            log.info("tainted the Node with %s; the end comes in %g s", KEY, self.settings.wait_seconds)
            await asyncio.sleep(self.settings.wait_seconds)

    async def _put(self) -> bool:
        self._is_leaving = True
        try:
            async with asyncio.timeout(self._times.put):
                return await on_own_thread(self._taint)
        except TimeoutError:
            log.warning("the Node gets no taint: the API server does not answer within %g s", self._times.put)
        except (ConfigError, Unavailable) as error:
            log.warning("the Node gets no taint: %s", error)
        return False

    # ------------------------------------------------------- on a thread of its own

    def _taint(self) -> bool:
        """Taint the Node, and return whether it is tainted now."""
        if (why := self._nobody_follows()) is not None:
            log.info("the Node gets no taint: %s", why)
            return False
        self._change(tainted=True)
        return True

    def _nobody_follows(self) -> str | None:
        """Return why no agent would take the taint away again; None if one will."""
        if self._daemon_set is None:
            return None
        namespace, _, name = self._daemon_set.partition("/")
        found = self._client().current(DAEMONSET.within(namespace), name)
        if found is None:
            return f"{self._daemon_set} is removed"
        node = self._client().current(NODE, self._node_name) or {}
        why = why_nobody_follows(found, at(node, "metadata.labels", dict, {}))
        return f"{self._daemon_set} {why}" if why is not None else None

    def _change(self, *, tainted: bool) -> bool:
        """Set or remove the taint. Returns whether that changed the Node. Raises Unavailable."""
        with self._changing:
            return self._changed(tainted=tainted)

    def _changed(self, *, tainted: bool) -> bool:
        for _ in range(MOST_TRIES):
            if self._is_leaving and not tainted:
                return False  # what is there is there for the end
            node = self._client().current(NODE, self._node_name) or {}
            present = objects_at(node, "spec.taints")
            wanted = with_taint(present) if tainted else without_taint(present)
            if wanted == present:
                return False
            # The version is that of the list that was read: others' taints would be lost else, for the list is
            # replaced as a whole.
            patch = {
                "metadata": {"resourceVersion": at(node, "metadata.resourceVersion", str)},
                "spec": {"taints": wanted or None},
            }
            try:
                self._client().merge(NODE, self._node_name, patch)
            except Conflicted as error:
                log.debug("the Node was changed meanwhile: %s", error)
            else:
                return True
        raise Unavailable(f"the Node was changed by others {MOST_TRIES} times while its taint was to be changed")

    def _client(self) -> ApiServer:
        if self._api is None:
            self._api = self._open_api()
        return self._api


def with_taint(present: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Add the taint to a Node's taints, in place of any other of its key."""
    if TAINT in present:
        return list(present)
    return [*without_taint(present), TAINT]


def without_taint(present: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leave the taint out, whatever its effect: kubelet may be configured to register its Node with one."""
    return [taint for taint in present if taint.get("key") != KEY]


def why_nobody_follows(daemon_set: Mapping[str, Any], labels: Mapping[str, str]) -> str | None:
    """Return why a DaemonSet starts no agent that takes the taint from a Node with these labels; None if it does."""
    if "deletionTimestamp" in at(daemon_set, "metadata", dict):
        return "is being removed"
    pod = at(daemon_set, "spec.template.spec", dict)
    containers = objects_at(pod, "containers")
    if not any(variable.get("name") == DAEMON_SET for one in containers for variable in objects_at(one, "env")):
        return "starts agents that take no taint away any more"
    if any(labels.get(key) != value for key, value in at(pod, "nodeSelector", dict, {}).items()):
        return "leaves the Node out by its nodeSelector"
    return None
