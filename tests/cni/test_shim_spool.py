"""A DEL that no agent takes: on disk, and a success; or an error that makes the runtime try again."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time

import pytest

from cni import protocol
from cni.server import MAX_CONF
from tests.cni.relay import OWN_NETNS, Agent, Behaviour, Outcome, Relay, hang_up, serve
from tests.cni.small_disk import disk

POD = {"CNI_CONTAINERID": "c1", "CNI_IFNAME": "net1", "CNI_NETNS": OWN_NETNS}


def read_spool(relay: Relay) -> list[protocol.Request]:
    return [protocol.decode_request(path.read_bytes()) for path in relay.spooled()]


def test_del_without_an_agent_is_kept_on_disk_for_root_alone_and_succeeds(relay: Relay) -> None:
    outcome = relay.run("DEL", b'{"name":"n"}', **POD)
    assert (outcome.status, outcome.stdout) == (0, b"")
    (request,), (path,) = read_spool(relay), relay.spooled()
    assert [each.stat().st_mode & 0o7777 for each in (path, relay.spool)] == [0o600, 0o700]
    assert request == protocol.Request({"CNI_COMMAND": "DEL", "NODEFABRIC_BEATS": "1", **POD}, b'{"name":"n"}')


def test_a_del_that_is_killed_while_it_writes_leaves_nothing_that_counts(relay: Relay) -> None:
    """The disk is slow, and the runtime's patience over: whatever is there by then, only whole files are DELs."""
    for delay in (0.0, 0.001, 0.002, 0.004, 0.008):
        process = relay.start("DEL", wait="0", **{**POD, "CNI_CONTAINERID": f"c{delay}"})
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
        time.sleep(delay)
        process.kill()
        process.communicate(timeout=60)
    for path in relay.spooled():
        if path.suffix == ".del":
            protocol.decode_request(path.read_bytes())
        else:
            assert path.name.startswith(".")
            assert path.suffix == ".tmp"


def fall_silent(connection: socket.socket) -> None:
    threading.Event().wait(1)


@pytest.mark.parametrize(
    "behaviour",
    [
        hang_up,
        fall_silent,
        Agent().sending(b"NFC1"),
        Agent().sending(b"HTTP/1.1 200 OK\r\n\r\n"),
        Agent().sending(b"NFC1\0\0\0\0"),
        Agent().sending(b"NFC1\xff\xff\xff\xff\0"),
    ],
    ids=["hangs up", "is silent", "breaks off", "speaks another tongue", "forgets the status", "says too much"],
)
def test_del_is_kept_when_the_agent(relay: Relay, behaviour: Behaviour) -> None:
    with serve(relay.socket, Agent(), behaviour):
        outcome = relay.run("DEL", wait="0.5", CNI_CONTAINERID="c1")
    assert (outcome.status, outcome.stdout) == (0, b"")
    assert [request.env["CNI_CONTAINERID"] for request in read_spool(relay)] == ["c1"]


@pytest.mark.parametrize("command", ["ADD", "CHECK", "GC", "STATUS"])
def test_nothing_but_del_is_kept(relay: Relay, command: str) -> None:
    relay.run(command, wait="0.1", **POD)
    assert relay.spooled() == []


def test_the_same_del_is_kept_once(relay: Relay) -> None:
    first, later = {**POD}, {**POD, "CNI_NETNS": ""}
    for pod, stdin in ((first, b'{"prevResult":{}}'), (later, b"{}"), (later, b"{}"), (later, b"{}")):
        assert relay.run("DEL", stdin, wait="0", **pod).status == 0
    assert [request.env["CNI_NETNS"] for request in read_spool(relay)] == [OWN_NETNS, ""]


def test_the_same_del_once_more_counts_as_one_of_that_later_time(relay: Relay) -> None:
    """An ADD of the same interface may have come between, and the agent lets a DEL from before that be."""
    relay.run("DEL", b"{}", wait="0", **POD)
    (first,) = relay.spooled()
    relay.run("DEL", b'{"name": "other"}', wait="0", **POD)
    relay.run("DEL", b"{}", wait="0", **POD)
    other, again = relay.spooled()
    assert (protocol.decode_request(other.read_bytes()).stdin, again.name > first.name) == (b'{"name": "other"}', True)
    assert protocol.decode_request(again.read_bytes()).stdin == b"{}"


def test_another_file_of_the_same_sum_does_not_stand_for_a_del(relay: Relay) -> None:
    assert relay.run("DEL", b"{}", wait="0", **POD).status == 0
    (path,) = relay.spooled()
    content = path.read_bytes()
    for other in (b"", content[:-1], content + b" ", content[:-1] + b" "):
        path.write_bytes(other)
        assert relay.run("DEL", b"{}", wait="0", **POD).status == 0
        (kept,) = (p for p in relay.spooled() if p != path)
        assert kept.read_bytes() == content
        kept.unlink()


def test_a_spool_that_nobody_reads_fills_up_to_a_limit(sanitized_relay: Relay) -> None:
    sanitized_relay.spool.mkdir(parents=True)
    for number in range(20_000):
        os.close(os.open(sanitized_relay.spool / str(number), os.O_CREAT | os.O_WRONLY))
    error = sanitized_relay.run("DEL", **POD).error
    assert error["code"] == protocol.TRY_AGAIN_LATER
    assert error["details"].startswith(f"{sanitized_relay.spool}: holds 20000 files already")
    assert len(sanitized_relay.spooled()) == 20_000


def test_a_del_is_kept_with_as_much_configuration_as_the_agent_reads(relay: Relay) -> None:
    assert relay.run("DEL", b" " * MAX_CONF, **POD).status == 0
    assert [len(request.stdin) for request in read_spool(relay)] == [MAX_CONF]


@pytest.mark.parametrize(
    "stdin", [b" " * (2 << 20), b" " * (MAX_CONF + 1), None], ids=["too long", "too long to keep", "endless"]
)
def test_a_del_is_kept_without_its_configuration_when_that_cannot_be_had(relay: Relay, stdin: bytes | None) -> None:
    """What it undoes is in the agent's books; refused, the pod would never go."""
    process = relay.start("DEL", wait="0.2", **POD)
    if stdin is None:
        assert process.wait(60) == 0
    process.communicate(stdin, timeout=60)
    assert process.returncode == 0
    assert read_spool(relay) == [protocol.Request({"CNI_COMMAND": "DEL", "NODEFABRIC_BEATS": "1", **POD}, b"")]


def test_a_full_disk_is_told_and_leaves_nothing_half_written(relay: Relay) -> None:
    with disk(relay.spool, "size=64k"):
        filler = relay.spool / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        error = relay.run("DEL", b" " * 9000).error
        assert error["code"] == protocol.TRY_AGAIN_LATER
        assert error["details"] == f"{relay.spool}: No space left on device"
        assert relay.spooled() == [filler]
        filler.unlink()
        assert relay.run("DEL", b" " * 9000).status == 0
        assert len(read_spool(relay)) == 1


def test_a_del_that_is_kept_already_needs_no_disk_that_can_be_written(relay: Relay) -> None:
    with disk(relay.spool, "size=64k"):
        assert relay.run("DEL").status == 0
        kept = relay.spooled()
        subprocess.run(["mount", "-o", "remount,ro", relay.spool], check=True)
        assert relay.run("DEL").status == 0
        assert relay.spooled() == kept


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("a file", "Not a directory"),
        ("a link", "Not a directory"),
        ("two folders deep", "No such file or directory"),
        ("on a read-only disk", "Read-only file system"),
        ("with no room for a file", "File too large"),
    ],
)
def test_a_spool_that_cannot_be_used_is_told_and_nothing_is_put_there(relay: Relay, kind: str, why: str) -> None:
    behind, command = relay.folder / "behind", [str(relay.program)]
    behind.mkdir()
    if kind != "two folders deep":
        relay.spool.parent.mkdir()
    if kind == "a file":
        relay.spool.touch()
    elif kind == "a link":
        relay.spool.symlink_to(behind)
    elif kind == "with no room for a file":
        command = ["/bin/sh", "-c", 'ulimit -f 0; exec "$0"', *command]
    elsewhere = {"NODEFABRIC_CNI_SPOOL": str(relay.folder / "no/such/spool")} if kind == "two folders deep" else {}
    with disk(relay.spool, "ro") if kind == "on a read-only disk" else contextlib.nullcontext():
        environment = relay.environment("DEL", "0", elsewhere)
        process = subprocess.run(command, env=environment, input=b"{}", capture_output=True, check=False)
        assert not relay.spool.is_dir() or relay.spooled() == []
    error = Outcome(process.returncode, process.stdout).error
    assert error["code"] == protocol.TRY_AGAIN_LATER
    assert error["details"] == f"{elsewhere.get('NODEFABRIC_CNI_SPOOL', relay.spool)}: {why}"
    assert (list(behind.iterdir()), (relay.folder / "no").exists()) == ([], False)
