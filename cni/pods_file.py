"""Which pods may have something that comes into their network, on file for the relay.

A pod that is not named there starts and ends without the agent, whether that lives, hangs or is away. So the file is
brought up to date before anybody is answered who could make it untrue: a grant or a claim that may be of such a device
is in it before it is in the ledger, and there before kubelet hears of it. It counts for one boot, and is not synced:

    nodefabric-pods 2
    boot <ID of the boot>
    unknown <1 if there is something whose pod is not known yet, else 0>
    <namespace/name of a pod, its UID, or the ID of its sandbox: each on a line of its own, sorted>
    <namespace/ for any pod of it: among those>
    end

There is no file while the books may lack something: until they have agreed with kubelet's word once in this boot.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from agent.config import Config, Resource
from agent.edits.cdi import write_whole
from agent.errors import LedgerError
from agent.kubelet import checkpoint
from agent.ledger import Ledger
from agent.model.allocation import Attachment, Claim, Hold, PodRef
from agent.model.device import is_pci_address
from agent.model.unit_id import UnitId
from agent.state import Latest

SUFFIX = ".pods"
"""The file is called like the socket, and this."""
MODE = 0o600
MAX_BYTES = 256 << 10
"""The relay reads no more."""
MAX_KEPT = 1024
"""Of so many names it is remembered that they are good."""
_HEAD, _END = "nodefabric-pods 2", "end"
_EARLIER = ("nodefabric-pods 1",)
"""What files of earlier versions begin with: they name no namespaces, and are believed as much."""
_WORD = "[A-Za-z0-9][A-Za-z0-9_.-]{0,254}"
_NAME = re.compile(f"(?:{_WORD}/)?{_WORD}|{_WORD}/")
"""Whoever is called otherwise is never let through."""

log = logging.getLogger(__name__)
Thing = Hold | Attachment | Claim
"""What names a pod."""


def path_of(socket: Path) -> Path:
    """Return where the file of an agent's CNI socket is."""
    return socket.with_name(f"{socket.name}{SUFFIX}")


def kernel_boot_id() -> str:
    """Read the ID of the boot that the relay runs in; empty if it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def may_join(resource: Resource | None, hold: Hold) -> bool:
    """Return whether a hold may be of a device that comes into its pod's network.

    `resource` is None for one that is configured no more: then nobody knows what its devices were for. A slot stands
    for a device, whatever has become of its resource.
    """
    if hold.claim_uid:
        is_share = hold.kind == "hca" and not hold.network
        return not hold.admin and (not is_share or resource is None or resource.joins_network)
    if hold.is_slot:
        return True
    if resource is not None:
        return resource.joins_network
    return any(map(is_pci_address, hold.devices)) and not UnitId.parse(hold.key).is_share


def noted_pods(config: Config) -> frozenset[str] | None:
    """List the UIDs of pods to which kubelet's checkpoint counts what comes into a network; None if there is none."""
    found = checkpoint.entries(config.kubelet_dir)
    if found is None:
        return None
    names = {resource.name for resource in config.resources if resource.joins_network}
    return frozenset(
        entry.pod_uid
        for entry in found
        if entry.resource_name in names or any(UnitId.parse(unit).is_slot for unit in entry.unit_ids)
    )


def names_of_claim(claim: Claim, resources: Mapping[str, Resource]) -> tuple[str | None, ...]:
    """Name the pods that may have something of a claim's in their network; None among them is any other one.

    A pod of the claim's namespace that comes later may use it, too, unless that has an owner.
    """
    if not any(may_join(resources.get(hold.resource_name), hold) for hold in claim.devices):
        return ()
    pods = tuple(name_of(pod) for pod in claim.pods)
    return (*pods, claim.only_pod or f"{claim.ref.namespace}/")


def name_of(pod: PodRef | None, container_id: str = "") -> str | None:
    """Name a pod by what each CNI call about it says; None if nothing is known that does."""
    if pod is not None and pod.name:
        return f"{pod.namespace}/{pod.name}"
    return container_id or (pod.uid if pod is not None else "") or None


def content_of(boot_id: str, names: Collection[str | None]) -> bytes:
    """Say who may have something. None among the names stands for one who is not known."""
    content = _written(boot_id, None in names, sorted(name for name in names if name is not None and _is_name(name)))
    return content if len(content) <= MAX_BYTES else _written(boot_id, True, ())


@functools.lru_cache(MAX_KEPT)
def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def _written(boot_id: str, unknown: bool, lines: Sequence[str]) -> bytes:
    return "\n".join([_HEAD, f"boot {boot_id}", f"unknown {unknown:d}", *lines, _END, ""]).encode()


def is_of_boot(content: bytes | None, boot_id: str) -> bool:
    """Return whether a file is whole and of this boot."""
    if content is None or not content.endswith(f"\n{_END}\n".encode()):
        return False
    return any(content.startswith(f"{head}\nboot {boot_id}\nunknown ".encode()) for head in (_HEAD, *_EARLIER))


class PodsFile:
    """Keeps the file of one ledger true. Methods may be called on any thread."""

    def __init__(
        self,
        path: Path,
        boot_id: str,
        ledger: Ledger,
        config: Latest[Config],
    ) -> None:
        """`boot_id` is that of the kernel the relay runs on."""
        self._path = path
        self._boot_id = boot_id
        self._config = config
        self._resources = config.value.by_name
        self.noted: Collection[str] = ()
        """UIDs of the pods to which kubelet's own notes count a device of a network: it may list no pods for a while
        after its start, and an init container's devices never."""
        self._guard = threading.Lock()
        self._content = _read(path)
        """What is in the file; None if there is none."""
        self._is_stuck = False
        """The file could neither be written nor removed."""
        self._is_closed = False
        self._is_complete = is_of_boot(self._content, boot_id) and not ledger.is_new and ledger.recovered_from is None
        self.is_settled = False
        """Whether the books have agreed with kubelet's word since the start."""
        self._granting = 0
        """So many grants are about to be written."""
        self._counting = threading.Lock()
        """Held for the next three alone; whoever holds it asks for no other."""
        self._things: dict[str, Thing] = {}
        """What the books have, by key, number or UID."""
        self._counts: Counter[str | None] = Counter()
        """How many things each name has; None is somebody unknown."""
        self._is_changed = True
        """Since the file was brought up to date a name has come or gone."""
        things: tuple[Thing, ...] = (*ledger.holds(), *ledger.attachments(), *ledger.claims())
        for thing in things:
            self._changed(None, thing)
        ledger.watch_holds(self._changed)
        ledger.watch_attachments(self._changed)
        ledger.watch_claims(self._changed)
        ledger.subscribe(self._follow)
        ledger.guard_holds(self.granting)
        # Before the lists change: until kubelet grants by the new configuration, the former file of pods holds.
        config.subscribe(self._reconfigure)

    @property
    def has_unknown(self) -> bool:
        """Whether something was granted whose pod is not known."""
        return None in self._counts

    def look(self) -> None:
        """Read kubelet's notes, and bring the file up to date, wherever it has gone."""
        noted = noted_pods(self._config.value)
        with self._guard:
            if noted is not None:
                self.noted = noted
            self._content = _read(self._path)
            self._bring_up_to_date()

    def close(self) -> None:
        """Write no more: another agent may have the file from now on. It stays, and names who may have something."""
        with self._guard:
            self._is_closed = True

    def complete(self) -> None:
        """Take note that the books agree with kubelet's word."""
        with self._guard:
            self._is_complete = self.is_settled = True
            self._bring_up_to_date()

    def _reconfigure(self) -> None:
        """Go by other resources from now on."""
        resources = self._config.value.by_name
        with self._guard:
            with self._counting:
                before = [name for thing in self._things.values() for name in self._names_of(thing)]
                self._resources = resources
                self._count(before, [name for thing in self._things.values() for name in self._names_of(thing)])
            self._bring_up_to_date()

    @contextmanager
    def granting(self, holds: Sequence[Hold]) -> Iterator[None]:
        """Say that somebody unknown may have something, while holds are being written.

        Raises LedgerError if the file would go on to say otherwise.
        """
        if not any(may_join(self._resources.get(hold.resource_name), hold) for hold in holds):
            yield
            return
        with self._guard:
            self._granting += 1
            self._bring_up_to_date()
        try:
            if self._is_closed:
                raise LedgerError(f"{self._path} is written no more: the agent is ending")
            if self._is_stuck:
                raise LedgerError(
                    f"{self._path} can neither be written nor removed, and says that no pod has what is granted: mount"
                    " a writable folder there"
                )
            yield
        finally:
            with self._guard:  # what was granted is somebody's unknown by itself now; whose a claim is, it tells
                self._granting -= 1
                self._bring_up_to_date()

    # ------------------------------------------------------------------ changes

    def _changed(self, before: Thing | None, after: Thing | None) -> None:
        if (thing := after or before) is None:
            return
        match thing:
            case Hold(key=key):
                pass
            case Claim(ref=ref):
                key = ref.uid
            case _:
                key = str(thing.attachment_id)
        with self._counting:
            if after is not None:
                self._things[key] = after
            else:
                self._things.pop(key, None)
            self._count(self._names_of(before) if before is not None else (), self._names_of(after))

    def _count(self, before: Sequence[str | None], after: Sequence[str | None]) -> None:
        """Count what names had before and what they have now. The caller holds the lock."""
        for name in after:
            self._counts[name] += 1
            self._is_changed |= self._counts[name] == 1
        for name in before:
            self._counts[name] -= 1
            if not self._counts[name]:
                del self._counts[name]
                self._is_changed = True

    def _follow(self) -> None:
        """Bring the file up to date after a change of the books. Raises nothing, as its caller demands."""
        if self._is_changed:
            with self._guard:
                self._bring_up_to_date()

    def _names_of(self, thing: Thing | None) -> tuple[str | None, ...]:
        """Name who may have something by a thing. A claim's devices count with the claim."""
        if isinstance(thing, Claim):
            return names_of_claim(thing, self._resources)
        if isinstance(thing, Attachment):
            return (name_of(thing.owner.pod, thing.owner.container_id),)
        if thing is None or thing.claim_uid or not may_join(self._resources.get(thing.resource_name), thing):
            return ()
        return (name_of(thing.pod, thing.container_id),)

    # --------------------------------------------------------------------- file

    def _bring_up_to_date(self) -> None:
        """Write what is true now, or have no file where that cannot be told. The caller holds the guard."""
        with self._counting:
            self._is_changed = False
            names = {*self.noted, *self._counts}
        if self._granting:
            names.add(None)
        self._put(content_of(self._boot_id, names) if self._is_complete else None)

    def _put(self, content: bytes | None) -> None:
        """Have the file say something, or else remove it: it must not say what is not true any more."""
        self._is_stuck = False
        if content == self._content or self._is_closed:
            return
        try:
            if content is None:
                self._path.unlink(missing_ok=True)
            else:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_whole(self._path, content.decode(), MODE)
            self._content = content
        except OSError as error:
            log.error("%s: %s: pods that have nothing wait for the agent", self._path, error.strerror)
            try:
                self._path.unlink(missing_ok=True)
                self._content = None
            except OSError as worse:
                log.error("%s is out of date, and cannot be removed: %s", self._path, worse.strerror)
                self._is_stuck = True


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError:
        return None
