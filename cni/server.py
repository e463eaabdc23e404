"""The agent's end of the CNI socket: one request and one answer per connection.

Only root (or whoever runs the agent, in a user namespace) is heard; frames and time are bounded.
Each connection has a thread to itself (`agent.process.sockets`): what a request does is kernel and disk work that
blocks. What may take long is counted where it begins to: `cni.attachment` limits ADDs
that have a device, `cni.pod_devices` those that ask kubelet, and this module CHECK and GC. All these together are
far fewer than connections, so STATUS, DEL and the ADD of a pod that has nothing of ours find one at any time.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from agent.errors import (
    AgentError,
    AllocationError,
    AttachmentError,
    ConnectivityLimited,
    DeviceBusy,
    EnvironmentInvalid,
    HardwareError,
    IpamFailed,
    LedgerError,
    RequestInvalid,
    Unavailable,
)
from agent.model.allocation import PodRef
from agent.model.fields import NotJson
from agent.process import sockets
from cni import netconf, protocol
from cni.attachment import Attachments
from cni.call import Call
from cni.call_limits import Rules, Turns
from cni.netconf import VersionUnsupported
from cni.protocol import Answer
from cni.result import in_version

MAX_CONNECTIONS = 256
MAX_SLOW = 8
"""So many CHECKs and GCs are in flight at once: either may wait for devices and plugins for a minute."""
RECEIVE_SECONDS = 10.0
"""For a request to come whole, and for its answer to be taken."""
BEAT_SECONDS = 1.0
BACKLOG = 128
NEWEST = "1.1.0"
COMMANDS = ("ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION")
SINCE = {"CHECK": "0.4.0", "GC": "1.1.0", "STATUS": "1.1.0"}
"""Commands that did not exist from the start, and the version that brought them."""
MAX_CONF, MAX_VALUES = 64 << 10, 4096
"""Bytes of a configuration with prevResult, and values, about; but of GC's, which lists all attachments of a node.

A namespace's users may write networks. What an ADD says is kept while its pod lives, and decoded small values take
twenty times as much memory; many come at once.
"""

_CONTAINER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")
_IFNAME = re.compile(r"(?!\.{1,2}$)[!-.0-9;-~]{1,15}")
"""Printable ASCII without '/' and ':' (net/core/dev.c, dev_valid_name; IFNAMSIZ counts bytes)."""
_CODES: tuple[tuple[type[AgentError], int], ...] = (
    (VersionUnsupported, protocol.INCOMPATIBLE_VERSION),
    (EnvironmentInvalid, protocol.INVALID_ENVIRONMENT),
    (NotJson, protocol.DECODING_FAILURE),
    (RequestInvalid, protocol.INVALID_NETWORK_CONFIG),
    (DeviceBusy, protocol.TRY_AGAIN_LATER),
    (ConnectivityLimited, protocol.CONNECTIVITY_LIMITED),
    (Unavailable, protocol.TRY_AGAIN_LATER),
    (IpamFailed, protocol.IPAM_FAILED),
    (AttachmentError, protocol.CHECK_FAILED),
    (HardwareError, protocol.HARDWARE_FAILED),
    (LedgerError, protocol.LEDGER_FAILED),
    (AllocationError, protocol.TRY_AGAIN_LATER),
)

log = logging.getLogger(__name__)
Observe = Callable[[str], AbstractContextManager[object]]


class CniServer(sockets.UnixServer):
    """Listens on the CNI socket and answers.

    A request that is not done when the server closes, or fails for want of what was closed, gets no answer: its relay
    asks the next agent, as if this one had been killed.
    """

    def __init__(
        self,
        path: Path,
        attachments: Attachments,
        *,
        condition: Callable[[], str | None],
        observe: Observe,
        receive_seconds: float = RECEIVE_SECONDS,
    ) -> None:
        """`condition` returns why the agent cannot serve ADD now (for STATUS), or None."""
        super().__init__(path, MAX_CONNECTIONS, BACKLOG)
        self._attachments = attachments
        self._commands: Mapping[str, Callable[[Call], Mapping[str, Any] | None]] = {
            "ADD": attachments.add,
            "DEL": attachments.delete,
            "CHECK": self._check,
            "GC": self._collect,
            "STATUS": self._status,
        }
        self._condition = condition
        self._observe = observe
        self._receive_seconds = receive_seconds
        self._slow = Turns("CHECKs and GCs under way", Rules(MAX_SLOW))
        self._beats = _Beats(self.ending)

    def start(self, first: Callable[[], object] = lambda: None, mode: int = protocol.BEATING_MODE) -> None:
        """Listen, do something first (no relay puts a DEL on disk any more), then answer. Raises ConfigError."""
        super().start(first, mode)
        self._beats.start()

    def serve(self, connection: socket.socket) -> None:
        """Answer one request."""
        try:
            request = protocol.receive_request(connection, self._receive_seconds)
        except protocol.NothingSaid:
            return
        try:
            if request.env.get("CNI_COMMAND") == "ADD" and _has_hung_up(connection):
                raise BrokenPipeError("nobody waits for this ADD any more, whose DEL may have come before it")
            with self._beats.given(connection, request):
                answer = self.answer(request)
        finally:
            if request.netns is not None:
                os.close(request.netns)
        if answer.exit == 0 or not self.ending.is_set():
            protocol.send_answer(connection, answer, self._receive_seconds)

    def answer(self, request: protocol.Request) -> Answer:
        """Do what a request asks for, whatever comes: every error becomes a CNI error object."""
        command = request.env.get("CNI_COMMAND", "")
        call: Call | None = None
        try:
            if command not in COMMANDS:
                raise EnvironmentInvalid(f"CNI_COMMAND must be one of {', '.join(COMMANDS)}, is {command!r}")
            with self._observe(command):
                if command == "VERSION":
                    return printed({"cniVersion": NEWEST, "supportedVersions": list(netconf.SUPPORTED_VERSIONS)})
                call = read_call(command, request)
                if (result := self._commands[command](call)) is None:
                    return Answer(0, b"")
                version = call.conf.cni_version
                # An answer from the books may be of another version: the runtime was updated since.
                return printed(result if result.get("cniVersion") == version else in_version(result, version))
        except AgentError as error:
            # A runtime may ask for the status every few seconds.
            level = logging.DEBUG if command == "STATUS" else logging.ERROR
            log.log(level, "CNI %s of container %s failed: %s", command, request.env.get("CNI_CONTAINERID"), error)
            failure: Exception = error
        except Exception as error:
            log.exception("CNI %s met an unexpected error", command)
            failure = error
        return failed(command, call.conf.cni_version if call is not None else version_of(request), failure)

    def _check(self, call: Call) -> None:
        with self._slow.hold("CHECK", call.conf.name):
            self._attachments.check(call)

    def _collect(self, call: Call) -> None:
        with self._slow.hold("GC", call.conf.name):
            self._attachments.collect(call)

    def _status(self, call: Call) -> None:
        # While this fails the whole node is not ready. Pods that have nothing need no more than this answer.
        if not call.conf.is_chained and (condition := self._condition()) is not None:
            raise Unavailable(condition)
        self._attachments.status(call)


class _Beats:
    """Tells relays each second that this process works on their requests, as one that is stopped or stuck does not.

    One thread is enough for all requests: one that waits for a driver may take its time.
    """

    def __init__(self, ending: threading.Event) -> None:
        self._ending = ending
        self._guard = threading.Lock()
        self._connections: set[socket.socket] = set()

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, name="cni-beats", daemon=True).start()

    @contextmanager
    def given(self, connection: socket.socket, request: protocol.Request) -> Iterator[None]:
        """Give beats meanwhile, if the relay wants them. None comes later, inside the answer."""
        if not request.wants_beats:
            yield
            return
        connection.settimeout(None)  # it was for the request
        with self._guard:
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._guard:
                self._connections.discard(connection)

    def _run(self) -> None:
        while not self._ending.wait(BEAT_SECONDS):
            with self._guard:
                for connection in self._connections:
                    with suppress(OSError):  # nobody waits any more
                        protocol.send_beat(connection)


def _has_hung_up(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, 0)  # a hang-up is reported in any case
    return bool(poll.poll(0))


# ------------------------------------------------------------------------------------------------ requests, read


def read_call(command: str, request: protocol.Request) -> Call:
    """Read a request for anything but VERSION. Raises RequestInvalid that names what is wrong.

    A DEL needs no good configuration: what it undoes is in the ledger, and it must not get stuck.
    """
    args = _cni_args(command, _text(command, request, "CNI_ARGS"))
    try:
        conf = _conf(command, request.stdin, args)
    except RequestInvalid as error:
        if command != "DEL":
            raise
        log.warning("DEL of container %s has a bad configuration: %s", request.env.get("CNI_CONTAINERID"), error)
        conf = netconf.from_document({})
    since = SINCE.get(command)
    if since is not None and netconf.version_key(conf.cni_version) < netconf.version_key(since):
        raise VersionUnsupported(
            f"{command} came with CNI {since}, and the configuration says cniVersion {conf.cni_version}:"
            f" set it to {since} or newer to use {command}"
        )
    return _call(command, request, conf, args)


def version_of(request: protocol.Request) -> str:
    """Return the version for an error: the configuration's, if it can be read at all."""
    try:
        return netconf.version_in(request.stdin if len(request.stdin) <= MAX_CONF else b"")
    except RequestInvalid:
        return netconf.SUPPORTED_VERSIONS[-1]


def _conf(command: str, text: bytes, args: Mapping[str, str]) -> netconf.NetConf:
    if command != "GC" and len(text) > MAX_CONF:
        raise RequestInvalid(
            f"the network configuration has {len(text)} bytes with prevResult, and {MAX_CONF} are allowed: make it"
            " smaller"
        )
    if command != "GC" and sum(map(text.count, (b"{", b"[", b","))) > MAX_VALUES:
        raise RequestInvalid(
            f"the network configuration has more than {MAX_VALUES} values with prevResult: leave some out"
        )
    return netconf.parse(text, args)


def _call(command: str, request: protocol.Request, conf: netconf.NetConf, args: Mapping[str, str]) -> Call:
    env = request.env
    container_id, ifname = env.get("CNI_CONTAINERID", ""), env.get("CNI_IFNAME", "")
    if command in ("ADD", "DEL", "CHECK"):
        if not _CONTAINER_ID.fullmatch(container_id):
            raise EnvironmentInvalid(f"CNI_CONTAINERID must be letters, digits, '.', '_' or '-', is {container_id!r}")
        if not _IFNAME.fullmatch(ifname):
            raise EnvironmentInvalid(f"CNI_IFNAME must be an interface name of at most 15 characters, is {ifname!r}")
        if command == "ADD" and "%" in ifname:  # net/core/dev.c, dev_alloc_name
            raise EnvironmentInvalid(f"CNI_IFNAME must not have a %, which the kernel makes a number of, is {ifname!r}")
    netns_path = _text(command, request, "CNI_NETNS")
    if command in ("ADD", "CHECK") and (request.netns is None or not netns_path):
        raise EnvironmentInvalid(f"{command} needs CNI_NETNS, is {netns_path!r}")
    return Call(
        container_id=container_id,
        ifname=ifname,
        netns=request.netns,
        netns_path=netns_path,
        pod=PodRef(args.get("K8S_POD_NAMESPACE", ""), args.get("K8S_POD_NAME", ""), args.get("K8S_POD_UID", "")),
        cni_args=_text(command, request, "CNI_ARGS"),
        cni_path=_text(command, request, "CNI_PATH"),
        conf=conf,
        spooled_at=request.spooled_at,
    )


def _text(command: str, request: protocol.Request, name: str) -> str:
    """Read a variable that the books will hold, which take nothing but text. A DEL makes do with what is text of it."""
    value = request.env.get(name, "")
    if value.isascii():
        return value
    legible = value.encode(errors="replace").decode()
    if legible != value and command != "DEL":
        raise EnvironmentInvalid(f"{name} must be UTF-8, is {value!r}")
    return legible


def _cni_args(command: str, text: str) -> dict[str, str]:
    """Read CNI_ARGS. A DEL needs none of them."""
    found = {}
    for part in filter(None, text.split(";")):
        name, equals, value = part.partition("=")
        if not equals and command != "DEL":
            raise EnvironmentInvalid(f"CNI_ARGS must be NAME=VALUE;…, has {part!r}")
        found[name] = value
    return found


# ----------------------------------------------------------------------------------------------------- answers


def printed(document: Mapping[str, Any]) -> Answer:
    """Answer with a result."""
    return Answer(0, json.dumps(document).encode())


def failed(command: str, version: str, error: Exception) -> Answer:
    """Answer with an error object in the version of the call."""
    reason = error.reason if isinstance(error, AgentError) else type(error).__name__
    text = str(error) if isinstance(error, AgentError) else f"unexpected error: {error}"
    document = {"cniVersion": version, "code": code_of(command, error), "msg": text, "details": reason}
    return Answer(1, json.dumps(document).encode())


def code_of(command: str, error: Exception) -> int:
    """Find CNI's code for an error. For STATUS all that is not the caller's fault means: not available."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), protocol.INTERNAL)
    if command != "STATUS" or isinstance(error, RequestInvalid) or code == protocol.CONNECTIVITY_LIMITED:
        return code
    return protocol.PLUGIN_NOT_AVAILABLE
