"""Which adapter a PCI function belongs to, on hosts that have Data Direct functions: see `agent.model.device`.

Vital product data answers slowly, and on a broken card maybe never. So each function is read on a thread of its own,
once for as long as it stays on the bus; again some times if that failed, as it does while firmware resets. Nobody waits
for an answer: a snapshot has those that are there by then.

What is read is keyword V3, which all functions of one NVIDIA adapter have in common. The format is that of the PCI
local bus specification, appendix I: resources, each with a tag. Large tags have bit 7 set and two bytes of length,
little endian; small tags have their length in the low three bits. The read-only resource has tag 0x90; its fields are
two letters, one byte of length, and text.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from agent.errors import HardwareError
from agent.hardware.sysfs.pci import PCI_DEVICES
from agent.model.change import Change, OnEvent
from agent.model.device import PciDevice, Problem, Snapshot, is_data_direct, may_have_adapter_id

_READ_ONLY = 0x90
_LARGE = 0x80
_ENDS = (0x78, 0x79)
"""The small tag that ends it, and that of end with a checksum in some cards."""
MOST_VPD_BYTES = 1 << 15
"""The address of vital product data has 15 bits."""


def read_adapter_id(root: Path, address: str) -> str:
    """Read keyword V3 of one function; empty if it has none.

    The kernel reads four bytes at a time from the card, each in up to 125 ms on a broken one (drivers/pci/vpd.c), so
    no more is read than the read-only resource. Raises HardwareError if there is nothing to read, or if it is broken.
    """
    path = root / PCI_DEVICES.lstrip("/") / address / "vpd"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _adapter_id(_read_only(descriptor))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise HardwareError(f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise HardwareError(str(error)) from error


def write_adapter_id(adapter_id: str) -> bytes:
    """Spell vital product data that has a name and this keyword V3, for a node file."""
    name, field = b"nodefabric", b"V3" + bytes([len(adapter_id)]) + adapter_id.encode("ascii")
    return b"".join(
        (b"\x82", len(name).to_bytes(2, "little"), name, b"\x90", len(field).to_bytes(2, "little"), field, b"\x78")
    )


def _read_only(descriptor: int) -> bytes:
    offset = 0
    while offset < MOST_VPD_BYTES:
        head = os.pread(descriptor, 3, offset)
        if not head or head[0] in _ENDS:
            return b""
        if not head[0] & _LARGE:
            offset += 1 + (head[0] & 0x07)
            continue
        if len(head) < 3:
            break
        length = int.from_bytes(head[1:], "little")
        if head[0] == _READ_ONLY:
            content = os.pread(descriptor, min(length, MOST_VPD_BYTES), offset + 3)
            if len(content) < length:
                break
            return content
        offset += 3 + length
    raise ValueError("ends within a resource")


def _adapter_id(fields: bytes) -> str:
    offset = 0
    while offset + 3 <= len(fields):
        keyword, length = fields[offset : offset + 2], fields[offset + 2]
        value = fields[offset + 3 : offset + 3 + length]
        if len(value) < length:
            raise ValueError(f"ends within keyword {keyword!r}")
        if keyword == b"V3":
            text = value.rstrip(b"\0 ").decode("ascii", "replace").strip()
            if not text.isprintable() or "\ufffd" in text:
                raise ValueError(f"has a keyword V3 that is no text: {value[:40]!r}")
            return text
        offset += 3 + length
    return ""


READ_SECONDS = 5.0
"""After so long without an answer a function counts as one that does not answer. A later answer is taken, too."""
AGAIN_SECONDS = 60.0
"""So long after a read that failed the function is read again."""
MOST_READS = 10
"""After so many reads that failed it is given up."""


def _nobody(_: str, __: Change) -> None:
    return None


@dataclass(slots=True)
class _Reading:
    """What is known of one function."""

    identity: tuple[str, ...]
    is_data_direct: bool
    since: float
    """When the first read began."""
    answer: str | None = None
    """Keyword V3, "" if there is none; None before the answer, and if there is a problem."""
    problem: str = ""
    """Why the newest read that has ended failed."""
    is_gone: bool = False
    """It has left the bus. Of a Data Direct function that is remembered: its PF stands beside no GPU now."""


class AdapterIds:
    """Reads vital product data. `added_to` may be called from any thread, and never waits for a card."""

    def __init__(
        self,
        read: Callable[[str], str],
        on_answer: OnEvent = _nobody,
        seconds: float = READ_SECONDS,
        again_seconds: float = AGAIN_SECONDS,
    ) -> None:
        """`read` reads one function, may hang, and raises HardwareError.

        `on_answer` is called on other threads when a card has answered, or has not for so many `seconds`.
        """
        self._read = read
        self._on_answer = on_answer
        self._seconds, self._again_seconds = seconds, again_seconds
        self._lock = threading.Condition()
        self._known: dict[str, _Reading] = {}
        """By PCI address; empty before a Data Direct function was seen."""

    def added_to(self, found: Snapshot) -> Snapshot:
        """Add the answers so far to a snapshot, and have read what is new in it.

        No card is read on a host that has shown no Data Direct function.
        """
        with self._lock:
            if not self._known and not any(is_data_direct(device.vendor, device.device) for device in found.devices):
                return found
            fresh = self._new_in(filter(may_have_adapter_id, found.devices), self._known)
            answers = {a: reading.answer for a, reading in sorted(self._known.items()) if reading.answer is not None}
            problems = [
                Problem(f"{PCI_DEVICES}/{address}/vpd", text)
                for address, reading in sorted(self._known.items())
                if (text := self._problem(reading))
            ]
            is_due = any(map(self._is_due, self._known.values()))
        if fresh:
            name = f"vital product data of {len(fresh)} functions"
            threading.Thread(target=self._read_all, args=(fresh,), name=name, daemon=True).start()
        others = (problem for problem in found.problems if not _is_own(problem))
        return replace(found, adapter_ids=tuple(answers.items()), adapter_ids_due=is_due, problems=(*others, *problems))

    def settle(self) -> None:
        """Wait until all functions have answered, or for `seconds`."""
        with self._lock:
            self._lock.wait_for(lambda: not any(map(_is_waiting, self._known.values())), self._seconds)

    def _new_in(self, devices: Iterable[PciDevice], known: dict[str, _Reading]) -> dict[str, _Reading]:
        """Note what came and what has gone; give what is to be read."""
        there = {device.address: device for device in devices}
        for address in known.keys() - there.keys():
            known[address].is_gone = True
            if not known[address].is_data_direct:
                del known[address]
        fresh = {}
        for address, device in there.items():
            before, identity, now = known.get(address), _identity(device), time.monotonic()
            if before is None or before.is_gone or before.identity != identity:
                is_function = is_data_direct(device.vendor, device.device)
                known[address] = fresh[address] = _Reading(identity, is_function, now)
        return fresh

    def _read_all(self, fresh: Mapping[str, _Reading]) -> None:
        threads = [
            threading.Thread(target=self._read_one, args=each, name=f"vital product data {each[0]}", daemon=True)
            for each in fresh.items()
        ]
        for thread in threads:
            thread.start()
        self.settle()
        silent = frozenset(address for address, reading in fresh.items() if _is_waiting(reading))
        if silent:
            self._on_answer("vital product data does not answer", Change(silent))

    def _read_one(self, address: str, reading: _Reading) -> None:
        for number in range(MOST_READS):
            if number:
                time.sleep(self._again_seconds)  # its problem stays until there is an answer
            if self._known.get(address) is not reading:
                return  # it has left the bus, or has come again
            try:
                answer, problem = self._read(address), ""
            except HardwareError as error:
                answer, problem = None, str(error)
            with self._lock:
                reading.answer, reading.problem = answer, problem
                self._lock.notify_all()
            self._on_answer(f"vital product data of {address} was read", Change(frozenset((address,))))
            if answer is not None:
                return

    def _is_due(self, reading: _Reading) -> bool:
        return _is_waiting(reading) and not reading.is_gone and time.monotonic() - reading.since < self._seconds

    def _problem(self, reading: _Reading) -> str:
        if _is_waiting(reading) and not self._is_due(reading):
            return f"does not answer within {self._seconds:g} s"
        return reading.problem


def with_adapter_ids(found: Snapshot, root: Path, seconds: float = READ_SECONDS) -> Snapshot:
    """Read the vital product data of a snapshot's adapters, where one of them has a Data Direct function.

    Waits for the answers, but no longer than `seconds`.
    """
    reader = AdapterIds(partial(read_adapter_id, root), seconds=seconds)
    if reader.added_to(found) is found:
        return found
    reader.settle()
    return reader.added_to(found)


def _is_waiting(reading: _Reading) -> bool:
    return reading.answer is None and not reading.problem


def _is_own(problem: Problem) -> bool:
    return problem.path.startswith(PCI_DEVICES) and problem.path.endswith("/vpd")


def _identity(device: PciDevice) -> tuple[str, ...]:
    """Tell a function from another one at its address."""
    return (f"{device.vendor:04x}:{device.device:04x}", *device.path)
