"""The CDI specs of holds: a file for each granted unit, each bound slot and each claim, `nodefabric-<name>.json`.

Beside those of slots and claims lies a copy of their rows. What a slot was bound to nobody else knows, and kubelet has
no claim prepared again within a boot: should the books be lost, the copies are what they are made of again. A copy goes
before the rows, and after a reboot it is void, so one of this boot without its rows is of lost books.

What they say stands in the books, and comes first: a container is told names, and a file can be written anew whenever
it is gone or says something else. A hold whose device is gone has none: the runtime then creates no container, which is
better than one with another's device.

A container gets the devices of the requests of a claim that it names, and one that is named twice does what it does
once: device files and mounts have their places, and a variable its value.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from agent.edits.cdi import SpecFiles, text_of
from agent.edits.claim_metadata import CLAIM, ClaimMetadata
from agent.errors import Unavailable
from agent.ledger import Ledger
from agent.model.allocation import Claim, ClaimState, Hold, Spec
from agent.model.unit_id import cdi_kind

UNIT, SLOT, POOL = "unit-", "slot-", "pool-"
"""How the names of files begin. A slot's is its ID."""
KIND_OF_CLAIMS = "claim"
_WHOSE = "who holds this"

log = logging.getLogger(__name__)


def file_of(hold: Hold) -> str:
    """Name the file that tells of a hold, as `Specs` names files. All of a claim's are in one."""
    if hold.claim_uid:
        return file_of_claim(hold.claim_uid)
    return hold.key if hold.is_slot else f"{UNIT}{hold.key}"


def file_of_claim(uid: str) -> str:
    """Name the file that tells of all holds of a claim."""
    return f"{CLAIM}{uid}"


class Specs:
    """Keeps the files. Methods block, briefly, and may be called on many threads at once."""

    def __init__(self, ledger: Ledger, folder: Path) -> None:
        self._ledger = ledger
        self._files = SpecFiles(folder, "", _WHOSE)
        self._copies = {start: SpecFiles(folder, start, _WHOSE, f".{start[:-1]}", 0o600) for start in (SLOT, CLAIM)}
        self.metadata = ClaimMetadata(folder)
        """Further files of claims, which go with their specs."""
        self.guard = threading.RLock()
        """Held while books and files change together: the last of several who write has seen the newest."""
        self.had_slots = any(hold.is_slot for hold in ledger.holds())
        """Whether a pod may have slots of a resource that the configuration does not bind late any more."""
        self._pools: Mapping[str, str] | None = None
        """What the specs of pools are to say, by name; None until somebody says."""

    def grant(self, holds: Iterable[Hold]) -> None:
        """Record units and slots, then write the specs of those that have one. What slots were bound to is let go of.

        Raises LedgerError, and Unavailable if a spec cannot be written: they are on record then.
        """
        made = tuple(holds)
        slots = [hold.key for hold in made if hold.is_slot]
        with self.guard:
            if slots:
                self.had_slots = True
                self.let_go(hold for key in slots if (hold := self._ledger.hold(key)) is not None and hold.is_bound)
                for key in slots:  # not even a stray spec stays
                    self._try_to_remove(key)
            self._ledger.grant(made)
            self._sync(file_of(hold) for hold in made if hold.spec is not None)

    def bind(self, slots: Sequence[Hold]) -> tuple[Hold, ...]:
        """Record the devices of slots, then write copies and specs. Raises DeviceBusy, and Unavailable: none is bound.

        In between the runtime knows no such device, and creates no container.
        """
        with self.guard:
            bound = self._ledger.bind_slots(slots)
            try:
                self._sync(slot.key for slot in bound)
            except Unavailable:
                self.let_go(bound)
                raise
        return bound

    def let_go(self, slots: Iterable[Hold]) -> tuple[Hold, ...]:
        """Remove files, then the devices of slots, but not of those that are another sandbox's by now. List those."""
        with self.guard:  # who writes missing specs would find them bound still
            known = ((slot, self._ledger.hold(slot.key)) for slot in slots)
            mine = [slot for slot, now in known if now is not None and now.is_bound_as(slot)]
            for slot in mine:
                self._try_to_remove(slot.key)
            return self._ledger.unbind(mine)

    def change(self, decide: Callable[[], Mapping[str, Spec]]) -> Sequence[str]:
        """Put specs (key of the hold → spec) into the books, then into the files. List the keys.

        `decide` looks into the books while nobody else changes what specs say. Raises LedgerError, and Unavailable if a
        spec cannot be written or removed.
        """
        with self.guard:
            news = decide()
            if news:
                self._ledger.set_specs(news)
                found = (self._ledger.hold(key) for key in news)
                self._sync(dict.fromkeys(file_of(hold) for hold in found if hold is not None))
        return tuple(news)

    def rewrite(self) -> Sequence[str]:
        """Have all files say what the books do, and list those that did not. Raises Unavailable and LedgerError."""
        names = [file_of(hold) for hold in self._ledger.holds() if hold.spec is not None]
        names += [file_of_claim(claim.ref.uid) for claim in self._ledger.claims()]
        # All takes long on a full node. So nobody who wants a grant waits for that while there is nothing to do.
        wrong = [name for name in names if not self._is_right(name)]
        return [*(self.sync(wrong) if wrong else ()), *self._write_pools()]

    def keep_pools(self, wanted: Mapping[str, str]) -> None:
        """Have exactly these specs of pools: name → text. Raises Unavailable; `rewrite` then writes what is missing."""
        with self.guard:
            if wanted != self._pools:
                self._pools = dict(wanted)
                self._write_pools()
                for name in self.names(POOL) - wanted.keys():
                    self._files.remove(name)

    def sync(self, names: Iterable[str]) -> Sequence[str]:
        """Have files say what the books do, and list those that did not.

        One of which the books say nothing stays as it is: nobody's, or of lost books. Raises Unavailable.
        """
        with self.guard:
            return self._sync(names)

    def remove(self, name: str) -> None:
        """Remove a spec, its copy before, and all else of a claim. What is not there is removed already.

        Raises Unavailable.
        """
        with self.guard:
            if (files := self._copies_of(name)) is not None:
                files.remove(name)
            self._files.remove(name)
            if name.startswith(CLAIM):
                self.metadata.remove(name)

    def tidy(self, start: str) -> Sequence[str]:
        """Remove the files of units, of slots or of claims that are in no books, and list them. Raises Unavailable."""
        with self.guard:
            there = self.names(start)  # before the books: of a new hold the rows come first
            known = {file_of(hold) for hold in self._ledger.holds() if hold.is_bound or not hold.is_slot}
            known |= {file_of_claim(claim.ref.uid) for claim in self._ledger.claims()}
            over = sorted(there - known)
            for name in over:
                self.remove(name)
        return over

    def names(self, start: str = "") -> frozenset[str]:
        """List whose files are there. What a killed process has half written is removed."""
        found = [self._files.names(), *(files.names() for of, files in self._copies.items() if of.startswith(start))]
        found += [self.metadata.names()] if CLAIM.startswith(start) else []
        return frozenset(name for names in found for name in names if name.startswith(start))

    def is_there(self, name: str) -> bool:
        """Tell whether there is a spec, whatever it says."""
        return self._files.is_there(name)

    def copies(self) -> Sequence[Claim | Hold]:
        """Read the slots and claims as the books had them last, claims as *preparing*."""
        found = (_read(files, name) for files in self._copies.values() for name in sorted(files.names()))
        return [row for row in found if row is not None]

    # ---------------------------------------------------------------------------------------------------- one file

    def _sync(self, names: Iterable[str]) -> Sequence[str]:
        """The caller holds the guard. First those go that say nothing: they may name another's device by now."""
        rows = {name: row for name in names if (row := self._row(name)) is not None}
        said = {name: found for name, row in rows.items() if (found := _specs_of(row)) is not None}
        wrong = [name for name, specs in said.items() if not self._says(name, specs)]
        for name in (name for name in wrong if not said[name]):
            self._files.remove(name)
        for name, row in rows.items():
            if not self._is_copied(name, row) and (files := self._copies_of(name)) is not None:
                files.write(name, _copy_of(row))
        for name in (name for name in wrong if said[name]):
            self._files.write(name, _text(said[name]), said[name])
        return wrong

    def _write_pools(self) -> Sequence[str]:
        wanted = self._pools or {}
        wrong = [name for name, text in wanted.items() if not self._files.says(name, text)]
        if wrong:
            with self.guard:
                for name in wrong:
                    if self._pools is wanted:  # else those are others by now, and written
                        self._files.write(name, wanted[name])
        return wrong

    def _is_right(self, name: str) -> bool:
        """Whether spec and copy say what the books do, or are to stay as they are."""
        if (row := self._row(name)) is None:
            return True
        said = _specs_of(row)
        return self._is_copied(name, row) and (said is None or self._says(name, said))

    def _says(self, name: str, said: Sequence[tuple[str, Spec]]) -> bool:
        if not said:
            return not self._files.is_there(name)
        return self._files.says(name, partial(_text, said), said)

    def _is_copied(self, name: str, row: Claim | Hold) -> bool:
        files = self._copies_of(name)
        return files is None or files.says(name, partial(_copy_of, row), _to_copy(row))

    def _copies_of(self, name: str) -> SpecFiles | None:
        return next((files for start, files in self._copies.items() if name.startswith(start)), None)

    def _row(self, name: str) -> Claim | Hold | None:
        """Return what the books say of a name; None if its files are to stay as they are.

        Of a claim nothing is written while it is unprepared, nor in another boot than it was prepared in: then it may
        name what is another's now, and kubelet has it prepared anew before it makes a container.
        """
        if name.startswith(CLAIM):
            claim = self._ledger.claim(name.removeprefix(CLAIM))
            is_over = claim is None or claim.state is ClaimState.UNPREPARING or claim.boot_id != self._ledger.boot_id
            return None if is_over else claim
        hold = self._ledger.hold(name.removeprefix(UNIT))
        return None if hold is not None and hold.is_slot and not hold.is_bound else hold

    def _try_to_remove(self, name: str) -> None:
        try:
            self.remove(name)
        except Unavailable as error:
            log.error("%s; it is tried again", error)


def _specs_of(row: Claim | Hold) -> Sequence[tuple[str, Spec]] | None:
    """List the devices that a spec is to have, with what it says of them; None if it is to stay as it is."""
    holds = row.devices if isinstance(row, Claim) else [row]
    specs = [(hold.key, hold.spec) for hold in holds if hold.spec is not None]
    return [each for each in specs if each[1].edits] if specs else None


def _to_copy(row: Claim | Hold) -> Claim | Hold:
    return replace(row, state=ClaimState.PREPARING, since=0.0) if isinstance(row, Claim) else row


def _copy_of(row: Claim | Hold) -> str:
    return json.dumps(asdict(_to_copy(row)))


def _read(files: SpecFiles, name: str) -> Claim | Hold | None:
    kind: type[Claim | Hold] = Claim if name.startswith(CLAIM) else Hold
    try:
        return TypeAdapter(kind).validate_json(files.read(name), strict=True)
    except (OSError, ValueError) as error:  # of another version, maybe
        log.error("%s says nothing of a hold: %s", files.path(name), error)
        return None


def _text(said: Sequence[tuple[str, Spec]]) -> str:
    devices: list[tuple[str, Mapping[str, Any]]] = [(key, spec.whole) for key, spec in said]
    return text_of(cdi_kind(said[0][1].kind), devices)
