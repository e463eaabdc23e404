"""DRA claims, to be looked at: which there are, for which pods, and which devices they have alone.

A value of all of them is made anew with each change. So whoever asks takes no lock, and a node without claims pays
nothing for the question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agent.errors import ClaimConflict
from agent.ledger import rows
from agent.ledger.database import Database
from agent.model.allocation import Claim, ClaimRef, PodRef

Watcher = Callable[[Claim | None, Claim | None], None]


@dataclass(frozen=True, slots=True)
class Claimed:
    """All claims at one moment."""

    by_uid: Mapping[str, Claim]
    """By namespace and name."""
    alone: Mapping[str, Claim]
    """Device → the claim that nobody shares it with."""
    shared: Mapping[str, tuple[Claim, ...]]
    """Device → the claims that have a part of it."""

    @classmethod
    def of(cls, claims: Iterable[Claim]) -> Claimed:
        """Look through some claims."""
        by_uid = {claim.ref.uid: claim for claim in sorted(claims, key=_place)}
        alone: dict[str, Claim] = {}
        shared: dict[str, tuple[Claim, ...]] = {}
        for claim in by_uid.values():
            for found in claim.devices:
                if found.exclusive and not found.admin:
                    alone[found.device] = claim
                elif not found.admin:
                    shared[found.device] = (*shared.get(found.device, ()), claim)
        return cls(by_uid, alone, shared)


def _place(claim: Claim) -> tuple[str, str, str]:
    return claim.ref.namespace, claim.ref.name, claim.ref.uid


class ClaimedBook(Database):
    """What is claimed."""

    def __init__(self, path: Path, boot_id: str, clock: Callable[[], float]) -> None:
        super().__init__(path, boot_id, clock)
        self._claimed = Claimed.of(())
        self._claim_watchers: list[Watcher] = []

    def watch_claims(self, watcher: Watcher) -> None:
        """Call `watcher` with each claim before and after a change. It must not block or raise."""
        self._claim_watchers.append(watcher)

    def claims(self) -> tuple[Claim, ...]:
        """List all claims, by namespace and name."""
        self._check_open()
        return tuple(self._claimed.by_uid.values())

    def claim(self, uid: str) -> Claim | None:
        """Return the claim of a UID."""
        self._check_open()
        return self._claimed.by_uid.get(uid)

    def claims_for(self, pod: PodRef) -> tuple[Claim, ...]:
        """List the claims that are known to be a pod's, in any state, by their names."""
        self._check_open()
        claims = self._claimed.by_uid
        return tuple(claim for claim in claims.values() if claim.is_for(pod)) if claims else ()

    def claim_on(self, device: str) -> Claim | None:
        """Return the claim that has a device alone."""
        self._check_open()
        return self._claimed.alone.get(device)

    def claimed_devices(self) -> Mapping[str, ClaimRef]:
        """Map each device that a claim has alone to the claim."""
        self._check_open()
        return {device: claim.ref for device, claim in self._claimed.alone.items()}

    def _refuse_claimed(self, devices: Iterable[str]) -> None:
        """Raise ClaimConflict for a device that a claim has alone. For writers, in their transaction."""
        alone = self._claimed.alone
        for device in devices if alone else ():
            if device in alone:
                raise ClaimConflict(device, f"claim {alone[device].ref}")

    def _put_claims(self, claims: Iterable[Claim], gone: Iterable[str] = ()) -> None:
        """Have memory follow what was written: claims that are new or other ones, and the UIDs of those gone."""
        before = self._claimed.by_uid
        dropped = frozenset(gone)
        changed = {claim.ref.uid: claim for claim in claims}
        self._claimed = Claimed.of(claim for uid, claim in {**before, **changed}.items() if uid not in dropped)
        for watcher in self._claim_watchers:
            for uid in {**changed, **dict.fromkeys(dropped)}:
                watcher(before.get(uid), self._claimed.by_uid.get(uid))

    def _load(self) -> None:
        super()._load()
        found = rows.claims(
            self._read("SELECT * FROM claims"), self._read("SELECT * FROM claim_devices ORDER BY rowid")
        )
        self._put_claims(found)
