"""A running QEMU: its process, its monitor, and the two channels to the guest."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rig.errors import GuestFailed, TimedOut
from rig.progress import Deadline, say

QUIET_SECONDS = 0.1
CONSOLE_LINES = 30


class Guest:
    """A QEMU process, killed when the `with` block ends; after an error its console's last lines are shown."""

    def __init__(self, argv: Sequence[str], run: Path, deadline: Deadline, *, verbose: bool = False) -> None:
        self.run = run
        self.deadline = deadline
        self.verbose = verbose
        self.started = time.monotonic()
        if verbose:
            say(shlex.join(argv))
        # Should this process be killed, the kernel kills QEMU as well.
        with (run / "console").open("wb") as log:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *argv], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def __enter__(self) -> Guest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        lines = 200 if self.verbose else CONSOLE_LINES if isinstance(error, GuestFailed | TimedOut) else 0
        if lines:
            text = (self.run / "console").read_text(errors="replace").splitlines(keepends=True)
            sys.stderr.write("".join(text[-lines:]))

    def connect(self, name: str) -> socket.socket:
        """Connect to one of QEMU's sockets. Raises GuestFailed when QEMU has ended."""
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(self.run / name))
            except OSError:
                connection.close()
                if self.process.poll() is not None:
                    raise GuestFailed(f"QEMU ended at once with status {self.process.returncode}") from None
                self.deadline.left()
                time.sleep(0.01)
            else:
                return connection


class Monitor:
    """QEMU's machine protocol (QMP): one command at a time."""

    def __init__(self, guest: Guest) -> None:
        self.deadline = guest.deadline
        self._socket = guest.connect("qmp")
        self._file = self._socket.makefile("rw")
        self._read()
        self.call("qmp_capabilities")

    def call(self, command: str, **arguments: Any) -> Any:
        """Run a command and return its answer. Raises GuestFailed when QEMU refuses it or has ended."""
        try:
            self._file.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
            self._file.flush()
        except OSError as error:
            raise GuestFailed(f"QEMU ended before {command}") from error
        while True:
            answer = self._read()
            if "error" in answer:
                raise GuestFailed(f"QEMU refused {command}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]

    def _read(self) -> dict[str, Any]:
        self._socket.settimeout(self.deadline.left())
        try:
            line = self._file.readline()
        except TimeoutError as error:
            raise TimedOut("QEMU's monitor does not answer") from error
        except OSError as error:
            raise GuestFailed("QEMU ended") from error
        if not line:
            raise GuestFailed("QEMU ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Control:
    """The guest's words, one a line: READY, then after GO, LINK adapter on|off at any time, and STATUS n."""

    def __init__(self, guest: Guest) -> None:
        self.deadline = guest.deadline
        self._socket = guest.connect("ctl")
        self._got = b""

    def send(self, line: str) -> None:
        self._socket.sendall(line.encode() + b"\n")

    def wait(self, word: str) -> list[str]:
        """Wait for the line that starts with the word and return the words after it."""
        while (words := self.read())[:1] != [word]:
            pass
        return words[1:]

    def read(self) -> list[str]:
        """Wait for a line and return its words."""
        while b"\n" not in self._got:
            self._socket.settimeout(self.deadline.left())
            try:
                data = self._socket.recv(4096)
            except TimeoutError:
                self.deadline.left()
                continue
            except OSError as error:
                raise GuestFailed("the connection to the guest broke") from error
            if not data:
                raise GuestFailed("the guest ended by itself")
            self._got += data
        line, _, self._got = self._got.partition(b"\n")
        return line.decode(errors="replace").split()


class Output:
    """Copies the command's output to our stdout until QEMU ends."""

    def __init__(self, guest: Guest) -> None:
        self.first: float | None = None
        """When the first byte came."""
        self._last = time.monotonic()
        self._socket = guest.connect("out")
        threading.Thread(target=self._copy, daemon=True).start()

    def _copy(self) -> None:
        while data := self._socket.recv(65536):
            self._last = time.monotonic()
            self.first = self.first or self._last
            while data:
                data = data[os.write(1, data) :]

    def drain(self) -> None:
        """Wait until nothing more comes: output and status travel on ports of their own."""
        began = self._last = time.monotonic()
        while time.monotonic() - self._last < QUIET_SECONDS and time.monotonic() - began < 5:
            time.sleep(QUIET_SECONDS / 5)
