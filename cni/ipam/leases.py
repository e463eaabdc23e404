"""Addresses of interfaces: leased, and given back once and only once, whatever happens between.

A lease belongs to a container and an interface, as the standard plugins keep them; so giving one back
that is gone, or whose address has a new owner, does nothing. What could go wrong is an order of things:

* A late DEL must not meet the lease of a repeated ADD of the same container. So each container and interface has a
  lock, and ADD returns what is owed before it asks for more.
* A plugin that outlives a killed agent could write its lease after the next agent has given it back. So an agent
  that starts kills such plugins first.
* A plugin may end the agent, whatever bounds it. So what is given back is written down before the plugin is asked, and
  is asked for again later and later; and after a start that waits until pods are served.
* A plugin may hang, and whoever writes networks may make many that do. So a network that has answered before does not
  wait for one that has not, and one whose plugin was killed is refused for some time (`cni.call_limits`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any

from agent.config.networks import NO_IPAM
from agent.errors import DeviceBusy, IpamFailed
from agent.ledger import Ledger
from agent.model.allocation import Attachment, OwedLease
from cni.call import Call, DeviceLocks, counted, counted_of, joined, leasing_networks, request_of
from cni.call_limits import NoTurn, Rules, Trust, Turns, always
from cni.found_vfs import UNKNOWN
from cni.ipam import plugins as ipam
from cni.ipam import program
from cni.ipam.plugins import IpamCall
from cni.ipam.program import Bounds, Room
from cni.result import Leases

ALONE_SECONDS = 35.0
"""Longer than a release may take."""
MAX_GROUPS = 8
MAX_AT_WORK, MAX_UNTRUSTED = 5, 2
"""So many plugins run at once, however many VFs come back when a job ends: they share the memory that the agent may
have, and one that talks to the API server takes tens of megabytes of it. The second is for networks not trusted."""
ADDING, RETURNING, ASKING = "ADD", "DEL", "STATUS"
"""What a plugin may be at work for. For an address and for what is given back one place is kept, whatever hangs."""
TURN_SECONDS, ADD_TURN_SECONDS, RELEASE_TURN_SECONDS = 30.0, 90.0, 10.0
"""How long to wait for that; what is to be given back may be owed instead. With the plugin's own time an ADD stays
below what the relay waits for (cni/shim/relay.c), and that below kubelet's four minutes for a sandbox."""
STATUS_SECONDS = 0.4
"""For a plugin to say its versions, and then its status: the relay waits a second for both (cni/shim/relay.c)."""
WITH_INTERFACE = "dhcp"
"""Its daemon tells the server through the pod's interface, and a thread of it keeps the namespace alive until then."""
FORGET_SECONDS = 30 * 86400.0
TRY_SECONDS = 86400.0
"""An agent tries for so long in any case: the node may have been off for a month, or its clock stepped."""
MAX_OWED = 4096
ASKED = "no answer yet, or the agent ended while the plugin was asked"

log = logging.getLogger(__name__)


def goes_first(row: Attachment) -> bool:
    """Return whether a row's addresses are to be given back before its interface leaves the pod."""
    return row.request["network"] is not None and row.request["network"]["ipam"]["type"] == WITH_INTERFACE


class LeaseBook:
    """Leases of this node's interfaces. Methods block and may run on many threads at once."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        most_seconds: float = ipam.ADD_SECONDS,
        clock: Callable[[], float] = time.time,
        uptime: Callable[[], float] = time.monotonic,
        room: Room | None = None,
    ) -> None:
        """`most_seconds` is what one call of a plugin may take, and `room` the memory for all of them together."""
        self._ledger = ledger
        self._most_seconds = most_seconds
        self._clock = clock
        self._uptime, self._began = uptime, uptime()
        self._locks = DeviceLocks()
        self.trust = Trust(uptime)
        self._turns = Turns("IPAM plugins at work", Rules(MAX_AT_WORK, (ADDING, RETURNING), MAX_UNTRUSTED), self.trust)
        self._unasked: set[int] = set()
        """Rows of ADDs that have failed before a plugin ran."""
        self._room = room or Room.of_container()
        self._is_deferring = self._has_settled = False
        self._newest_path = ""
        """Where plugins are, as the last call said. An upgrade may have moved them since a row was written."""
        self._owner = str(ledger.path.parent)
        """Of the plugins that this agent and those before it have started."""
        self._ending = threading.Event()

    def close(self) -> None:
        """Begin nothing more."""
        self._ending.set()

    def defer(self) -> None:
        """Begin as an agent that starts: until `resume` no plugin is asked for what is to be given back, which is owed.

        Plugins of earlier agents are killed, and networks that have answered to those are trusted.
        """
        self._is_deferring = True
        if killed := program.end_all(self._owner):
            log.warning("%d processes of IPAM plugins have outlived their agent, and were killed", killed)
        for row in self._ledger.attachments():
            if row.result is not None and _may_have_leased(row):
                self.trust.note_answer(*counted_of(row.request))

    def resume(self) -> None:
        """Give back again what is to be given back."""
        self._is_deferring = False

    def look_in(self, cni_path: str) -> None:
        """Look for plugins where a call says, before the folders that rows name."""
        self._newest_path = cni_path or self._newest_path

    def take(self, row: Attachment, is_wanted: Callable[[], bool] = always) -> Leases:
        """Lease addresses for an attachment, as its network says. Raises IpamFailed, and NotWanted."""
        if row.claim_uid and (given := ipam.given_by_claim(row.request["network"])) is not None:
            return given
        container_id, ifname = row.owner.container_id, row.ifname
        self.look_in(row.request["cni_path"])
        self._unasked.add(row.attachment_id)
        with self._alone(container_id, ifname):
            for owed in self._ledger.owed_leases_of(container_id, ifname):
                self._delete(owed)
                self._ledger.settle_lease(owed.lease_id)
            network = row.request["network"]
            with self._turn(network, self._call_of(row), ADD_TURN_SECONDS, ADDING, is_wanted) as call:
                self._unasked.discard(row.attachment_id)
                try:
                    return ipam.add(network, call, self._seconds(row, ipam.ADD_SECONDS))
                except ipam.IpamMissing:
                    self._unasked.add(row.attachment_id)
                    raise

    def give_back(self, row: Attachment, turn_seconds: float = RELEASE_TURN_SECONDS, *, later: bool = False) -> bool:
        """Give an attachment's addresses back, if it has any. False if they are still to be given back, as `later`."""
        if not _may_have_leased(row) or row.attachment_id in self._unasked:
            self._unasked.discard(row.attachment_id)
            return True
        if later or self._is_deferring:
            return False
        try:
            with self._alone(row.owner.container_id, row.ifname):
                self._delete(row, turn_seconds)
        except (IpamFailed, DeviceBusy) as error:
            of = row.ifname, row.owner.container_id
            log.warning("the addresses of %s in container %s are given back later: %s", *of, error)
            return False
        return True

    def give_back_unbooked(self, call: Call) -> None:
        """Promise to give back what a call's network may have leased for an interface that no row is about.

        It may be of a pod from before this plugin, or from before the books were lost. Raises LedgerError.
        """
        self._ledger.owe_lease(call.container_id, call.ifname, call.netns_path, request_of(call, call.conf))

    def check(self, row: Attachment) -> str | None:
        """Return what is wrong with an attachment's lease, in the plugin's words; None if nothing is."""
        if not _may_have_leased(row) or row.result is None:
            return None
        network = row.request["network"]
        try:
            with self._turn(network, self._call_of(row)) as call:
                ipam.check(network, call, row.result, self._seconds(row))
        except IpamFailed as error:
            return str(error)
        return None

    def collect(self, call: Call) -> None:
        """GC: have the IPAM plugins of a network free what nobody has any more. Raises IpamFailed.

        The runtime lists the interface of its call, under which a chained call may have made others. So
        what is in the books is kept too, and leaves by its own DEL. A row that was found again may be any container's.
        """
        rows, valid = self._ledger.attachments(), set(call.conf.valid_attachments or ())
        kept = {(row.owner.container_id, row.ifname) for row in rows} | valid
        nameless = {row.ifname for row in rows if row.owner.container_id == UNKNOWN}
        kept |= {(container_id, ifname) for container_id, _ in valid for ifname in nameless}
        for document in leasing_networks(call, rows):
            seconds = self.trust.seconds(counted(document), "", ipam.TIMEOUT_SECONDS)
            with self._turn(document, IpamCall("", "", "", "", call.cni_path)) as asked:
                ipam.collect(document, asked, kept, seconds)

    def status(self, call: Call) -> None:
        """STATUS: raise IpamFailed if the call's IPAM plugin says that it could lease nothing now.

        A runtime that hears of a failure calls the whole node not ready. So a plugin that does not say in time, or
        whose network has all its turns, counts as well, unless that is refused since it has hung.
        """
        for document in leasing_networks(call, ()):
            try:
                with self._turn(document, IpamCall("", "", "", "", call.cni_path), 0.0, ASKING) as asked:
                    ipam.status(document, asked, STATUS_SECONDS)
            except (NoTurn, ipam.IpamKilled) as error:
                if self.trust.is_refused(counted(document)):
                    raise
                log.debug("whether addresses can be had is not known: %s", error)

    def settle(self) -> tuple[int, int]:
        """Try again to give back what is owed, and due. Returns how many were given back, and how many given up.

        Plugins are asked side by side (at first, when one may have ended the agent before, one after the other), each
        for one network's leases one after the other; one that hangs is not asked for its others this time.
        """
        if self._is_deferring:
            return 0, 0
        given_up = self._give_up()
        due = [lease for lease in self._ledger.owed_leases() if lease.is_due(self._clock())]
        groups: defaultdict[Any, list[OwedLease]] = defaultdict(list)
        for lease in sorted(due, key=attrgetter("tried_at", "lease_id")):
            groups[counted_of(lease.request) if _may_have_leased(lease) else None].append(lease)
        with ThreadPoolExecutor(MAX_GROUPS if self._has_settled else 1, "leases") as pool:
            settled = sum(pool.map(self._settle_group, groups.values()))
        self._has_settled = True
        return settled, given_up

    def _settle_group(self, group: Sequence[OwedLease]) -> int:
        settled = 0
        for lease in group:
            if self._ending.is_set():
                break
            try:
                of = lease.container_id, lease.ifname
                with self._alone(*of, seconds=0):
                    # An ADD that is under way for the same container returns it first, and asks again.
                    if self._ledger.has_interface(*of):
                        continue
                    if lease.lease_id not in {owed.lease_id for owed in self._ledger.owed_leases_of(*of)}:
                        continue  # somebody else has given it back since
                    # Many that are not trusted would hold up the rest: who finds no place comes another time.
                    is_trusted = not _may_have_leased(lease) or self.trust.has(*counted_of(lease.request))
                    self._delete(lease, TURN_SECONDS if is_trusted else 0.0)
                    self._ledger.settle_lease(lease.lease_id)
                    settled += 1
            except NoTurn:
                break
            except DeviceBusy:
                continue
            except IpamFailed as error:
                log.error("container %s still has the addresses of %s: %s", lease.container_id, lease.ifname, error)
                self._ledger.note_lease_problem(lease.lease_id, str(error))
                if isinstance(error, ipam.IpamKilled | ipam.IpamMissing):
                    break
        return settled

    def _give_up(self) -> int:
        """Forget leases that nobody has taken back for a month, or beyond what the books should hold."""
        owed = self._ledger.owed_leases()
        has_tried = self._uptime() - self._began >= TRY_SECONDS
        before = self._clock() - FORGET_SECONDS if has_tried else 0.0
        dropped = [lease for i, lease in enumerate(owed) if lease.since < before or i < len(owed) - MAX_OWED]
        for lease in dropped:
            log.error(
                "giving up on the addresses of %s in container %s, pending since %s: free them in the IPAM plugin"
                " by hand (%s)",
                lease.ifname,
                lease.container_id,
                time.strftime("%Y-%m-%d", time.gmtime(lease.since)),
                lease.problem or "never asked",
            )
            self._ledger.settle_lease(lease.lease_id)
        return len(dropped)

    def _delete(self, row: Attachment | OwedLease, turn_seconds: float = TURN_SECONDS) -> None:
        if _may_have_leased(row):
            network = row.request["network"]
            with self._turn(network, self._call_of(row), turn_seconds) as call:
                if isinstance(row, OwedLease):  # a row's state tells the same
                    self._ledger.note_lease_problem(row.lease_id, row.problem or ASKED)
                ipam.delete(network, call, self._seconds(row))

    def _seconds(self, row: Attachment | OwedLease, most: float = ipam.TIMEOUT_SECONDS) -> float:
        return self.trust.seconds(*counted_of(row.request), min(most, self._most_seconds))

    def _call_of(self, row: Attachment | OwedLease) -> IpamCall:
        container_id = row.owner.container_id if isinstance(row, Attachment) else row.container_id
        path = joined(self._newest_path, row.request["cni_path"])
        return IpamCall(container_id, row.ifname, row.netns_path, row.request["cni_args"], path)

    @contextmanager
    def _turn(
        self,
        network: Mapping[str, Any],
        call: IpamCall,
        seconds: float = TURN_SECONDS,
        work: str = RETURNING,
        is_wanted: Callable[[], bool] = always,
    ) -> Iterator[IpamCall]:
        """Wait for a turn to have a plugin at work, and for memory. Yields the call with its bounds."""
        of, namespace, until = counted(network), ipam.namespace_of(call.cni_args), self._uptime() + seconds
        if work != ASKING:
            self.trust.require(of, namespace)
        with (
            self._turns.hold(work, of, namespace=namespace, seconds=seconds, is_wanted=is_wanted),
            self._room.place(until - self._uptime(), is_wanted) as allows,
        ):
            # A plugin may hang over addresses, and say all the same what versions it knows.
            note = self.trust if work != ASKING else Trust()
            note.require(of, namespace)  # another call of it was killed meanwhile
            try:
                yield replace(call, bounds=Bounds(self._owner, allows, is_wanted))
            except ipam.IpamMissing:
                raise
            except ipam.IpamKilled:
                note.note_kill(of, namespace)
                raise
            except IpamFailed:
                note.note_answer(of, namespace)
                raise
            note.note_answer(of, namespace)

    def _alone(self, container_id: str, ifname: str, seconds: float = ALONE_SECONDS) -> AbstractContextManager[None]:
        return self._locks.hold([f"the addresses of {ifname} in container {container_id}"], seconds)


def _may_have_leased(row: Attachment | OwedLease) -> bool:
    """Return whether there can be addresses to give back. An earlier version took any plugin for one of addresses."""
    network = row.request["network"]
    return network is not None and network["ipam"]["type"] not in (*NO_IPAM, ipam.WITHOUT_LEASES)
