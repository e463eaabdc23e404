"""Addresses from the standard IPAM plugins: executables found in CNI_PATH."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.errors import IpamFailed
from cni.result import Leases

TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class IpamCall:
    """What an IPAM plugin must know of the call it serves."""

    container_id: str
    ifname: str
    netns_path: str
    cni_args: str
    cni_path: str


def add(document: Mapping[str, Any], call: IpamCall, seconds: float = TIMEOUT_SECONDS) -> Leases:
    """Ask for addresses. Raises IpamFailed; then nothing was leased that `delete` would not return."""
    result = _run("ADD", document, call, seconds)
    ips, routes, dns = result.get("ips"), result.get("routes") or [], result.get("dns") or {}
    for what, value, usable in (
        # None at all would leave the interface without an address, and nobody would notice.
        ("ips", ips, bool(ips) and _all(ips, lambda ip: _is_cidr(ip["address"]) and _is_gateway(ip.get("gateway")))),
        ("routes", routes, _all(routes, lambda route: _is_cidr(route["dst"]) and _is_gateway(route.get("gw")))),
        ("dns", dns, isinstance(dns, dict)),
    ):
        if not usable:
            raise IpamFailed(_kind(document), f"answered without usable {what}: {value!r}")
    return Leases(tuple(ips or ()), tuple(routes), dns)


def delete(document: Mapping[str, Any], call: IpamCall, seconds: float = TIMEOUT_SECONDS) -> None:
    """Give addresses back. Repeating it is harmless. Raises IpamFailed."""
    _run("DEL", document, call, seconds)


def _all(items: Any, usable: Callable[[Mapping[str, Any]], bool]) -> bool:
    try:
        return isinstance(items, list) and all(isinstance(item, dict) and usable(item) for item in items)
    except (KeyError, ValueError):
        return False


def _is_cidr(text: Any) -> bool:
    return isinstance(text, str) and "/" in text and bool(ipaddress.ip_interface(text))


def _is_gateway(text: Any) -> bool:
    return text is None or text == "" or (isinstance(text, str) and bool(ipaddress.ip_address(text)))


def _kind(document: Mapping[str, Any]) -> str:
    return str(document["ipam"]["type"])


def _run(command: str, document: Mapping[str, Any], call: IpamCall, seconds: float) -> Mapping[str, Any]:
    kind = _kind(document)
    program = next((p for d in call.cni_path.split(":") if d and (p := Path(d) / kind).is_file()), None)
    if program is None:
        raise IpamFailed(kind, f"is not in CNI_PATH {call.cni_path!r}: install it there or change ipam.type")
    env = {
        "CNI_COMMAND": command,
        "CNI_CONTAINERID": call.container_id,
        "CNI_NETNS": call.netns_path,
        "CNI_IFNAME": call.ifname,
        "CNI_ARGS": call.cni_args,
        "CNI_PATH": call.cni_path,
        "PATH": os.defpath,
    }
    try:
        status, stdout, stderr = _finish([str(program)], json.dumps(document).encode(), env, seconds)
    except subprocess.TimeoutExpired as error:
        raise IpamFailed(kind, f"{command} did not end within {seconds:g} s and was killed") from error
    except OSError as error:
        raise IpamFailed(kind, f"{program} cannot be run: {error.strerror}") from error
    try:
        answer = json.loads(stdout) if stdout.strip() else {}
    except (ValueError, RecursionError):
        answer = {}
    if not isinstance(answer, dict):
        answer = {}
    if status != 0:
        text = answer.get("msg") or stderr.decode(errors="replace").strip()[-300:] or "no message"
        code = answer.get("code")
        raise IpamFailed(kind, f"{command} failed: {text}", code if isinstance(code, int) else None)
    return answer


def _finish(program: list[str], stdin: bytes, env: Mapping[str, str], seconds: float) -> tuple[int, bytes, bytes]:
    """Run a program to its end. Out of time, it is killed with its children, which hold the lease's lock."""
    pipe = subprocess.PIPE
    with subprocess.Popen(program, stdin=pipe, stdout=pipe, stderr=pipe, env=env, process_group=0) as process:
        try:
            stdout, stderr = process.communicate(stdin, timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, stdout, stderr
