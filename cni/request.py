"""A CNI request, read: the environment as the specification has it, and the network configuration."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
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
from cni import netconf, protocol
from cni.call import Call
from cni.netconf import VersionUnsupported
from cni.protocol import Answer

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

log = logging.getLogger(__name__)


def read(command: str, request: protocol.Request) -> Call:
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
        raise netconf.VersionUnsupported(
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


NEWEST = "1.1.0"


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
