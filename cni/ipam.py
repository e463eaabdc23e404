"""Addresses from the standard IPAM plugins: executables found in CNI_PATH."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
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


def add(document: Mapping[str, Any], call: IpamCall) -> Leases:
    """Ask for addresses. Raises IpamFailed; then nothing was leased that `delete` would not return."""
    result = _run("ADD", document, call)
    ips = result.get("ips") or []
    routes = result.get("routes") or []
    if not isinstance(ips, list) or not all(isinstance(ip, dict) and isinstance(ip.get("address"), str) for ip in ips):
        raise IpamFailed(_kind(document), f"answered without usable ips: {ips!r}")
    if not isinstance(routes, list) or not all(isinstance(r, dict) and isinstance(r.get("dst"), str) for r in routes):
        raise IpamFailed(_kind(document), f"answered without usable routes: {routes!r}")
    return Leases(tuple(ips), tuple(routes), result.get("dns"))


def delete(document: Mapping[str, Any], call: IpamCall) -> None:
    """Give addresses back. Repeating it is harmless. Raises IpamFailed."""
    _run("DEL", document, call)


def _kind(document: Mapping[str, Any]) -> str:
    return str(document["ipam"]["type"])


def _run(command: str, document: Mapping[str, Any], call: IpamCall) -> Mapping[str, Any]:
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
        done = subprocess.run(
            [str(program)],
            input=json.dumps(document).encode(),
            env=env,
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise IpamFailed(kind, f"{command} did not end within {TIMEOUT_SECONDS:g} s and was killed") from error
    except OSError as error:
        raise IpamFailed(kind, f"{program} cannot be run: {error.strerror}") from error
    try:
        answer = json.loads(done.stdout) if done.stdout.strip() else {}
    except ValueError:
        answer = {}
    if not isinstance(answer, dict):
        answer = {}
    if done.returncode != 0:
        text = answer.get("msg") or done.stderr.decode(errors="replace").strip()[-300:] or "no message"
        code = answer.get("code")
        raise IpamFailed(kind, f"{command} failed: {text}", code if isinstance(code, int) else None)
    return answer
