"""`nodefabric release`: by the running agent where one runs, on the books themselves where none does."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from agent.config import Config
from agent.errors import AgentError, LedgerInUse, RequestInvalid, Unavailable, UnknownDevice
from agent.hardware.host import Host
from agent.kubelet.cri import ContainerRuntime
from agent.kubelet.podresources import PodResources
from agent.ledger import Ledger
from agent.ledger.database import is_locked, lock_folder
from agent.model.allocation import Attachment
from agent.operator import admin
from agent.reconcile.reconciler import Reconciler
from agent.state import Latest
from cni import heal
from cni.attachment import Attachments
from cni.call import Node
from cni.detach import Detacher
from cni.heal import PodKnown, ReleaseRequest

COMMAND = "release"
MAX_REASON = 500
LOOK_SECONDS = 5.0

log = logging.getLogger(__name__)


def wish_of(request: Mapping[str, Any]) -> ReleaseRequest:
    """Read a request of the operator's socket. Raises RequestInvalid."""
    device, reason, force = request.get("device"), request.get("reason"), request.get("force", False)
    if not isinstance(device, str) or not 0 < len(device) <= 300:
        raise RequestInvalid("device must name a device, as `nodefabric status` does")
    if not isinstance(reason, str) or not 0 < len(reason.strip()) <= MAX_REASON:
        raise RequestInvalid(f"reason must say why, in at most {MAX_REASON} characters")
    if not isinstance(force, bool):
        raise RequestInvalid("force must be true or false")
    return ReleaseRequest(device, " ".join(reason.split()), force)


def answering(
    attachments: Attachments,
    reconciler: Reconciler,
    loop: asyncio.AbstractEventLoop,
    count: Callable[[str, str], None],
    look_seconds: float = LOOK_SECONDS,
) -> admin.Answer:
    """Make what carries out requests of the operator's socket, on its threads, in the running agent."""

    def answer(asked: Mapping[str, Any]) -> str:
        wish = wish_of(asked)
        # What kubelet said a minute ago is not enough to take a device away.
        pod_known: PodKnown = reconciler.pod_known
        looking = asyncio.run_coroutine_threadsafe(reconciler.look_around(), loop)
        try:
            looking.result(look_seconds)
        except concurrent.futures.TimeoutError:
            looking.cancel()
            pod_known = _nobody_answers
        done = attachments.release(wish, pod_known)
        count("release", "forced" if wish.force else "operator")
        return done

    return answer


def _nobody_answers(row: Attachment) -> bool | None:
    return None


def release(config: Config, wish: ReleaseRequest, open_host: Callable[[], Host]) -> str:
    """Release a device and tell what was done.

    Raises InUse for a device that a pod may use, Unavailable if an agent has the books and does not answer, and
    AgentError for all else that keeps it.
    """
    request = {"command": COMMAND, **asdict(wish)}
    wish_of(request)
    try:
        return admin.ask(config.admin_socket, request)
    except Unavailable as error:
        no_answer = error
        if not config.ledger_path.exists() and not is_locked(config.state_dir):
            raise UnknownDevice(f"no agent has been here: {config.ledger_path} is not there, and {error}") from error
    try:
        lock = lock_folder(config.state_dir)
    except LedgerInUse as error:
        raise Unavailable(f"an agent has the ledger open, but {no_answer}") from error
    try:
        return _without_agent(config, wish, open_host)
    finally:
        os.close(lock)


def _without_agent(config: Config, wish: ReleaseRequest, open_host: Callable[[], Host]) -> str:
    with ExitStack() as stack:
        host = open_host()
        stack.callback(host.close)
        snapshot = host.scan()
        if not snapshot.boot_id:
            raise Unavailable(f"{host.root}/proc/sys/kernel/random/boot_id cannot be read: run this on the node itself")
        ledger = Ledger.open(config.ledger_path, snapshot.boot_id)
        stack.callback(ledger.close)
        node = Node(host, ledger, Latest(snapshot))
        detacher = Detacher(node)
        stack.callback(detacher.close)
        return heal.release(node, detacher, wish, asyncio.run(_who_is_known(config)))


async def _who_is_known(config: Config) -> Callable[[Attachment], bool | None]:
    """Ask kubelet, and the runtime where it can be asked, which pods there are."""
    pods: Collection[tuple[str, str]] | None = None
    containers: Collection[str] | None = frozenset()
    kubelet = PodResources.of_kubelet(config.kubelet_dir)
    try:
        pods = (await kubelet.listing()).names
    except AgentError as error:
        log.warning("%s", error)
    finally:
        await kubelet.close()
    if config.runtime_socket is not None:
        try:
            containers = {s.sandbox_id for s in await ContainerRuntime(config.runtime_socket).sandboxes()}
        except AgentError as error:
            log.warning("%s", error)
            containers = None

    def known(row: Attachment) -> bool | None:
        if containers is not None and row.owner.container_id in containers:
            return True
        if pods is not None and (row.owner.pod.namespace, row.owner.pod.name) in pods:
            return True
        return None if pods is None or containers is None else False

    return known
