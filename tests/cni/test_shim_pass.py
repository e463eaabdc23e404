"""Pods that have nothing of ours start and end without the agent; nobody else does."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cni import pods_file, protocol
from tests.cni.relay import OWN_NETNS, Agent, Relay, serve

BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
PREVIOUS = {
    "cniVersion": "1.0.0",
    "interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": "/run/netns/ordinary"}],
    "ips": [{"address": "10.244.0.9/24", "gateway": "10.244.0.1", "interface": 0}],
    "routes": [{"dst": "0.0.0.0/0"}],
    "dns": {},
}
CONF: Mapping[str, Any] = {"cniVersion": "1.0.0", "name": "cluster", "type": "nodefabric"}
ARGS = "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web;K8S_POD_INFRA_CONTAINER_ID=c1;K8S_POD_UID=u1"
POD = {"CNI_CONTAINERID": "c1", "CNI_IFNAME": "eth0", "CNI_NETNS": OWN_NETNS, "CNI_ARGS": ARGS}


def chained(previous: Mapping[str, Any] | None = PREVIOUS, **more: Any) -> bytes:
    told = {} if previous is None else {"prevResult": previous}
    return json.dumps({**CONF, **more, **told}).encode()


def note(relay: Relay, *names: str | None, boot_id: str = BOOT_ID, content: bytes | None = None) -> Path:
    """Put the agent's file there."""
    path = relay.socket.with_name(f"{relay.socket.name}{pods_file.SUFFIX}")
    path.touch(0o600)
    path.write_bytes(pods_file.content_of(boot_id, names) if content is None else content)
    return path


def is_asked(relay: Relay, command: str, stdin: bytes, **env: str) -> bool:
    """Tell whether the relay turns to the agent, which is there and answers."""
    agent = Agent()
    with serve(relay.socket, agent, agent.answering(b"")):
        assert relay.run(command, stdin, **{**POD, **env}).status == 0
    return bool(agent.requests)


def test_a_pod_that_has_nothing_gets_the_result_it_was_given_byte_for_byte(relay: Relay) -> None:
    note(relay, "default/trainer", "c2", "u2")
    result = b'{ "dns" : {},\t"cniVersion":"1.0.0", "ips":[{"address":"10.244.0.9/24"}],"x":"\\u00e4 \xc3\xa4"}'
    text = b'{"prevResult":\n' + result + b' , "cniVersion":"1.0.0","name":"cluster","type":"nodefabric"}'
    outcome = relay.run("ADD", text, wait="0", **POD)
    assert (outcome.status, outcome.stdout) == (0, result)


@pytest.mark.parametrize("command", ["DEL", "CHECK"])
@pytest.mark.parametrize("previous", [PREVIOUS, None])
def test_its_other_calls_succeed_without_a_word(relay: Relay, command: str, previous: Mapping[str, Any] | None) -> None:
    note(relay)
    outcome = relay.run(command, chained(previous), wait="0", **POD)
    assert (outcome.status, outcome.stdout) == (0, b"")
    assert relay.spooled() == []


@pytest.mark.parametrize("command", ["ADD", "DEL", "CHECK", "STATUS"])
def test_an_agent_that_is_there_is_not_asked_either_but_for_gc(relay: Relay, command: str) -> None:
    """It may hang, or be about to."""
    note(relay, "default/trainer")
    assert is_asked(relay, "GC", chained(None))
    assert not is_asked(relay, command, chained())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(relay.socket))
        listener.listen(8)
        assert relay.run(command, chained(), **POD).status == 0


@pytest.mark.parametrize("command", ["ADD", "DEL", "CHECK"])
@pytest.mark.parametrize("name", ["default/web", "c1", "u1", "default/"])
def test_a_pod_that_may_have_something_is_the_agents(relay: Relay, command: str, name: str) -> None:
    alike = ("default/web-0", "kube-default/web", "efault/web", "default/we", "c11", "u", "xu1", "efault/", "web/")
    note(relay, *alike)
    assert not is_asked(relay, command, chained())
    note(relay, *alike, name, "u2")
    assert is_asked(relay, command, chained())


@pytest.mark.parametrize("command", ["ADD", "DEL", "CHECK", "STATUS"])
def test_while_somebody_unknown_may_have_something_the_agent_is_asked(relay: Relay, command: str) -> None:
    note(relay, None, "default/trainer")
    assert is_asked(relay, command, chained())


def test_without_the_file_all_is_as_if_nobody_were_told_apart(relay: Relay) -> None:
    assert relay.run("ADD", chained(), wait="0", **POD).error["code"] == protocol.TRY_AGAIN_LATER
    assert relay.run("STATUS", chained(None)).error["code"] == protocol.PLUGIN_NOT_AVAILABLE
    assert relay.run("DEL", chained(), **POD).status == 0
    assert len(relay.spooled()) == 1


GOOD = pods_file.content_of(BOOT_ID, ["default/trainer"])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        GOOD[:-1],
        GOOD[:-4],
        GOOD[: GOOD.index(b"default")],
        GOOD + b"more\n",
        GOOD.replace(b"unknown 0", b"unknown 1"),
        GOOD.replace(b"unknown 0", b"unknown"),
        GOOD.replace(b"pods 2", b"pods 1"),
        GOOD.replace(BOOT_ID.encode(), b"00000000-0000-0000-0000-000000000000"),
        GOOD.replace(b"default", b"x" * (256 << 10)),
        b"\0" * len(GOOD),
    ],
)
def test_a_file_that_is_not_whole_or_not_of_this_boot_tells_nothing(relay: Relay, content: bytes) -> None:
    note(relay, content=content)
    assert is_asked(relay, "ADD", chained())


def test_a_file_as_large_as_it_may_be_is_read_and_one_that_would_be_larger_names_nobody(relay: Relay) -> None:
    def content(count: int) -> bytes:
        return pods_file.content_of(BOOT_ID, [f"namespace-{n:05}/{'x' * 63}" for n in range(count)])

    count = (pods_file.MAX_BYTES - len(content(0))) // 80
    assert pods_file.MAX_BYTES - 80 < len(content(count)) <= pods_file.MAX_BYTES
    note(relay, content=content(count))
    assert not is_asked(relay, "ADD", chained())
    assert is_asked(
        relay, "ADD", chained(), CNI_ARGS=ARGS.replace("default", "namespace-00007").replace("web", "x" * 63)
    )
    note(relay, content=content(count + 1))
    assert is_asked(relay, "ADD", chained())


@pytest.mark.parametrize("kind", ["others may read", "others may write", "another's", "link", "folder", "pipe"])
def test_nothing_but_a_file_of_our_own_is_believed(relay: Relay, kind: str) -> None:
    path = note(relay)
    if kind == "another's":
        try:
            os.chown(path, 12345, -1)
        except OSError:
            pytest.skip("nobody else is known in this user namespace")
    elif kind.startswith("others"):
        path.chmod(0o640 if kind.endswith("read") else 0o602)
    elif kind == "link":
        path.rename(relay.folder / "target")
        path.symlink_to(relay.folder / "target")
    else:
        path.unlink()
        path.mkdir() if kind == "folder" else os.mkfifo(path)
    assert is_asked(relay, "ADD", chained())


ARGUMENTS = [
    "",
    "IgnoreUnknown=1",
    "K8S_POD_NAMESPACE=default;K8S_POD_UID=u1",
    "K8S_POD_NAME=web;K8S_POD_UID=u1",
    "K8S_POD_NAMESPACE=;K8S_POD_NAME=web;K8S_POD_UID=u1",
    "K8S_POD_NAMESPACE=default;K8S_POD_NAME=;K8S_POD_UID=u1",
    "K8S_POD_NAMESPACE=default;K8S_POD_NAME=a/b;K8S_POD_UID=u1",
    "K8S_POD_NAMESPACE=default;K8S_POD_NAME=web;K8S_POD_NAME=web;K8S_POD_UID=u1",
    "K8S_POD_NAMESPACE=default;K8S_POD_NAME=web;K8S_POD_UID=u 1",
    "K8S_POD_NAMESPACE=default;K8S_POD_NAME=web;MAC=02:00:00:00:00:01;K8S_POD_UID=u1",
    "K8S_POD_NAMESPACE=default;K8S_POD_NAME=web;X=ä;K8S_POD_UID=u1",
    "K8S_POD_NAMESPACE=default;K8S_POD_NAME=web",  # of what kubelet noted, the file has the UID alone
    "K8S_POD_NAMESPACE=default;K8S_POD_NAME=web;K8S_POD_UID=",
]
NETWORKS: list[Mapping[str, Any]] = [
    {"type": "sriov"},
    {"type": None},
    {"deviceID": "0000:3b:02.1"},
    {"DEVICEID": "0000:3b:02.1"},
    {"pciBusID": ""},
    {"pf": ["ens1f0"]},
    {"master": "ens1f0"},
    {"mode": "macvlan"},
    {"ipam": {}},
    {"mac": "02:00:00:00:00:01"},
    {"args": {"cni": {}}},
    {"vlam": 7},
    {"cni.dev/valid-attachments": []},
    {"runtimeConfig": {"deviceID": ""}},
    {"runtimeConfig": {"portMappings": [], "PCIBusID": "0000:3b:02.1"}},
    {"runtimeConfig": {"mac": "02:00:00:00:00:01"}},
    {"runtimeConfig": {"infinibandGUID": ""}},
    {"runtimeConfig": {"CNIDeviceInfoFile": "/run/x"}},
    {"runtimeConfig": []},
    {"cniVersion": "0.3.0"},
    {"cniVersion": "1.1.0"},
    {"name": ""},
    {"name": 7},
    {"name": "a b"},
    {"dns": {"x": 1.5}},
    {"dns": "x" * (64 << 10)},
    {"prevResult": None},
    {"prevResult": {}},
    {"prevResult": []},
    {"prevResult": "x"},
    {"prevResult": {"ips": []}},
    *({"prevResult": {**PREVIOUS, "cniVersion": version}} for version in ("0.4.0", None)),
]
NOT_PASSED: list[tuple[dict[str, str], Mapping[str, Any]]] = [
    *(({"CNI_ARGS": args}, {}) for args in ARGUMENTS),
    *(({"CNI_CONTAINERID": container_id}, {}) for container_id in ("", "a b", "a/b", "x" * 256)),
    *(({}, more) for more in NETWORKS),
]
"""What the runtime says of pod and sandbox, and the network of itself: not in order, or it may ask for something."""


@pytest.mark.parametrize(("env", "more"), NOT_PASSED)
def test_what_is_not_clearly_nothing_of_ours_is_the_agents(
    relay: Relay, env: dict[str, str], more: Mapping[str, Any]
) -> None:
    note(relay, "u1" if env.get("CNI_ARGS", "").endswith(("web", "UID=")) else "u2")
    assert is_asked(relay, "ADD", json.dumps({**CONF, "prevResult": PREVIOUS, **more}).encode(), **env)


def test_what_a_runtime_says_beside_that_stops_nobody(relay: Relay) -> None:
    note(relay)
    more: dict[str, Any] = {
        "runtimeConfig": {"portMappings": [{"hostPort": 80}], "io.kubernetes.cri.pod-annotations": {"mac": "x"}},
        "capabilities": {"mac": False},
        "cniVersions": ["1.0.0"],
        "disableCheck": True,
        "dns": {"nameservers": ["10.0.0.1"]},
        "logLevel": "debug",
    }
    assert not is_asked(relay, "ADD", chained(**more))


def test_status_succeeds_while_ordinary_pods_start(relay: Relay) -> None:
    """kubelet would call the whole node not ready, and most of its pods have nothing of ours."""
    note(relay, "default/trainer")
    assert relay.run("STATUS", chained(None)).status == 0
    note(relay, "default/trainer", None)
    assert relay.run("STATUS", chained(None)).error["code"] == protocol.PLUGIN_NOT_AVAILABLE
    assert relay.run("STATUS", chained(None, master="ens1f0")).error["code"] == protocol.PLUGIN_NOT_AVAILABLE


def test_a_namespace_that_cannot_be_opened_fails_a_pod_that_has_nothing_too(relay: Relay) -> None:
    note(relay)
    error = relay.run("ADD", chained(), **{**POD, "CNI_NETNS": "/run/netns/gone"}).error
    assert error["code"] == protocol.INVALID_ENVIRONMENT
    assert relay.run("DEL", chained(), **{**POD, "CNI_NETNS": "/run/netns/gone"}).status == 0
