"""The agent's end of the CNI socket: one request and one answer per connection.

Only root (or whoever runs the agent, in a user namespace) is heard; frames and time are bounded.
Errors become CNI codes in one table. Each connection has a thread to itself: what a request does
is kernel and disk work that blocks.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from agent.errors import (
    AgentError,
    AttachmentError,
    ConfigError,
    DeviceBusy,
    HardwareError,
    IpamFailed,
    LedgerError,
    RequestInvalid,
    Unavailable,
)
from agent.model.allocation import PodRef
from cni import netconf, protocol
from cni.attachment import Attachments, Call

MAX_CONNECTIONS = 64
WAITING_THREADS = 4
"""To start a thread for a request takes longer than to read it, and makes work for the kernel that an ADD waits for."""
RECEIVE_SECONDS = 10.0
"""For a request to come whole, and for its answer to be taken."""
END_SECONDS = 0.5
"""How long the end of the agent waits for requests under way."""
ACCEPT_PAUSE_SECONDS = 0.1
COMMANDS = ("ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION")

_CONTAINER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")
_IFNAME = re.compile(r"(?!\.{1,2}$)[!-.0-9;-~]{1,15}")
"""Printable ASCII without '/' and ':' (net/core/dev.c, dev_valid_name; IFNAMSIZ counts bytes)."""

_CODES: tuple[tuple[type[AgentError], int], ...] = (
    (RequestInvalid, protocol.INVALID_NETWORK_CONFIG),
    (DeviceBusy, protocol.TRY_AGAIN_LATER),
    (Unavailable, protocol.TRY_AGAIN_LATER),
    (IpamFailed, protocol.IPAM_FAILED),
    (AttachmentError, protocol.CHECK_FAILED),
    (HardwareError, protocol.HARDWARE_FAILED),
    (LedgerError, protocol.LEDGER_FAILED),
)

log = logging.getLogger(__name__)
Observe = Callable[[str], AbstractContextManager[None]]


class EnvironmentInvalid(RequestInvalid):
    """A CNI_* variable is missing or wrong."""


class CniServer:
    """Listens on the CNI socket and answers."""

    def __init__(
        self,
        path: Path,
        attachments: Attachments,
        *,
        obstacle: Callable[[], str | None],
        observe: Observe,
        receive_seconds: float = RECEIVE_SECONDS,
    ) -> None:
        """`obstacle` tells why the agent cannot serve ADD now (for STATUS), or None."""
        self._path = path
        self._attachments = attachments
        self._obstacle = obstacle
        self._observe = observe
        self._receive_seconds = receive_seconds
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._guard = threading.Lock()
        self._waiting = 0
        """How many threads wait for a connection."""
        self._ending = threading.Event()
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """Listen. Raises ConfigError if another agent listens there or the folder cannot be used."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_served(self._path):
                raise ConfigError(str(self._path), ["another agent serves this socket: stop it, or set runDir"])
            listener = _listen(self._path)
        except OSError as error:
            raise ConfigError(str(self._path), [f"cannot be made: {error.strerror or error}"]) from error
        self._listener = listener
        for _ in range(WAITING_THREADS):
            self._hire(listener)

    def close(self, seconds: float = END_SECONDS) -> None:
        """Stop listening, and wait a bounded time for requests under way.

        One that is not done by then, or that fails for want of what was closed, gets no answer: its
        relay asks the next agent, as if this one had been killed.
        """
        if self._listener is None:
            return
        self._ending.set()
        self._path.unlink(missing_ok=True)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._listener = None
        deadline = time.monotonic() + seconds
        for _ in range(MAX_CONNECTIONS):
            if not self._slots.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return

    def _hire(self, listener: socket.socket) -> None:
        try:
            threading.Thread(target=self._work, args=(listener,), name="cni", daemon=True).start()
        except RuntimeError as error:  # no more threads: those there are carry on
            log.error("CNI requests have to wait for each other: %s", error)

    def _work(self, listener: socket.socket) -> None:
        """Serve one connection after the other, for as long as threads are needed that wait for one."""
        while self._is_needed():
            self._slots.acquire()
            try:
                connection = self._take(listener)
                if connection is None:
                    return
                self._serve(connection)
            finally:
                self._slots.release()

    def _is_needed(self) -> bool:
        with self._guard:
            if self._waiting >= WAITING_THREADS:
                return False
            self._waiting += 1
            return True

    def _take(self, listener: socket.socket) -> socket.socket | None:
        """Wait for a connection, and see that somebody waits for the next. None at the end."""
        while True:
            try:
                connection = listener.accept()[0]
                break
            except OSError as error:
                if self._ending.is_set():
                    return None
                # Out of descriptors or memory: nobody else would serve this socket, so carry on.
                log.error("a CNI connection cannot be taken: %s", error)
                self._ending.wait(ACCEPT_PAUSE_SECONDS)
        with self._guard:
            self._waiting -= 1
            is_last = self._waiting == 0
        if is_last:
            self._hire(listener)
        return connection

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                uid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
                if uid != os.geteuid():
                    log.warning("refused a CNI request of user %d", uid)
                    return
                request = protocol.receive_request(connection, self._receive_seconds)
                try:
                    answer = self.answer(request)
                finally:
                    if request.netns is not None:
                        os.close(request.netns)
                if answer.exit == 0 or not self._ending.is_set():
                    connection.settimeout(self._receive_seconds)
                    connection.sendall(protocol.encode_answer(answer))
        except (OSError, protocol.FrameInvalid) as error:
            log.warning("a CNI connection ended early: %s", error)

    def answer(self, request: protocol.Request) -> protocol.Answer:
        """Do what a request asks for, whatever comes: every error becomes a CNI error object."""
        command = request.env.get("CNI_COMMAND", "")
        version = "1.1.0"
        try:
            if command not in COMMANDS:
                raise EnvironmentInvalid(f"CNI_COMMAND must be one of {', '.join(COMMANDS)}, is {command!r}")
            with self._observe(command):
                if command == "VERSION":
                    return _printed({"cniVersion": version, "supportedVersions": list(netconf.SUPPORTED_VERSIONS)})
                args = _cni_args(command, request.env.get("CNI_ARGS", ""))
                conf = _conf(command, request, args)
                version = conf.cni_version
                return self._dispatch(command, _call(command, request, conf, args))
        except EnvironmentInvalid as error:
            return _failed(version, protocol.INVALID_ENVIRONMENT, error)
        except AgentError as error:
            code = next((code for kind, code in _CODES if isinstance(error, kind)), protocol.INTERNAL)
            log.error("CNI %s of container %s failed: %s", command, request.env.get("CNI_CONTAINERID"), error)
            return _failed(version, code, error)
        except Exception as error:
            log.exception("CNI %s met an unexpected error", command)
            return _failed(version, protocol.INTERNAL, error)

    def _dispatch(self, command: str, call: Call) -> protocol.Answer:
        if command == "ADD":
            return _printed(self._attachments.add(call))
        if command == "DEL":
            self._attachments.delete(call)
        elif command == "CHECK":
            self._attachments.check(call)
        elif command == "GC":
            self._attachments.collect(call)
        elif (obstacle := self._obstacle()) is not None:
            return _failed(call.conf.cni_version, protocol.PLUGIN_NOT_AVAILABLE, Unavailable(obstacle))
        else:
            self._attachments.status(call)
        return protocol.Answer(0, b"")


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.unlink(missing_ok=True)
        listener.bind(str(fresh))
        os.chmod(fresh, 0o600)
        listener.listen(128)
        os.rename(fresh, path)  # so that a relay finds either the old socket or a served one
    except OSError:
        listener.close()
        fresh.unlink(missing_ok=True)
        raise
    return listener


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def _conf(command: str, request: protocol.Request, args: Mapping[str, str]) -> netconf.NetConf:
    """Read the configuration. A DEL needs none: what it undoes is in the ledger, and it must not get stuck."""
    try:
        return netconf.parse(request.stdin, args)
    except RequestInvalid as error:
        if command != "DEL":
            raise
        log.warning("DEL of container %s has a bad configuration: %s", request.env.get("CNI_CONTAINERID"), error)
        return netconf.from_document({})


def _call(command: str, request: protocol.Request, conf: netconf.NetConf, args: Mapping[str, str]) -> Call:
    env = request.env
    container_id, ifname = env.get("CNI_CONTAINERID", ""), env.get("CNI_IFNAME", "")
    if command in ("ADD", "DEL", "CHECK"):
        if not _CONTAINER_ID.fullmatch(container_id):
            raise EnvironmentInvalid(f"CNI_CONTAINERID must be letters, digits, '.', '_' or '-', is {container_id!r}")
        if not _IFNAME.fullmatch(ifname):
            raise EnvironmentInvalid(f"CNI_IFNAME must be an interface name of at most 15 characters, is {ifname!r}")
    netns_path = env.get("CNI_NETNS", "")
    if command in ("ADD", "CHECK") and (request.netns is None or not netns_path):
        raise EnvironmentInvalid(f"{command} needs CNI_NETNS, is {netns_path!r}")
    return Call(
        container_id=container_id,
        ifname=ifname,
        netns=request.netns,
        netns_path=netns_path,
        pod=PodRef(args.get("K8S_POD_NAMESPACE", ""), args.get("K8S_POD_NAME", ""), args.get("K8S_POD_UID", "")),
        cni_args=env.get("CNI_ARGS", ""),
        cni_path=env.get("CNI_PATH", ""),
        conf=conf,
    )


def _cni_args(command: str, text: str) -> dict[str, str]:
    """Read CNI_ARGS. A DEL needs none of them."""
    found = {}
    for part in filter(None, text.split(";")):
        name, equals, value = part.partition("=")
        if not equals and command != "DEL":
            raise EnvironmentInvalid(f"CNI_ARGS must be NAME=VALUE;…, has {part!r}")
        found[name] = value
    return found


def _printed(document: Mapping[str, Any]) -> protocol.Answer:
    return protocol.Answer(0, json.dumps(document).encode())


def _failed(version: str, code: int, error: Exception) -> protocol.Answer:
    reason = error.reason if isinstance(error, AgentError) else type(error).__name__
    text = str(error) if isinstance(error, AgentError) else f"unexpected error: {error}"
    document = {"cniVersion": version, "code": code, "msg": text, "details": reason}
    return protocol.Answer(1, json.dumps(document).encode())
