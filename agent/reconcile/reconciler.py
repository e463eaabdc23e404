"""The reconciler: looks around, then lets its healers heal, for ever."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from agent.errors import AgentError, LedgerDamaged, LedgerError, Unavailable
from agent.ledger import Ledger
from agent.model.allocation import Attachment
from agent.model.device import Snapshot
from agent.reconcile.grants import Grants
from agent.reconcile.rows import Rows, adopt, give_leases_back
from agent.reconcile.vfs import Vfs, end_quarantines
from agent.reconcile.view import Healer, Outside, Task, View
from agent.state import Latest
from cni.attachment import Attachments

ROUND_SECONDS = 60.0
"""A round comes at the latest after so long."""
PROBE_SECONDS = 30.0
"""Runs may follow each other quickly, and pods write into the same books."""
PAUSE_SECONDS = 0.5
OVERDUE_SECONDS = 300.0
"""A round takes seconds. Where none has come to its end for so long, a healer hangs."""
REPAIR_SECONDS = 5.0
"""How soon it is looked again whether books that could not be written can be, and who did not answer does."""
UNSETTLED_SECONDS = 1.0
"""How soon kubelet's word is compared again if it could not be: at the start the device lists may come later."""

log = logging.getLogger(__name__)


async def _at_once() -> None:
    return None


class Reconciler:
    """Heals what does not fit between books, kernel and kubelet."""

    def __init__(
        self,
        ledger: Ledger,
        attachments: Attachments,
        snapshot: Latest[Snapshot],
        outside: Outside,
        grants: Grants,
        holds: Sequence[Healer] = (),
    ) -> None:
        """`holds` heal what pods hold; `grants` is one of them, and has its turn more often."""
        attachments.watch_ends(grants.ended.note)
        self.grants = grants
        self.view = View()
        """The last look at kubelet and runtime."""
        self._ledger = ledger
        self._snapshot = snapshot
        self._outside = outside
        self._turn = asyncio.Lock()
        """Held while what was asked is gone by."""
        self._probe_at = 0.0
        self._failing: dict[str, str] = {}
        """Healer → what ended it early when it last looked."""
        self._rounded_at: float | None = None
        """When the last round ended, of the monotonic clock; before that, when the first began."""
        self._at_work = ""

        self._attachments = attachments
        self._rows = Rows(ledger, attachments, outside)
        # What is healed, in this order: at the start before anybody is served, and in each round.
        self.healers: tuple[Healer, ...] = (
            Task("replaced plugins", self._adopt),
            Task("DELs on disk", self.carry_out_dels),
            self._rows,
            *holds,
            Vfs(ledger, attachments, outside, self._rows, snapshot, grants.settled),
            Task("quarantine", lambda: end_quarantines(ledger, snapshot.value, outside)),
        )

    async def run(self, seconds: float = ROUND_SECONDS, served: Callable[[], Awaitable[object]] = _at_once) -> None:
        """Reconcile for ever: when the hardware changes, and at the latest after `seconds`.

        What failed is tried again when it is due. Leases begin when `served` returns.
        """
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._heal_for_ever(seconds), name="healing")
            loops.create_task(self._give_leases_back(seconds, served), name="leases")
            loops.create_task(self._free_ended_for_ever(), name="ended pods")
            loops.create_task(self._end_with_the_books(), name="books")

    async def begin(self) -> None:
        """Look around and heal devices before anybody is served."""
        await self.look_around()
        await asyncio.to_thread(self.heal_attachments)

    async def round(self) -> None:
        """Compare everything once, and heal what can be healed, but for leases."""
        async with self._turn:
            self._at_work = "the look at kubelet and the runtime"
            await self.look_around()
            await asyncio.to_thread(self._heal_round)

    async def give_leases_back(self) -> None:
        """Give back addresses that are due, in their own time: a plugin that hangs takes its whole time limit."""
        leases = Task("leases", partial(give_leases_back, self._attachments, self._outside))
        await asyncio.to_thread(self._let_heal, leases)

    def carry_out_dels(self) -> None:
        """Carry out the DELs that lie on disk. Blocks."""
        for _ in range(self._outside.replay()):
            self._outside.count("replay", "spooled-del")

    async def look_around(self) -> None:
        """Ask kubelet and the runtime what they know. Neither need answer."""
        outside, asked_at = self._outside, self._outside.now()
        held_units = pods = sandboxes = None
        try:
            held_units = await outside.held_units()
            pods = {(held.pod.namespace, held.pod.name) for held in held_units} | set(outside.pods())
        except Unavailable as error:
            log.info("grants are not compared: %s", error)
        except AgentError as error:
            log.error("grants are not compared: %s", error)
        if outside.asks_runtime:
            try:
                sandboxes = await outside.sandboxes()
            except AgentError as error:
                log.info("the runtime's sandboxes are not known: %s", error)
        self.view = View(asked_at, held_units, pods, sandboxes, outside.asks_runtime)

    def heal_attachments(self) -> None:
        """Let all healers of devices look once. Blocks."""
        for healer in self.healers:
            self._at_work = f"the healer of {healer.name}"
            self._let_heal(healer)

    def _adopt(self) -> None:
        """Take over what the replaced plugins left, once, before anybody's DEL looks for it."""
        if self._snapshot.value.boot_id and self._attachments.adopter.is_due:
            adopt(self._attachments, self._outside)

    def _let_heal(self, healer: Healer) -> None:
        """Let a healer look once. What ends it early is logged when it is news, counted and shown, and never raised.

        An agent that ended here would end again after each restart, before it has served anybody.
        """
        before = self._failing.get(healer.name)
        try:
            healer.heal(self.view)
        except Exception as error:
            # What a peer answered or a disk does is told by its words; where anything else came from is not.
            is_foreseen = isinstance(error, AgentError | OSError)
            what = str(error) if is_foreseen else f"{type(error).__name__}: {error}"
            self._failing[healer.name] = what
            self._outside.heal_failed(healer.name)
            if what != before:
                log.error("healing (%s) ended early: %s", healer.name, what, exc_info=not is_foreseen)
        else:
            self._failing.pop(healer.name, None)
        if self._failing.get(healer.name) != before:
            self._outside.failing("; ".join(f"{name}: {why}" for name, why in list(self._failing.items())) or None)

    def overdue(self, now: float) -> str | None:
        """Tell what is at work, if no round has come to its end for too long at a time of the monotonic clock."""
        if self._rounded_at is None or now - self._rounded_at < OVERDUE_SECONDS:
            return None
        return (
            f"no round of healing has ended for more than {OVERDUE_SECONDS:g} s ({self._at_work} is at work), so what"
            " ended pods leave is not cleaned: look at the log, and restart the agent"
        )

    def pod_known(self, row: Attachment) -> bool | None:
        """Tell whether somebody knew a row's pod at the last look."""
        return self.view.pod_known(row)

    # ------------------------------------------------------------------- loops

    async def _heal_for_ever(self, seconds: float) -> None:
        self._rounded_at = time.monotonic()
        while True:
            seen = self._snapshot.value
            await self.round()
            self._rounded_at = time.monotonic()
            due = [seconds, self._rows.retries.next_due(), None if self._probe_at else REPAIR_SECONDS]
            if self.grants.is_too_early:
                due.append(UNSETTLED_SECONDS)
            if not self.view.is_whole:
                due.append(REPAIR_SECONDS)
            ended = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(min(d for d in due if d is not None)):
                    await self._snapshot.other_than(seen)
            except TimeoutError:
                pass
            # Each pod that starts or ends changes the hardware: many at once need no look each.
            await asyncio.sleep(ended + PAUSE_SECONDS - asyncio.get_running_loop().time())

    async def _give_leases_back(self, seconds: float, served: Callable[[], Awaitable[object]]) -> None:
        await served()
        self._attachments.leases.resume()
        while True:
            await self.give_leases_back()
            await asyncio.sleep(seconds)

    async def _free_ended_for_ever(self) -> None:
        """Free what ended pods had as soon as kubelet lists them no more: nothing else tells of that."""
        while True:
            await self.grants.ended.due()
            async with self._turn:
                await self.look_around()
                await asyncio.to_thread(self._let_heal, self.grants)
            self.grants.ended.looked()
            await asyncio.sleep(PAUSE_SECONDS)

    async def _end_with_the_books(self) -> None:
        """End the agent when its books are damaged: each call would fail until then, and a start finds things again."""
        if (error := await self._ledger.damage.other_than(None)) is not None:
            log.error("%s: the agent ends, and begins again as it does with lost books", error)
            raise error

    def _heal_round(self) -> None:
        self._at_work = "the probe of the books"
        self._probe()
        self.heal_attachments()

    def _probe(self) -> None:
        """Find out now and then whether the books can be written: pods that start would find out for good.

        Raises LedgerDamaged, which ends the agent (`_end_with_the_books`).
        """
        now = self._outside.now()
        if 0 < self._probe_at - now <= PROBE_SECONDS:  # else it is time, or the clock was set back
            return
        try:
            self._ledger.probe()
        except LedgerDamaged:
            raise
        except LedgerError as error:
            self._probe_at = 0.0
            self._outside.complain(str(error))
        else:
            self._outside.complain(None)
            self._probe_at = now + PROBE_SECONDS
