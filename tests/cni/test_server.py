"""The agent's end of the CNI socket, spoken to over a real one."""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.errors import (
    AttachmentError,
    ConfigError,
    ConnectivityLimited,
    DeviceBusy,
    DeviceGone,
    HardwareError,
    IpamFailed,
    LedgerError,
    NetlinkFailed,
    RequestInvalid,
    Unavailable,
    UnknownUnit,
)
from cni import protocol
from cni.call import Call
from cni.netconf import SUPPORTED_VERSIONS
from cni.protocol import Answer, Request
from cni.server import BEAT_SECONDS, CniServer
from tests import frames
from tests.cni.door import CONF, ENV, NEWEST, Door, Scripted, read_all


def test_add_is_carried_out_and_its_result_printed(door: Door) -> None:
    door.attachments.does = lambda call: {"cniVersion": "1.0.0", "interfaces": [{"name": "ü"}]}
    assert door.ask("ADD") == (0, {"cniVersion": "1.0.0", "interfaces": [{"name": "ü"}]})
    ((command, call),) = door.attachments.calls
    assert (command, call.container_id, call.ifname, call.netns_path) == ("ADD", "c1", "net1", "/proc/self/ns/net")
    assert (call.pod.namespace, call.pod.name, call.pod.uid) == ("ns", "pod", "uid")
    assert (call.cni_path, call.cni_args, call.conf.name) == ("/opt/cni/bin", ENV["CNI_ARGS"], "rails")
    assert door.attachments.netns_inodes == [os.stat("/proc/self/ns/net").st_ino]
    assert door.observed == ["ADD"]


def test_what_is_to_be_first_comes_after_the_socket_and_before_any_call(short_folder: Path) -> None:
    """Such as the DELs on disk: no relay adds one once somebody listens, and an ADD may be about the same pod."""
    door = Door(short_folder / "run/cni.sock")
    callers: list[socket.socket] = []

    def first() -> None:
        callers.append(door.connect())
        callers[0].sendall(frames.encode_request(Request({**ENV, "CNI_COMMAND": "DEL"}, b"{}")))
        assert select.select(callers, [], [], 0.2)[0] == []

    door.server.start(first)
    with callers[0] as caller:
        assert frames.decode_answer(read_all(caller)) == Answer(0, b"")
    assert [command for command, _ in door.attachments.calls] == ["DEL"]
    door.server.close()


@pytest.mark.parametrize("env", [{}, {"NODEFABRIC_BEATS": "1"}])
def test_a_relay_that_asks_for_beats_gets_them_before_the_answer_and_no_other_relay_does(
    door: Door, env: Mapping[str, str]
) -> None:
    def work(call: Call) -> Mapping[str, Any]:
        time.sleep(2 * BEAT_SECONDS + 0.5)
        return {"cniVersion": "1.0.0"}

    door.attachments.does = work
    with Path("/proc/self/ns/net").open() as netns:
        frame = frames.encode_request(Request({**ENV, "CNI_COMMAND": "ADD", **env}, json.dumps(CONF).encode()))
        received = door.knock(frame, netns.fileno())
    answer = received.lstrip(protocol.BEAT)
    assert frames.decode_answer(answer).exit == 0
    assert (len(received) > len(answer)) is bool(env)


def test_version_needs_no_configuration(door: Door) -> None:
    status, document = door.ask("VERSION", b"", netns=False, CNI_CONTAINERID="", CNI_IFNAME="", CNI_NETNS="")
    assert status == 0
    assert document == {"cniVersion": "1.1.0", "supportedVersions": ["0.3.1", "0.4.0", "1.0.0", "1.1.0"]}


def test_status_tells_what_is_in_the_way(door: Door) -> None:
    door.condition = "kubelet: has no open stream"
    status, document = door.ask("STATUS", {**NEWEST, "ipam": {"type": "host-local"}}, netns=False)
    assert status == 1
    assert (document["code"], document["cniVersion"], document["msg"]) == (50, "1.1.0", door.condition)
    assert door.observed == ["STATUS Unavailable"]


def test_a_network_that_asks_for_nothing_by_itself_is_well_while_the_agent_answers(door: Door) -> None:
    """The node would be not ready else, though its pods start that have nothing."""
    door.condition = "ledger: the disk is full"
    assert door.ask("STATUS", NEWEST, netns=False) == (0, None)


@pytest.mark.parametrize(
    ("command", "version", "told"),
    [
        ("CHECK", "0.3.1", "CHECK came with CNI 0.4.0, "),
        *(
            (command, version, f"{command} came with CNI 1.1.0, ")
            for command in ("GC", "STATUS")
            for version in ("0.3.1", "0.4.0", "1.0.0")
        ),
        *(
            ("ADD", version, "cniVersion must be 0.3.1 or 0.4.0 or 1.0.0 or 1.1.0, is ")
            for version in ("0.2.0", "1.2.0", "2")
        ),
    ],
)
def test_what_the_version_does_not_have_is_refused_with_code_1(
    door: Door, command: str, version: str, told: str
) -> None:
    """In that version, or in our newest where nobody speaks it."""
    status, document = door.ask(command, {**CONF, "cniVersion": version})
    expected = "1.1.0" if command == "ADD" else version
    assert (status, document["code"], document["cniVersion"]) == (1, 1, expected)
    assert document["msg"].startswith(told)
    assert door.attachments.calls == []


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_an_error_is_told_in_the_version_of_the_call(door: Door, version: str) -> None:
    for conf in ({"cniVersion": version, "vlan": "x"}, {"cniVersion": version, "typo": 1}):
        status, document = door.ask("ADD", conf)
        assert (status, document["code"], document["cniVersion"]) == (1, 7, version)
        assert document["details"] == "RequestInvalid"


def test_an_answer_of_another_version_is_told_in_that_of_the_call(door: Door) -> None:
    """So is that of an ADD that is repeated by an updated runtime."""
    ip = {"address": "10.0.0.2/24", "interface": 0}
    entry = {"name": "net1", "mtu": 9000}
    door.attachments.does = lambda call: {"cniVersion": "1.1.0", "interfaces": [entry], "ips": [ip]}
    assert door.ask("ADD", NEWEST)[1]["interfaces"] == [entry]
    _, document = door.ask("ADD", {**CONF, "cniVersion": "0.4.0"})
    assert document == {"cniVersion": "0.4.0", "interfaces": [{"name": "net1"}], "ips": [{**ip, "version": "4"}]}


@pytest.mark.parametrize(
    ("error", "code", "of_status", "reason"),
    [
        (RequestInvalid("x"), 7, 7, "RequestInvalid"),
        (DeviceBusy("x"), 11, 50, "DeviceBusy"),
        (Unavailable("x"), 11, 50, "Unavailable"),
        (UnknownUnit("x"), 11, 50, UnknownUnit.reason),  # its resource may come back into the configuration
        (ConnectivityLimited("x"), None, 51, ConnectivityLimited.reason),
        (DeviceGone("dev", "x"), 100, 50, "DeviceGone"),
        (NetlinkFailed("x", 5, "y"), 100, 50, "NetlinkFailed"),
        (HardwareError("x"), 100, 50, "HardwareError"),
        (IpamFailed("x", "y", 11), 101, 50, "IpamFailed"),
        (LedgerError("x"), 102, 50, "LedgerError"),
        (AttachmentError("x"), 103, 50, "AttachmentError"),
        (ConfigError("x", ["y"]), 999, 50, "ConfigInvalid"),
        (ValueError("x"), 999, 50, "ValueError"),
    ],
)
def test_each_error_has_its_code(door: Door, error: Exception, code: int | None, of_status: int, reason: str) -> None:
    def fail(call: Call) -> Mapping[str, Any]:
        raise error

    door.attachments.does = fail
    codes = {**(dict.fromkeys(("ADD", "DEL", "CHECK", "GC"), code) if code is not None else {}), "STATUS": of_status}
    for command, expected in codes.items():
        status, document = door.ask(command, NEWEST)
        assert status == 1
        assert str(error) in document.pop("msg")
        assert document == {"code": expected, "details": reason, "cniVersion": "1.1.0"}
    door.attachments.does = lambda call: {}
    assert door.ask("ADD") == (0, {"cniVersion": "1.0.0"})


@pytest.mark.parametrize(
    ("command", "env"),
    [
        ("", {}),
        ("add", {}),
        ("UPDATE", {}),
        *[
            (command, {"CNI_CONTAINERID": value})
            for command in ("ADD", "DEL")
            for value in ("", "-x", "a/b", "x" * 256)
        ],
        *[
            (command, {"CNI_IFNAME": value})
            for command in ("ADD", "CHECK")
            for value in ("", ".", "..", "a b", "a/b", "a:b", "x" * 16, "ü", "a\n")
        ],
        ("ADD", {"CNI_IFNAME": "net%d"}),
        ("ADD", {"CNI_NETNS": ""}),
        ("CHECK", {"CNI_NETNS": ""}),
        *((command, {"netns": False}) for command in ("ADD", "CHECK")),
        ("ADD", {"CNI_ARGS": "nothing"}),
        ("CHECK", {"CNI_ARGS": "A=1;B"}),
    ],
)
def test_a_wrong_environment_has_code_4(door: Door, command: str, env: dict[str, Any]) -> None:
    status, document = door.ask(command, **env)
    assert (status, document["code"]) == (1, 4)
    assert "CNI_" in document["msg"]
    assert door.attachments.calls == []


@pytest.mark.parametrize(
    ("conf", "code"),
    [
        (b"", 6),
        (b"{", 6),
        (b"\xff", 6),
        (b'{"name": "a", "name": "b"}', 6),
        (b"[]", 7),
        (b'{"vlan": "x"}', 7),
        (b'{"typo": 1}', 7),
        (b'{"cniVersion": "9"}', 1),
    ],
)
def test_a_wrong_configuration_has_its_code_and_does_not_stop_a_del(door: Door, conf: bytes, code: int) -> None:
    for command in ("ADD", "CHECK", "GC"):
        status, document = door.ask(command, conf)
        assert (status, document["code"]) == (1, code)
    assert door.attachments.calls == []
    assert door.ask("DEL", conf, netns=False, CNI_NETNS="") == (0, None)
    ((command, call),) = door.attachments.calls
    assert (command, call.container_id, call.netns) == ("DEL", "c1", None)


def test_a_configuration_that_is_too_long_to_be_kept_is_refused_and_does_not_stop_a_del(door: Door) -> None:
    long = {**NEWEST, "args": {"cni": {"x": "y" * (64 << 10)}}}
    many = {**NEWEST, "args": {"cni": {"x": [{}] * 4096}}}
    for command in ("ADD", "CHECK", "STATUS"):
        for conf, why in ((long, "bytes with prevResult, and 65536 are allowed"), (many, "more than 4096 values")):
            status, document = door.ask(command, conf)
            assert (status, document["code"], document["cniVersion"]) == (1, 7, "1.1.0")
            assert why in document["msg"]
    assert door.attachments.calls == []
    assert door.ask("DEL", long) == (0, None)
    kept = [{"containerID": f"{number:064x}", "ifname": "net1"} for number in range(2000)]
    assert door.ask("GC", {**NEWEST, "cni.dev/valid-attachments": kept}) == (0, None)
    assert [command for command, _ in door.attachments.calls] == ["DEL", "GC"]


def test_arguments_that_cannot_be_read_do_not_stop_a_del(door: Door) -> None:
    assert door.ask("DEL", CNI_ARGS="nothing;MAC=x;K8S_POD_NAME=p") == (0, None)
    assert [call.pod.name for _, call in door.attachments.calls] == ["p"]


@pytest.mark.parametrize("name", ["CNI_NETNS", "CNI_ARGS", "CNI_PATH"])
def test_bytes_that_are_no_text_reach_no_books(door: Door, name: str) -> None:
    """The database takes none, and what it refuses it would be told once more with each later row."""
    wrong: Any = {name: "K8S_POD_NAME=\udcff"}
    right: Any = {name: "K8S_POD_NAME=\u00e4"}
    status, document = door.ask("ADD", **wrong)
    assert (status, document["code"]) == (1, 4)
    assert f"{name} must be UTF-8, is 'K8S_POD_NAME=\\udcff'" in document["msg"]
    assert door.ask("ADD", **right)[0] == 0
    assert door.ask("DEL", **wrong) == (0, None)
    (_, call) = door.attachments.calls[-1]
    assert "K8S_POD_NAME=?" in (call.netns_path, call.cni_args, call.cni_path)


TEXTS = st.one_of(
    st.text(max_size=12), st.sampled_from(["ADD", "DEL", "GC", "c1", "net1", "A=1;B=2", "\udcff", "MAC=x"])
)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.sampled_from([*ENV, "CNI_COMMAND", "X"]), TEXTS, max_size=7),
    st.one_of(st.binary(max_size=20), st.sampled_from([b"{}", b'{"name": "x"}', b'{"prevResult": {}}'])),
)
def test_whatever_is_asked_the_answer_is_cni(env: dict[str, str], stdin: bytes) -> None:
    attachments = Scripted()
    server = CniServer(Path("/unused"), attachments, condition=lambda: None, observe=lambda command: nullcontext())
    answer = server.answer(Request(env, stdin))
    if answer.exit == 0:
        assert answer.stdout == b"" or isinstance(json.loads(answer.stdout), dict)
    else:
        document = json.loads(answer.stdout)
        assert document["code"] in (1, 4, 6, 7)
        assert document["msg"]
