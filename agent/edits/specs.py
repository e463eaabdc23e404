"""The CDI specs of holds: a file for each granted unit, each bound slot and each claim, `nodefabric-<name>.json`.

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
from functools import partial
from pathlib import Path
from typing import Any

from agent.edits.cdi import SpecFiles, text_of
from agent.ledger import Ledger
from agent.model.allocation import ClaimState, Hold, Spec
from agent.model.unit_id import CDI_VENDOR, cdi_kind

UNIT, CLAIM = "unit-", "claim-"
"""How the names of files begin. A slot's is its ID."""
KIND_OF_CLAIMS = "claim"

log = logging.getLogger(__name__)


def file_of(hold: Hold) -> str:
    """Name the file that tells of a hold, as `Specs` names files. All of a claim's are in one."""
    if hold.claim_uid:
        return f"{CLAIM}{hold.claim_uid}"
    return hold.key if hold.is_slot else f"{UNIT}{hold.key}"


class Specs:
    """Keeps the files. Methods block, briefly, and may be called on many threads at once."""

    def __init__(self, ledger: Ledger, folder: Path) -> None:
        self._ledger = ledger
        self._files = SpecFiles(folder, "", "who holds this")
        self.guard = threading.RLock()
        """Held while books and files change together: the last of several who write has seen the newest."""

    def grant(self, holds: Iterable[Hold]) -> None:
        """Record units and slots, then write the specs of those that have one.

        Raises LedgerError, and Unavailable if a spec cannot be written: they are on record then.
        """
        made = tuple(holds)
        with self.guard:
            self._ledger.grant(made)
            self._sync(file_of(hold) for hold in made if hold.spec is not None)

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
        claims = self._ledger.claims()
        holds = (*self._ledger.holds(), *(claim.devices[0] for claim in claims if claim.devices))
        names = dict.fromkeys(file_of(hold) for hold in holds if hold.spec is not None)
        # All takes long on a full node. So nobody who wants a grant waits for that while there is nothing to do.
        wrong = [name for name in names if (said := self._said(name)) is not None and not self._says(name, said)]
        return self.sync(wrong) if wrong else ()

    def sync(self, names: Iterable[str]) -> Sequence[str]:
        """Have files say what the books do, and list those that did not.

        One of which the books say nothing stays as it is: nobody's, or of lost books. Raises Unavailable.
        """
        with self.guard:
            return self._sync(names)

    def remove(self, name: str) -> None:
        """Remove a file. One that is not there is removed already. Raises Unavailable."""
        with self.guard:
            self._files.remove(name)

    def names(self, start: str = "") -> frozenset[str]:
        """List the files that are there. What a killed process has half written is removed."""
        return frozenset(name for name in self._files.names() if name.startswith(start))

    def is_written(self, name: str) -> bool:
        """Tell whether a file says what the books do."""
        found = self._said(name)
        return found is not None and self._says(name, found)

    def read(self, name: str) -> Spec | None:
        """Read what the file of a unit or slot says; None if that is not to be understood."""
        try:
            document = json.loads(self._files.read(name))
            vendor, _, kind = document["kind"].partition("/")
            (found,) = (each["containerEdits"] for each in document["devices"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("%s cannot be read: %s", self._files.path(name), error)
            return None
        return Spec(kind, found) if vendor == CDI_VENDOR and kind and isinstance(found, dict) else None

    # ---------------------------------------------------------------------------------------------------- one file

    def _sync(self, names: Iterable[str]) -> Sequence[str]:
        """The caller holds the guard. First those go that say nothing: they may name another's device by now."""
        said = {name: found for name in names if (found := self._said(name)) is not None}
        wrong = [name for name, holds in said.items() if not self._says(name, holds)]
        for name in (name for name in wrong if not said[name]):
            self._files.remove(name)
        for name in (name for name in wrong if said[name]):
            self._files.write(name, _text(said[name]))
        return wrong

    def _says(self, name: str, said: Sequence[tuple[str, Spec]]) -> bool:
        if not said:
            return not self._files.is_there(name)
        return self._files.says(name, partial(_text, said), said)

    def _said(self, name: str) -> Sequence[tuple[str, Spec]] | None:
        """List the devices that a file is to have, with their specs; None if it is to stay as it is.

        Of a claim nothing is written while it is unprepared, nor in another boot than it was prepared in: then it may
        name what is another's now, and kubelet has it prepared anew before it makes a container.
        """
        if name.startswith(CLAIM):
            claim = self._ledger.claim(name.removeprefix(CLAIM))
            if claim is None or claim.state is ClaimState.UNPREPARING or claim.boot_id != self._ledger.boot_id:
                return None
            holds: Iterable[Hold | None] = claim.devices
        else:
            holds = [self._ledger.hold(name.removeprefix(UNIT))]
        specs = [(hold.key, hold.spec) for hold in holds if hold is not None and hold.spec is not None]
        return [each for each in specs if each[1].edits] if specs else None


def _text(said: Sequence[tuple[str, Spec]]) -> str:
    devices: list[tuple[str, Mapping[str, Any]]] = [(key, spec.whole) for key, spec in said]
    return text_of(cdi_kind(said[0][1].kind), devices)
