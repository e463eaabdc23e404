"""The relay under sanitizers, with answers and environments that nobody sends on purpose."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator

import pytest

from cni import protocol
from tests.cni.relay import OWN_NETNS, Agent, Relay, serve

SEED = 20261121


def odd_answers(chance: random.Random) -> Iterator[bytes]:
    """Make answers that are cut, lengthened, lie about their length, or have bytes changed."""
    whole = protocol.encode_answer(protocol.Answer(0, b'{"cniVersion":"1.1.0"}'))
    yield from (whole[:n] for n in range(1, len(whole)))
    yield from (b"NFC1" + length.to_bytes(4, "big") + b"\0{}" for length in (0, 1, 2, 4, 1 << 22, (1 << 32) - 1))
    yield b"NFC1" + (protocol.MAX_ANSWER + 1).to_bytes(4, "big") + bytes(protocol.MAX_ANSWER + 1)
    for _ in range(100):
        changed = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        yield bytes(changed) + chance.randbytes(chance.choice((0, 0, 1, 5000)))
    yield from (chance.randbytes(chance.randint(1, 64)) for _ in range(40))


def test_an_answer_is_printed_whole_or_refused(sanitized_relay: Relay) -> None:
    relay = sanitized_relay
    for answer in odd_answers(random.Random(SEED)):
        agent = Agent()
        with serve(relay.socket, agent, agent.sending(answer)):
            outcome = relay.run("ADD", CNI_NETNS=OWN_NETNS)
        try:
            expected = protocol.decode_answer(answer)
        except protocol.FrameInvalid:
            assert outcome.error["code"] == protocol.TRY_AGAIN_LATER, answer[:80]
        else:
            assert (outcome.status, outcome.stdout) == (expected.exit, expected.stdout), answer[:80]


@pytest.mark.parametrize("pieces", [(b"\0",), (b"\0" * 300, b"\0"), (b"\0\0N", b"FC1\0\0\0\x05\0do"), (b"",)])
def test_beats_before_the_answer_are_passed_over(sanitized_relay: Relay, pieces: tuple[bytes, ...]) -> None:
    whole = protocol.encode_answer(protocol.Answer(0, b"done"))

    def behave(connection: socket.socket) -> None:
        agent.requests.append(protocol.receive_request(connection))
        for piece in (*pieces, whole[len(b"".join(pieces).lstrip(protocol.BEAT)) :]):
            connection.sendall(piece)
            time.sleep(0.05)

    agent = Agent()
    with serve(sanitized_relay.socket, agent, behave):
        assert sanitized_relay.run("ADD", CNI_NETNS=OWN_NETNS).stdout == b"done"


def test_a_beat_inside_the_answer_is_a_part_of_it(sanitized_relay: Relay) -> None:
    whole = protocol.encode_answer(protocol.Answer(0, b"done"))
    agent = Agent()
    with serve(sanitized_relay.socket, agent, agent.sending(whole[:3] + protocol.BEAT + whole[3:])):
        assert "malformed" in sanitized_relay.run("ADD", CNI_NETNS=OWN_NETNS).error["details"]


def test_any_bytes_in_the_environment_make_a_json_error(sanitized_relay: Relay) -> None:
    chance = random.Random(SEED)
    for _ in range(100):
        path = bytes(chance.choices(range(1, 256), k=chance.choice((1, 7, 300, 30_000))))
        outcome = sanitized_relay.run("ADD", CNI_NETNS="/nowhere/" + os.fsdecode(path))
        assert outcome.error["code"] == protocol.INVALID_ENVIRONMENT


def test_requests_arrive_as_they_were_given(sanitized_relay: Relay) -> None:
    chance = random.Random(SEED)
    for _ in range(40):
        variables = {
            name: os.fsdecode(bytes(chance.choices(range(1, 256), k=chance.choice((0, 3, 5000)))))
            for name in ("CNI_CONTAINERID", "CNI_IFNAME", "CNI_ARGS", "CNI_PATH")
            if chance.random() < 0.8
        }
        stdin = chance.randbytes(chance.choice((0, 1, 100, 70_000)))
        agent = Agent()
        with serve(sanitized_relay.socket, agent, agent.answering()):
            assert sanitized_relay.run("GC", stdin, **variables).status == 0
        assert agent.requests[0].env == {"CNI_COMMAND": "GC", "NODEFABRIC_BEATS": "1", **variables}
        assert agent.requests[0].stdin == stdin
