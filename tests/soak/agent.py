"""A small agent, as the process that has it forked sees it: its orders, its points, its death."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.soak.points import Point
from tests.soak.small_agent import Options
from tests.waiting import SECONDS


class Agent:
    """A running small agent, as its parent sees it."""

    def __init__(self, zygote: socket.socket, options: Options, log: Path, seconds: float = SECONDS) -> None:
        mine, its = socket.socketpair()
        self._zygote = zygote
        read_end, write_end = os.pipe()
        with its, log.open("ab") as file:
            data = json.dumps(asdict(options)).encode()
            socket.send_fds(zygote, [data], [its.fileno(), write_end, file.fileno()])
            self.pid = int(json.loads(zygote.recv(1 << 16)))
        os.close(write_end)
        self._epitaph = read_end
        self._orders = mine
        mine.settimeout(seconds)
        self._lines = mine.makefile("rw")
        self.started: tuple[Point, ...] | None = None
        """The points of the start; None if the agent died there."""
        self.place_of_death = ""
        self.status: int | None = None
        answer = self._read()
        if answer is not None:
            self.started = tuple(Point(*p) for p in json.loads(answer))

    @property
    def lives(self) -> bool:
        return self.status is None

    def order(self, do: str, **more: Any) -> Any:
        """Have something done. None also if the agent dies of it."""
        try:
            self._lines.write(json.dumps({"do": do, **more}) + "\n")
            self._lines.flush()
        except OSError:
            self.bury()
            return None
        answer = self._read()
        return json.loads(answer) if answer is not None else None

    def points(self) -> tuple[Point, ...]:
        """Stop counting points, and tell which have passed."""
        return tuple(Point(*p) for p in self.order("disarm") or ())

    def kill(self) -> None:
        """SIGKILL it."""
        if self.lives:
            os.kill(self.pid, signal.SIGKILL)
            self.bury()

    def answers(self) -> bool:
        """Tell whether it lives, and take note if it does not."""
        if self.lives:
            self.order("nothing")
        return self.lives

    def await_death(self, relay: subprocess.Popen[bytes], seconds: float = SECONDS) -> bool:
        """Wait until the agent is dead, or a relay has an answer of it. Tells whether it died."""
        if not self.lives:  # before the call had begun: something that went on by itself met the point
            return True
        assert relay.stdout is not None
        ended = _first_readable([self._orders.fileno(), relay.stdout.fileno()], seconds)
        if self._orders.fileno() in ended:
            self.bury()
        return not self.lives

    def _read(self) -> str | None:
        try:
            line = self._lines.readline()
        except ConnectionError:
            line = ""
        if line:
            return line
        self.bury()
        return None

    def bury(self) -> None:
        """Take note of its end."""
        if not self.lives:
            return
        self._zygote.send(json.dumps({"wait": self.pid}).encode())
        self.status = int(json.loads(self._zygote.recv(1 << 16)))
        self.place_of_death = os.read(self._epitaph, 4096).decode()
        os.close(self._epitaph)
        with suppress(OSError):
            self._lines.close()
        # A file that could not write its last words keeps the socket open, whoever closes that.
        os.close(self._orders.detach())


def _first_readable(descriptors: Sequence[int], seconds: float) -> list[int]:
    ready, _, _ = select.select(list(descriptors), [], [], seconds)
    return ready
