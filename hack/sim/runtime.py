"""The container runtime's part of the kubelet stand-in: network namespaces and CNI chains.

Calls plugins as libcni 1.3 and containerd 2.1 do: one configuration list, plugin after plugin with
the result of the one before, in reverse for DEL. Everything here blocks; call it from a thread.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POD_ANNOTATIONS = "io.kubernetes.cri.pod-annotations"


class CniFailed(Exception):
    """A plugin answered with an error, or not in CNI's terms at all."""

    def __init__(self, plugin: str, command: str, code: int, text: str) -> None:
        self.plugin = plugin
        self.code = code
        super().__init__(f"CNI {command} by plugin {plugin} failed (code {code}): {text}")


@dataclass(frozen=True, slots=True)
class Sandbox:
    """One pod's sandbox, as a runtime names it."""

    container_id: str
    netns: Path
    namespace: str
    name: str
    uid: str
    annotations: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class NetworkList:
    """A CNI network configuration list."""

    name: str
    cni_version: str
    plugins: tuple[Mapping[str, Any], ...]


def load_conflist(path: Path) -> NetworkList:
    """Read a .conflist file. Raises CniFailed."""
    try:
        document = json.loads(path.read_text())
        return NetworkList(
            document["name"], document.get("cniVersion", "0.2.0"), tuple(dict(p) for p in document["plugins"])
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CniFailed(str(path), "configuration", 7, f"cannot be used: {error}") from error


class CniRunner:
    """Runs plugins found in some folders."""

    def __init__(self, conflist: Path, path: Sequence[Path], ifname: str = "eth0", timeout: float = 120.0) -> None:
        self.conflist = conflist
        self.path = tuple(path)
        self.ifname = ifname
        self.timeout = timeout

    def add(self, sandbox: Sandbox) -> Mapping[str, Any]:
        """Run ADD through the chain and return the last result. Raises CniFailed at the first error."""
        networks = load_conflist(self.conflist)
        result: Mapping[str, Any] | None = None
        for plugin in networks.plugins:
            result = self._exec("ADD", networks, plugin, sandbox, str(sandbox.netns), result)
        return result or {}

    def delete(self, sandbox: Sandbox, netns: str, result: Mapping[str, Any] | None) -> None:
        """Run DEL through the chain, last plugin first. Raises CniFailed at the first error."""
        networks = load_conflist(self.conflist)
        for plugin in reversed(networks.plugins):
            self._exec("DEL", networks, plugin, sandbox, netns, result)

    def _exec(
        self,
        command: str,
        networks: NetworkList,
        plugin: Mapping[str, Any],
        sandbox: Sandbox,
        netns: str,
        previous: Mapping[str, Any] | None,
    ) -> Mapping[str, Any] | None:
        kind = str(plugin.get("type", ""))
        config = {**plugin, "name": networks.name, "cniVersion": networks.cni_version}
        if plugin.get("capabilities", {}).get(POD_ANNOTATIONS):
            config["runtimeConfig"] = {POD_ANNOTATIONS: dict(sandbox.annotations)}
        config.pop("capabilities", None)
        if previous is not None:
            config["prevResult"] = previous
        try:
            done = subprocess.run(
                [self._find(kind, command)],
                input=json.dumps(config).encode(),
                env=self._environment(command, sandbox, netns),
                capture_output=True,
                timeout=self.timeout,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CniFailed(kind, command, 999, str(error)) from error
        answer = _json(done.stdout)
        if done.returncode != 0:
            text = " ".join(str(answer.get(k, "")) for k in ("msg", "details")).strip()
            raise CniFailed(kind, command, int(answer.get("code", 999)), text or done.stderr.decode(errors="replace"))
        if command != "ADD":
            return None
        if not answer:
            raise CniFailed(kind, command, 999, f"its answer is not a result: {done.stdout[:200]!r}")
        return answer

    def _find(self, kind: str, command: str) -> str:
        for folder in self.path:
            if kind and "/" not in kind and (folder / kind).is_file():
                return str(folder / kind)
        raise CniFailed(kind, command, 999, f"failed to find plugin {kind!r} in path {[str(p) for p in self.path]}")

    def _environment(self, command: str, sandbox: Sandbox, netns: str) -> dict[str, str]:
        arguments = (
            ("IgnoreUnknown", "1"),
            ("K8S_POD_NAMESPACE", sandbox.namespace),
            ("K8S_POD_NAME", sandbox.name),
            ("K8S_POD_INFRA_CONTAINER_ID", sandbox.container_id),
            ("K8S_POD_UID", sandbox.uid),
        )
        return {
            **os.environ,
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": sandbox.container_id,
            "CNI_NETNS": netns,
            "CNI_IFNAME": self.ifname,
            "CNI_ARGS": ";".join(f"{k}={v}" for k, v in arguments),
            "CNI_PATH": os.pathsep.join(str(p) for p in self.path),
        }


def _json(output: bytes) -> Mapping[str, Any]:
    try:
        answer = json.loads(output)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def make_netns(path: Path) -> None:
    """Make a network namespace and pin it to a file, as /run/netns does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(exist_ok=False)
    try:
        _run("unshare", f"--net={path}", "ip", "link", "set", "lo", "up")
    except OSError:
        path.unlink()
        raise


def remove_netns(path: Path) -> None:
    """Unpin a network namespace. What was left inside goes back or goes away, as the kernel decides."""
    if not path.exists():
        return
    if _is_pinned(path):
        _run("umount", "--lazy", str(path))
    path.unlink(missing_ok=True)


def _is_pinned(path: Path) -> bool:
    # The namespace's file is on nsfs, which no folder is.
    return path.stat().st_dev != path.parent.stat().st_dev


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
