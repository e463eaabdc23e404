"""Addresses from the standard IPAM plugins: executables found in CNI_PATH."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.errors import IpamFailed, RequestInvalid
from cni import protocol
from cni.ipam import program
from cni.netconf import VALID_ATTACHMENTS
from cni.result import Leases, check_result, in_version

TIMEOUT_SECONDS = 30.0
ADD_SECONDS = 125.0
"""whereabouts gives itself two minutes for an address (AddTimeLimit), and needs them where a job starts on a hundred
nodes at once (k8snetworkplumbingwg/whereabouts#313)."""
VERSIONS = ("1.1.0", "1.0.0", "0.4.0", "0.3.1", "0.3.0")
"""What we can speak with a plugin, newest first. Before 0.3.0 a result looks otherwise."""
CHECK_SINCE = "0.4.0"
COLLECT_SINCE = "1.1.0"
WITHOUT_LEASES = "static"
"""A plugin that keeps nothing that could be given back, or be gone."""
BUSY_TRIES, BUSY_SECONDS = 5, 1.0
NO_PATH = "/nonexistent"
"""What a plugin gets as CNI_PATH: a folder that is not there. It has nothing to call: a plugin of interfaces that is
taken for one of addresses would call itself, and each of those the next. Go's library refuses an empty text."""
NEEDS_MORE = (
    "its interpreter, loader or libraries are not in the agent's image: add them, or install a plugin that is a static"
    " program"
)
_SHOWN = 300
_CRASH = re.compile(r"^(runtime|fatal error|panic): ", re.MULTILINE)
_UNSEEN = re.compile(r"/net\.d/\S*: no such file or directory")
_NAMESPACE = re.compile(r"(?:^|;)K8S_POD_NAMESPACE=([^;]*)")
_HAS_NO_CHECK = "CHECK method is not implemented"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IpamCall:
    """What an IPAM plugin must know of the call it serves."""

    container_id: str
    ifname: str
    netns_path: str
    cni_args: str
    cni_path: str
    bounds: program.Bounds = field(default_factory=program.Bounds)


def namespace_of(cni_args: str) -> str:
    """Return the namespace of a call's pod, as the runtime tells it; empty if it does not."""
    found = _NAMESPACE.search(cni_args)
    return found[1] if found else ""


class IpamKilled(IpamFailed):
    """The plugin hung, or took more than it may, and was killed; the next call to it will end so too."""


class IpamMissing(IpamFailed):
    """The plugin is not installed, or cannot be run."""


def given_by_claim(network: Mapping[str, Any]) -> Leases | None:
    """Return the addresses that a claim's parameters give, which need no plugin; None for any other network.

    What a class or a network attachment says beside addresses only the plugin knows.
    """
    ipam = network["ipam"]
    given = ipam.get("addresses")
    is_plain = ipam.keys() == {"type", "addresses"} and ipam["type"] == WITHOUT_LEASES and isinstance(given, list)
    if not is_plain or {"runtimeConfig", "args"} & network.keys():
        return None
    if not given or any(not isinstance(entry, Mapping) or entry.keys() != {"address"} for entry in given):
        return None
    check_result({"ips": given})
    return Leases(tuple(given))


def add(document: Mapping[str, Any], call: IpamCall, seconds: float = ADD_SECONDS) -> Leases:
    """Ask for addresses. Raises IpamFailed; then nothing was leased that `delete` would not return."""
    result = _run("ADD", document, call, seconds)
    try:
        check_result(result)
    except RequestInvalid as error:
        raise IpamFailed(_kind(document), f"answered what cannot be used: {error}") from error
    if not result.get("ips"):  # then the interface would have no address, and nobody would notice
        raise IpamFailed(_kind(document), f"answered without an address (ips is {result.get('ips')!r})")
    return Leases(tuple(result["ips"]), tuple(result.get("routes") or ()), result.get("dns") or {})


def delete(document: Mapping[str, Any], call: IpamCall, seconds: float = TIMEOUT_SECONDS) -> None:
    """Give addresses back. Repeating it is harmless. Raises IpamFailed."""
    _run("DEL", document, call, seconds)


def check(
    document: Mapping[str, Any], call: IpamCall, answered: Mapping[str, Any], seconds: float = TIMEOUT_SECONDS
) -> None:
    """Ask whether the addresses of an answer are still leased. Raises IpamFailed if not.

    CHECK came with CNI 0.4.0; a network of an earlier version has none. Nor have some plugins, whatever the version
    (whereabouts, cmd/whereabouts.go): that is no word about the addresses.
    """
    version = document["cniVersion"]
    if _key(version) < _key(CHECK_SINCE):
        return
    try:
        _run("CHECK", {**document, "prevResult": in_version(answered, version)}, call, seconds)
    except IpamFailed as error:
        if _HAS_NO_CHECK not in str(error):
            raise
        log.debug("%s", error)


def collect(
    document: Mapping[str, Any], call: IpamCall, valid: Iterable[tuple[str, str]], seconds: float = TIMEOUT_SECONDS
) -> None:
    """Have a plugin free what belongs to none of these (container ID, interface), if it knows how to.

    Raises IpamFailed.
    """
    kept = [{"containerID": container, "ifname": ifname} for container, ifname in sorted(valid)]
    newer = {**document, "cniVersion": COLLECT_SINCE, **dict.fromkeys(VALID_ATTACHMENTS, kept)}
    if COLLECT_SINCE in _supported(newer, call, seconds):
        _run("GC", newer, call, seconds)


def status(document: Mapping[str, Any], call: IpamCall, seconds: float = TIMEOUT_SECONDS) -> None:
    """Raise IpamFailed if the plugin says that it could lease no address now, or is not there at all."""
    newer = {**document, "cniVersion": COLLECT_SINCE}
    if COLLECT_SINCE in _supported(newer, call, seconds):
        _run("STATUS", newer, call, seconds)


def _kind(document: Mapping[str, Any]) -> str:
    return str(document["ipam"]["type"])


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _run(command: str, document: Mapping[str, Any], call: IpamCall, seconds: float) -> Mapping[str, Any]:
    """Run one command, in the version of the document, or in the newest one that the plugin knows too."""
    try:
        return _ask(command, document, call, seconds)
    except IpamFailed as error:
        if error.code != protocol.INCOMPATIBLE_VERSION:
            raise
        known = _supported(document, call, seconds)
        asked = document["cniVersion"]
        common = [v for v in VERSIONS if v in known and v != asked]
        chosen = next((v for v in common if _key(v) < _key(asked)), common[-1] if common else None)
        if chosen is None:
            raise IpamFailed(
                _kind(document), f"knows CNI {', '.join(known) or 'of no version'} only: update it", error.code
            ) from error
        if command == "CHECK" and _key(chosen) < _key(CHECK_SINCE):
            return {}
        return _ask(command, _in_version(document, chosen), call, seconds)


def _in_version(document: Mapping[str, Any], version: str) -> Mapping[str, Any]:
    told = {**document, "cniVersion": version}
    if "prevResult" in told:
        told["prevResult"] = in_version(told["prevResult"], version)
    return told


def _supported(document: Mapping[str, Any], call: IpamCall, seconds: float) -> Sequence[str]:
    """Ask a plugin which versions of CNI it knows. One that does not say knows none. Raises IpamFailed."""
    try:
        found = _ask("VERSION", {"cniVersion": document["cniVersion"], "ipam": document["ipam"]}, call, seconds)
    except (IpamKilled, IpamMissing):
        raise
    except IpamFailed:
        return ()
    known = found.get("supportedVersions")
    return [v for v in known if isinstance(v, str)] if isinstance(known, list) else ()


def _ask(command: str, document: Mapping[str, Any], call: IpamCall, seconds: float) -> Mapping[str, Any]:
    kind = _kind(document)
    file = next((p for d in call.cni_path.split(":") if d and (p := Path(d) / kind).is_file()), None)
    if file is None:
        raise IpamMissing(kind, f"is not in CNI_PATH {call.cni_path!r}: install it there or change ipam.type")
    env = {
        "CNI_COMMAND": command,
        "CNI_CONTAINERID": call.container_id,
        "CNI_NETNS": call.netns_path,
        "CNI_IFNAME": call.ifname,
        "CNI_ARGS": call.cni_args,
        "CNI_PATH": NO_PATH,
        "PATH": os.defpath,
    }
    try:
        done = _run_program(file, json.dumps(document).encode(), env, seconds, call.bounds)
    except program.OutOfBounds as error:
        raise IpamKilled(
            kind,
            f"{command} {error}, and was killed with all that it had started: see that ipam.type"
            " names an IPAM plugin, and what it waits for",
        ) from error
    except OSError as error:
        # The kernel calls a program missing whose interpreter or loader is.
        why = NEEDS_MORE if error.errno == errno.ENOENT else error.strerror
        raise IpamMissing(kind, f"{file} cannot be run: {why}") from error
    if done.left:
        log.warning("IPAM plugin %s had left %d processes behind, which were killed", kind, done.left)
    try:
        answer = json.loads(done.stdout) if done.stdout.strip() else {}
    except (ValueError, RecursionError):
        answer = {}
    if not isinstance(answer, dict):
        answer = {}
    if done.status != 0:
        text = str(answer.get("msg") or "")[-_SHOWN:] or _last_words(done.stderr) or "no message"
        code = answer.get("code")
        raise IpamFailed(
            kind, f"{command} failed: {text}{_remedy(kind, text)}", code if isinstance(code, int) else None
        )
    return answer


def _last_words(stderr: bytes) -> str:
    """Return what a plugin said last. A Go program that crashes says why first, and lists its registers last."""
    text = stderr.decode(errors="replace").strip()
    crash = _CRASH.search(text)
    return text[crash.start() :].partition("\n\n")[0][:_SHOWN] if crash else text[-_SHOWN:]


def _run_program(
    file: Path, stdin: bytes, env: Mapping[str, str], seconds: float, bounds: program.Bounds
) -> program.Finished:
    """Run it, once its installer has written it: many copy over the file that is there. As CNI's library does."""
    for _ in range(BUSY_TRIES):
        try:
            return program.run(file, stdin, env, seconds, bounds)
        except OSError as error:
            if error.errno != errno.ETXTBSY:
                raise
        time.sleep(BUSY_SECONDS)
    return program.run(file, stdin, env, seconds, bounds)


def _remedy(kind: str, text: str) -> str:
    if kind == "dhcp" and "dial" in text:
        return (
            ": its daemon does not run; start `dhcp daemon` of the CNI plugins on this node, and let the agent see"
            " its socket (/run/cni/dhcp.sock)"
        )
    if _UNSEEN.search(text):
        return (
            ": if it is on the node, let the agent see it (chart: cni.ipamFolders); of the CNI configuration it is"
            " shown only what the networks that it knows of need"
        )
    return ""
