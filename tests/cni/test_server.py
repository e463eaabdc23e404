"""The agent's end of the CNI socket, spoken to over a real one."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.errors import (
    AttachmentError,
    ConfigError,
    DeviceBusy,
    DeviceGone,
    HardwareError,
    IpamFailed,
    LedgerError,
    NetlinkFailed,
    RequestInvalid,
    Unavailable,
)
from cni import protocol
from cni.attachment import Attachments, Call
from cni.netconf import SUPPORTED_VERSIONS
from cni.protocol import Answer, Request
from cni.readiness import ConnectivityLimited
from cni.server import WAITING_THREADS, CniServer

ENV = {
    "CNI_CONTAINERID": "c1",
    "CNI_IFNAME": "net1",
    "CNI_NETNS": "/proc/self/ns/net",
    "CNI_PATH": "/opt/cni/bin",
    "CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=pod;K8S_POD_UID=uid",
}
CONF = {"cniVersion": "1.0.0", "name": "rails", "type": "nodefabric"}
NEWEST = {**CONF, "cniVersion": "1.1.0"}


class Scripted(Attachments):
    """Notes the calls and answers as told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Call]] = []
        self.netns_inodes: list[int | None] = []
        self.does: Callable[[Call], Mapping[str, Any]] = lambda call: {"cniVersion": "1.0.0"}

    def _note(self, command: str, call: Call) -> Mapping[str, Any]:
        self.calls.append((command, call))
        self.netns_inodes.append(None if call.netns is None else os.fstat(call.netns).st_ino)
        return self.does(call)

    def add(self, call: Call) -> Mapping[str, Any]:
        return self._note("ADD", call)

    def delete(self, call: Call) -> None:
        self._note("DEL", call)

    def check(self, call: Call) -> None:
        self._note("CHECK", call)

    def collect(self, call: Call) -> None:
        self._note("GC", call)

    def status(self, call: Call) -> None:
        self._note("STATUS", call)


class Door:
    """A server and ways to knock at it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.attachments = Scripted()
        self.obstacle: str | None = None
        self.observed: list[str] = []
        self.server = CniServer(
            path,
            self.attachments,
            obstacle=lambda: self.obstacle,
            observe=self._observe,
            receive_seconds=0.4,
        )

    @contextmanager
    def _observe(self, command: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.observed.append(f"{command} {getattr(error, 'reason', 'unexpected')}")
            raise
        self.observed.append(command)

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(10)
            connection.connect(str(self.path))
        except OSError:
            connection.close()
            raise
        return connection

    def knock(self, frame: bytes, *descriptors: int) -> bytes:
        """Send bytes and return all that comes back."""
        with self.connect() as connection:
            socket.send_fds(connection, [frame], list(descriptors))
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            return read_all(connection)

    def ask(self, command: str, conf: object = CONF, *, netns: bool = True, **env: str) -> tuple[int, Any]:
        """Make a CNI call and return its exit status and the JSON it prints."""
        stdin = conf if isinstance(conf, bytes) else json.dumps(conf).encode()
        frame = protocol.encode_request(Request({**ENV, "CNI_COMMAND": command, **env}, stdin))
        with ExitStack() as stack:
            files = [stack.enter_context(open("/proc/self/ns/net")).fileno()] if netns else []
            answer = protocol.decode_answer(self.knock(frame, *files))
        return answer.exit, json.loads(answer.stdout) if answer.stdout else None


def read_all(connection: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionResetError):
        while more := connection.recv(65536):
            received += more
    return received


@pytest.fixture
def door(short_folder: Path) -> Iterator[Door]:
    made = Door(short_folder / "run/cni.sock")
    made.server.start()
    yield made
    made.server.close()


def test_add_is_carried_out_and_its_result_printed(door: Door) -> None:
    door.attachments.does = lambda call: {"cniVersion": "1.0.0", "interfaces": [{"name": "ü"}]}
    assert door.ask("ADD") == (0, {"cniVersion": "1.0.0", "interfaces": [{"name": "ü"}]})
    ((command, call),) = door.attachments.calls
    assert (command, call.container_id, call.ifname, call.netns_path) == ("ADD", "c1", "net1", "/proc/self/ns/net")
    assert (call.pod.namespace, call.pod.name, call.pod.uid) == ("ns", "pod", "uid")
    assert (call.cni_path, call.cni_args, call.conf.name) == ("/opt/cni/bin", ENV["CNI_ARGS"], "rails")
    assert door.attachments.netns_inodes == [os.stat("/proc/self/ns/net").st_ino]
    assert door.observed == ["ADD"]


@pytest.mark.parametrize("command", ["DEL", "CHECK", "GC", "STATUS"])
def test_other_commands_print_nothing(door: Door, command: str) -> None:
    assert door.ask(command, NEWEST) == (0, None)
    assert [c for c, _ in door.attachments.calls] == [command]


def test_version_needs_no_configuration(door: Door) -> None:
    status, document = door.ask("VERSION", b"", netns=False, CNI_CONTAINERID="", CNI_IFNAME="", CNI_NETNS="")
    assert status == 0
    assert document == {"cniVersion": "1.1.0", "supportedVersions": ["0.3.1", "0.4.0", "1.0.0", "1.1.0"]}


def test_status_tells_what_is_in_the_way(door: Door) -> None:
    door.obstacle = "kubelet: has no open stream"
    status, document = door.ask("STATUS", NEWEST, netns=False)
    assert status == 1
    assert (document["code"], document["cniVersion"], document["msg"]) == (50, "1.1.0", door.obstacle)
    assert door.observed == ["STATUS Unavailable"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (IpamFailed("x", "y", 5), 50),
        (HardwareError("x"), 50),
        (LedgerError("x"), 50),
        (ValueError("x"), 50),
        (ConnectivityLimited("x"), 51),
        (RequestInvalid("x"), 7),
    ],
)
def test_status_says_what_is_not_available(door: Door, error: Exception, code: int) -> None:
    def fail(call: Call) -> Mapping[str, Any]:
        raise error

    door.attachments.does = fail
    status, document = door.ask("STATUS", NEWEST, netns=False)
    assert (status, document["code"]) == (1, code)
    assert str(error) in document["msg"]


@pytest.mark.parametrize(
    ("command", "version", "since"),
    [
        ("CHECK", "0.3.1", "0.4.0"),
        *[(command, v, "1.1.0") for command in ("GC", "STATUS") for v in ("0.3.1", "0.4.0", "1.0.0")],
    ],
)
def test_a_command_that_the_version_does_not_have_is_refused_with_code_1(
    door: Door, command: str, version: str, since: str
) -> None:
    status, document = door.ask(command, {**CONF, "cniVersion": version})
    assert (status, document["code"], document["cniVersion"]) == (1, 1, version)
    assert document["msg"].startswith(f"{command} came with CNI {since}, ")
    assert door.attachments.calls == []


@pytest.mark.parametrize("version", ["0.2.0", "1.2.0", "2"])
def test_a_version_that_nobody_speaks_has_code_1_and_an_answer_in_ours(door: Door, version: str) -> None:
    status, document = door.ask("ADD", {**CONF, "cniVersion": version})
    assert (status, document["code"], document["cniVersion"]) == (1, 1, "1.1.0")
    assert document["msg"].startswith("cniVersion must be 0.3.1 or 0.4.0 or 1.0.0 or 1.1.0, is ")


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


def test_keys_without_effect_are_told_of_once(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    old = {**CONF, "type": "sriov", "deviceID": "0000:3b:00.2", "SelectorObj": 1}
    for _ in range(2):
        assert door.ask("ADD", old)[0] == 0
    told = [r.getMessage() for r in caplog.records if "SelectorObj" in r.getMessage()]
    assert told == ["network rails of type sriov has keys that mean nothing: SelectorObj"]


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (RequestInvalid("x"), 7, "RequestInvalid"),
        (DeviceBusy("x"), 11, "DeviceBusy"),
        (Unavailable("x"), 11, "Unavailable"),
        (DeviceGone("dev", "x"), 100, "DeviceGone"),
        (NetlinkFailed("x", 5, "y"), 100, "NetlinkFailed"),
        (HardwareError("x"), 100, "HardwareError"),
        (IpamFailed("x", "y", 11), 101, "IpamFailed"),
        (LedgerError("x"), 102, "LedgerError"),
        (AttachmentError("x"), 103, "AttachmentError"),
        (ConfigError("x", ["y"]), 999, "ConfigInvalid"),
        (ValueError("x"), 999, "ValueError"),
    ],
)
def test_each_error_has_its_code(door: Door, error: Exception, code: int, reason: str) -> None:
    def fail(call: Call) -> Mapping[str, Any]:
        raise error

    door.attachments.does = fail
    for command in ("ADD", "DEL", "CHECK", "GC"):
        status, document = door.ask(command, NEWEST)
        assert status == 1
        assert (document["code"], document["details"], document["cniVersion"]) == (code, reason, "1.1.0")
        assert str(error) in document["msg"]
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
        ("ADD", {"CNI_NETNS": ""}),
        ("CHECK", {"CNI_NETNS": ""}),
        ("ADD", {"CNI_ARGS": "nothing"}),
        ("CHECK", {"CNI_ARGS": "A=1;B"}),
    ],
)
def test_a_wrong_environment_has_code_4(door: Door, command: str, env: dict[str, Any]) -> None:
    status, document = door.ask(command, **env)
    assert (status, document["code"]) == (1, 4)
    assert "CNI_" in document["msg"]
    assert door.attachments.calls == []


@pytest.mark.parametrize("command", ["ADD", "CHECK"])
def test_a_call_without_its_descriptor_has_code_4(door: Door, command: str) -> None:
    status, document = door.ask(command, netns=False)
    assert (status, document["code"]) == (1, 4)


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


def test_arguments_that_cannot_be_read_do_not_stop_a_del(door: Door) -> None:
    assert door.ask("DEL", CNI_ARGS="nothing;MAC=x;K8S_POD_NAME=p") == (0, None)
    assert [call.pod.name for _, call in door.attachments.calls] == ["p"]


def test_bytes_that_are_not_text_harm_nobody(door: Door) -> None:
    body = b"\0".join([b"CNI_COMMAND=DEL", b"CNI_CONTAINERID=c\xff", b"CNI_IFNAME=\xfe", b"", b"{}"])
    answer = protocol.decode_answer(door.knock(b"NFC1" + struct.pack(">I", len(body)) + body))
    assert json.loads(answer.stdout)["code"] == 4
    assert door.ask("ADD")[0] == 0


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"x",
        b"GET / HTTP/1.0\r\n\r\n",
        b"NFC1",
        b"NFC1\0\0\0\x05ab",
        b"NFC1\0\0\0\0",
        b"NFC1" + struct.pack(">I", protocol.MAX_REQUEST + 1) + b"x" * 1000,
        b"NFC1\xff\xff\xff\xff",
    ],
)
def test_garbage_is_hung_up_on_and_the_next_caller_served(door: Door, frame: bytes) -> None:
    assert door.knock(frame) == b""
    assert door.ask("ADD")[0] == 0


def test_a_request_with_two_descriptors_is_hung_up_on(door: Door) -> None:
    frame = protocol.encode_request(Request({**ENV, "CNI_COMMAND": "ADD"}, json.dumps(CONF).encode()))
    with open("/proc/self/ns/net") as file:
        assert door.knock(frame, file.fileno(), file.fileno()) == b""
    assert door.attachments.calls == []


def test_descriptors_are_closed_when_a_request_is_done(door: Door) -> None:
    door.ask("ADD")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        door.ask("ADD")
        door.ask("UPDATE")
        door.knock(b"garbage!")
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_caller_that_says_nothing_is_hung_up_on(door: Door) -> None:
    with door.connect() as silent:
        assert read_all(silent) == b""


def test_a_caller_that_trickles_is_hung_up_on(door: Door) -> None:
    with door.connect() as slow:
        stop = threading.Event()

        def trickle() -> None:
            with suppress(OSError):
                while not stop.wait(0.05):
                    slow.send(b"N")

        slow.sendall(b"NFC1\0\0\xff\0")
        thread = threading.Thread(target=trickle)
        thread.start()
        assert read_all(slow) == b""
        stop.set()
        thread.join()


def test_a_caller_that_goes_away_harms_nobody(door: Door) -> None:
    frame = protocol.encode_request(Request({**ENV, "CNI_COMMAND": "GC"}, json.dumps(CONF).encode()))
    for _ in range(3):
        with door.connect() as connection:
            connection.sendall(frame)
    assert door.ask("ADD")[0] == 0


def test_a_crowd_of_silent_callers_delays_others_no_longer_than_they_may_stay(door: Door) -> None:
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(door.connect())
        assert door.ask("ADD")[0] == 0


def test_calls_run_side_by_side(door: Door) -> None:
    meeting = threading.Barrier(3, timeout=10)

    def meet(call: Call) -> Mapping[str, Any]:
        meeting.wait()
        return {}

    door.attachments.does = meet
    answers: list[tuple[int, Any]] = []
    threads = [threading.Thread(target=lambda: answers.append(door.ask("ADD"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [(0, {"cniVersion": "1.0.0"})] * 3


def test_more_calls_than_there_are_threads_waiting_run_side_by_side_again_and_again(door: Door) -> None:
    meeting = threading.Barrier(3 * WAITING_THREADS, timeout=10)

    def meet(call: Call) -> Mapping[str, Any]:
        meeting.wait()
        return {}

    door.attachments.does = meet
    before = threading.active_count()
    for _ in range(3):
        threads = [threading.Thread(target=door.ask, args=("ADD",)) for _ in range(3 * WAITING_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    deadline = time.monotonic() + 10
    while threading.active_count() > before + 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before + 1


def test_running_out_of_descriptors_passes(door: Door) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.settimeout(10)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
        try:
            waiting.connect(str(door.path))
            threading.Event().wait(0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        waiting.sendall(protocol.encode_request(Request({"CNI_COMMAND": "VERSION"}, b"")))
        assert protocol.decode_answer(read_all(waiting)).exit == 0
    assert door.ask("ADD")[0] == 0


def test_another_user_is_not_heard(door: Door) -> None:
    numbers = {"x86_64": 117, "aarch64": 147}
    number = numbers.get(platform.machine())
    if os.geteuid() != 0 or number is None:
        pytest.skip("becoming another user needs root")
    door.path.chmod(0o666)
    for folder in (door.path.parent, door.path.parent.parent):
        folder.chmod(0o755)
    heard: list[bytes | str] = []

    def as_nobody() -> None:
        # The bare system call changes this thread alone; libc's function would change them all.
        if ctypes.CDLL(None, use_errno=True).syscall(number, 65534, 65534, 65534) != 0:
            heard.append("this user namespace has no other user")
            return
        with door.connect() as connection:
            with suppress(OSError):
                connection.sendall(protocol.encode_request(Request({"CNI_COMMAND": "VERSION"}, b"")))
            heard.append(read_all(connection))

    thread = threading.Thread(target=as_nobody)
    thread.start()
    thread.join()
    if isinstance(heard[0], str):
        pytest.skip(heard[0])
    assert heard == [b""]
    assert door.ask("VERSION")[0] == 0


def test_nobody_else_may_open_the_socket(door: Door) -> None:
    assert door.path.stat().st_mode & 0o777 == 0o600
    assert door.path.parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in door.path.parent.iterdir()] == ["cni.sock"]


def test_a_second_agent_is_refused_and_the_first_stays(door: Door) -> None:
    second = Door(door.path)
    with pytest.raises(ConfigError, match="another agent serves this socket: stop it, or set runDir"):
        second.server.start()
    second.server.close()
    assert door.ask("ADD")[0] == 0
    assert [p.name for p in door.path.parent.iterdir()] == ["cni.sock"]


@pytest.mark.parametrize("kind", ["socket", "file"])
def test_what_a_dead_agent_left_is_taken_over(short_folder: Path, kind: str) -> None:
    path = short_folder / "cni.sock"
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    else:
        path.touch()
    made = Door(path)
    made.server.start()
    assert made.ask("ADD")[0] == 0
    made.server.close()


@pytest.mark.parametrize("name", ["x" * 120 + "/cni.sock", "file/cni.sock", "folder"])
def test_a_path_that_cannot_be_had_is_a_config_error(short_folder: Path, name: str) -> None:
    (short_folder / "file").touch()
    (short_folder / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"cni\.sock|folder"):
        Door(short_folder / name).server.start()


def test_after_a_close_nobody_is_let_in_but_a_call_under_way_is_finished(door: Door) -> None:
    begun, go = threading.Event(), threading.Event()

    def wait(call: Call) -> Mapping[str, Any]:
        begun.set()
        go.wait(10)
        return {"cniVersion": "1.0.0"}

    door.attachments.does = wait
    answers: list[tuple[int, Any]] = []
    caller = threading.Thread(target=lambda: answers.append(door.ask("ADD")))
    caller.start()
    assert begun.wait(10)
    door.server.close()
    door.server.close()
    with pytest.raises(FileNotFoundError):
        door.connect()
    go.set()
    caller.join()
    assert answers == [(0, {"cniVersion": "1.0.0"})]


def test_an_answer_is_a_frame_of_our_protocol(door: Door) -> None:
    received = door.knock(protocol.encode_request(Request({"CNI_COMMAND": "nonsense"}, b"")))
    answer = protocol.decode_answer(received)
    assert answer == Answer(1, answer.stdout)
    assert set(json.loads(answer.stdout)) == {"cniVersion", "code", "msg", "details"}


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
    server = CniServer(Path("/unused"), attachments, obstacle=lambda: None, observe=lambda command: nullcontext())
    answer = server.answer(Request(env, stdin))
    if answer.exit == 0:
        assert answer.stdout == b"" or isinstance(json.loads(answer.stdout), dict)
    else:
        document = json.loads(answer.stdout)
        assert document["code"] in (1, 4, 6, 7)
        assert document["msg"]
