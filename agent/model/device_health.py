"""How facts about devices become health: what counts of them, and for how long it must last. Pure; time is passed in.

A flap is not an outage. Reasons that come and go by nature (`Tempo.SETTLED`) count when they have lasted for
`down_seconds`, and are over when the device has been well for `up_seconds` on end. A fault that comes again before
that goes on counting from where it first began, so a link that flaps without end is an outage.
All other reasons count at once, both ways.

Two sources say something about a GPU. A reading shows its state (`Gpu.ailments`), and is right again with the next
reading. The driver's events (XIDs) say that something happened; they have no end of their own: a fatal one no longer
counts when the GPU has come back from a reset, a transient one also after some quiet time. An error says nothing about
other GPUs, and one whose GPU is not known says nothing about any. The classes follow NVIDIA's XID catalog
(docs.nvidia.com/deploy/xid-errors): what it answers with "restart the application" or "ignore" leaves the GPU healthy.
NVIDIA's device plugin takes every XID but six for fatal and for ever, which takes good GPUs away (k8s-device-plugin
issues 189, 415, 426).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType

from agent.model.device import Gpu, LinkLayer, PciDevice, Snapshot
from agent.model.health import HEALTHY, Health, Reason, Tempo, tempo_of, unhealthy


@dataclass(frozen=True, slots=True)
class Patience:
    """How long things must last, in seconds."""

    down_seconds: float = 0.0
    up_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Course:
    """What is known of one device's health over time."""

    shown: Health
    """What counts."""
    raw: Health
    """What was true at the last look."""
    raw_since: float
    """When `raw` became healthy or unhealthy."""
    failing_since: float | None = None
    """When the fault began that does not count yet. Short good times within do not end it."""

    def due(self, patience: Patience) -> float | None:
        """Tell when time alone changes what counts; None if it does not."""
        if self.raw.healthy == self.shown.healthy:
            return None
        if self.raw.healthy:
            return self.raw_since + patience.up_seconds
        return (self.raw_since if self.failing_since is None else self.failing_since) + patience.down_seconds


def begun(raw: Health, now: float) -> Course:
    """Start with a device that was never seen before: what is true counts."""
    return Course(raw, raw, now)


def step(course: Course, raw: Health, now: float, patience: Patience) -> Course:
    """Take a look into account."""
    if raw.healthy != course.raw.healthy:
        if course.raw.healthy and now >= course.raw_since + patience.up_seconds:
            course = replace(course, failing_since=None)  # well for so long, though nobody looked meanwhile
        course = replace(course, raw_since=now)
    course = replace(course, raw=raw)
    return _failing(course, now, patience) if not raw.healthy else _well(course, now, patience)


def _failing(course: Course, now: float, patience: Patience) -> Course:
    if not course.shown.healthy or tempo_of(course.raw.reason) is Tempo.AT_ONCE:
        return replace(course, shown=course.raw, failing_since=None)
    since = course.raw_since if course.failing_since is None else course.failing_since
    if now >= since + patience.down_seconds:
        return replace(course, shown=course.raw, failing_since=None)
    return replace(course, failing_since=since)


def _well(course: Course, now: float, patience: Patience) -> Course:
    lasted = now >= course.raw_since + patience.up_seconds
    if course.shown.healthy:
        return replace(course, failing_since=None) if lasted else course
    if lasted or tempo_of(course.shown.reason) is Tempo.AT_ONCE:
        return replace(course, shown=HEALTHY, failing_since=None)
    return course


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """How facts become health. The defaults take them as they are."""

    lasting: Callable[[str, Health], Health] = lambda subject, raw: raw
    """Subject (a PCI address, with a word behind it for one of several views) and what is true of it → what counts."""
    gpu: Callable[[Gpu, str], Health] = lambda gpu, mig_uuid: judge_gpu(gpu, mig_uuid=mig_uuid)
    """A GPU and the UUID of its MIG slice, empty for all of it → its health."""
    follow_link: bool = True
    """VFs are unhealthy while their PF has no link."""


PLAIN_POLICY = HealthPolicy()


def judge_nic(
    device: PciDevice, snapshot: Snapshot, *, quarantined: str | None, policy: HealthPolicy = PLAIN_POLICY
) -> Health:
    """Judge a PF, VF or HCA that is present in the snapshot.

    Its own state comes first, then that of its PF, then the link.
    """
    if quarantined is not None:
        return unhealthy(Reason.QUARANTINED)
    if device.driver is None:
        return unhealthy(Reason.NO_DRIVER)
    if device.is_for_vfio and device.iommu_group is None:
        return unhealthy(Reason.NO_IOMMU_GROUP)
    if not device.is_vf:
        return policy.lasting(device.address, judge_link(device, for_vfs=False))
    pf = snapshot.parent(device)
    if pf is None or pf.driver is None:
        return unhealthy(Reason.PARENT_DOWN)
    if not policy.follow_link:
        return HEALTHY
    return policy.lasting(f"{pf.address} uplink", judge_link(pf, for_vfs=True))


def judge_link(uplink: PciDevice, *, for_vfs: bool) -> Health:
    """Judge the link of a function, for itself or for its VFs.

    A link that nobody brought up (administratively down) tells nothing about the cable and is not
    held against the device. Where there are RDMA ports they decide: one ACTIVE port is enough, as on
    a dual-port HCA with one cable, whatever an interface on top says (IPoIB has no carrier until it
    has joined its multicast group).
    """
    ports = [p for r in uplink.rdma_devices for p in r.ports]
    if any(p.state.startswith("ACTIVE") for p in ports):
        return HEALTHY
    # A RoCE port is also DOWN while nobody brought its interface up; an InfiniBand port is only
    # DOWN without a link, so that one counts against the VFs too.
    if ports and (not for_vfs or all(p.link_layer is LinkLayer.INFINIBAND for p in ports)):
        return unhealthy(Reason.PORT_DOWN)
    carriers = [n.carrier for n in uplink.netdevs if not n.is_representor and n.carrier is not None]
    if carriers and not any(carriers):
        return unhealthy(Reason.LINK_DOWN)
    return HEALTHY


def judge_missing(
    device: str, rdma_devices: Collection[str], drivers: Collection[str], snapshot: Snapshot
) -> Health | None:
    """Say why a device that was offered is no longer among those that its resource selects.

    `rdma_devices` are those that its unit cannot do without, `drivers` those that the resource
    selects, none for any. None: it left for another reason, such as an interface that was renamed.
    """
    found = snapshot.by_address.get(device)
    if found is None:
        return None if device in snapshot.gpu_by_uuid else unhealthy(Reason.DEVICE_GONE)
    if found.driver is None:
        return unhealthy(Reason.NO_DRIVER)
    if drivers and found.driver not in drivers:
        return unhealthy(Reason.WRONG_DRIVER)
    if not {r.name for r in found.rdma_devices if not r.absent}.issuperset(rdma_devices):
        return unhealthy(Reason.NO_RDMA_DEVICE)
    return None


class XidClass(Enum):
    """What an XID means for the next container that gets the GPU."""

    APPLICATION = "application"
    """A program did something wrong. The GPU is well."""
    INFORMATION = "information"
    """The driver notes something that it has dealt with, or will at the next reset. The GPU can be used."""
    TRANSIENT = "transient"
    """Something in the driver or on a link went wrong and may be over: wait for some quiet time, or a reset."""
    FATAL = "fatal"
    """Only a reset, or new hardware, makes the GPU usable."""


APPLICATION, INFORMATION, TRANSIENT, FATAL = XidClass

XIDS: Mapping[int, tuple[XidClass, str]] = MappingProxyType(
    {
        8: (APPLICATION, "a channel made no progress"),
        11: (APPLICATION, "corrupt push buffer"),
        13: (APPLICATION, "graphics engine exception"),
        31: (APPLICATION, "memory page fault"),
        32: (APPLICATION, "corrupt push buffer"),
        43: (APPLICATION, "a channel was stopped"),
        44: (APPLICATION, "graphics engine fault at a context switch"),
        45: (APPLICATION, "channels were cleaned up"),
        68: (APPLICATION, "video decoder exception"),
        69: (APPLICATION, "graphics engine class error"),
        109: (APPLICATION, "context switch timed out"),
        137: (APPLICATION, "peer access without permission"),
        63: (INFORMATION, "row remapping or page retirement recorded"),
        92: (INFORMATION, "many corrected memory errors"),
        94: (INFORMATION, "uncorrectable memory error, contained to one program"),
        154: (INFORMATION, "the recovery action changed; a reading tells what it is now"),
        156: (INFORMATION, "resource retirement recorded"),
        38: (TRANSIENT, "driver firmware error"),
        42: (TRANSIENT, "video processor exception"),
        61: (TRANSIENT, "microcontroller warning"),
        66: (TRANSIENT, "illegal access by the driver"),
        74: (TRANSIENT, "NVLink error"),
        121: (TRANSIENT, "chip-to-chip link error"),
        145: (TRANSIENT, "NVLink receive error"),
        149: (TRANSIENT, "NVLink network error"),
        46: (FATAL, "GPU stopped"),
        48: (FATAL, "double-bit memory error"),
        54: (FATAL, "auxiliary power is missing"),
        62: (FATAL, "microcontroller halted"),
        64: (FATAL, "row remapping or page retirement failed"),
        79: (FATAL, "fallen off the bus"),
        95: (FATAL, "uncorrectable memory error, not contained"),
        110: (FATAL, "security fault"),
        119: (FATAL, "GSP firmware does not answer"),
        120: (FATAL, "GSP firmware error"),
        136: (FATAL, "link training failed"),
        140: (FATAL, "unrecovered memory error"),
        143: (FATAL, "GPU initialisation failed"),
        157: (FATAL, "resource retirement failed"),
        158: (FATAL, "fatal timeout"),
    }
)
UNKNOWN_XID = (TRANSIENT, "not in the table")
"""Not fatal: what no table knows must not take a GPU away for ever."""

QUIET_SECONDS = 300.0
"""How long a transient error counts after it last happened."""

WITHHOLDING = (
    Reason.GPU_LOST,
    Reason.RESET_REQUIRED,
    Reason.ECC_UNCORRECTABLE,
    Reason.ROW_REMAP_FAILED,
    Reason.THERMAL_SLOWDOWN,
)
"""Ailments that make a GPU unhealthy, gravest first, until a reading no longer shows them. Others are shown, and leave
the GPU healthy."""
XID_REASONS = MappingProxyType({TRANSIENT: Reason.XID_TRANSIENT, FATAL: Reason.XID_FATAL})

EVERY_XID = -1
"""Stands for all of them in a policy's sets."""
NO_INSTANCE = 0xFFFFFFFF
"""NVML's number for `not of a MIG device`."""


@dataclass(frozen=True, slots=True)
class GpuPolicy:
    """What the configuration says about errors."""

    ignored_xids: frozenset[int] = frozenset()
    """Leave a GPU healthy, besides those of the table; may hold EVERY_XID."""
    fatal_xids: frozenset[int] = frozenset()
    """Are fatal, whatever the table and `ignored_xids` say; may hold EVERY_XID."""
    quiet_seconds: float = QUIET_SECONDS

    def classify(self, xid: int) -> XidClass:
        """Tell what an XID means here."""
        if xid in self.fatal_xids:
            return FATAL
        if xid in self.ignored_xids or (EVERY_XID in self.ignored_xids and EVERY_XID not in self.fatal_xids):
            return APPLICATION
        return FATAL if EVERY_XID in self.fatal_xids else XIDS.get(xid, UNKNOWN_XID)[0]


DEFAULT_POLICY = GpuPolicy()


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """An error that the driver told of."""

    xid: int
    at: float
    """Seconds of the agent's monotonic clock."""
    gpu_uuid: str = ""
    """Empty if the driver did not say, or named one that can no longer be read."""
    mig_uuid: str = ""
    """The slice it happened in; empty if it concerns the whole GPU."""
    enumeration: int = 0
    """Of the GPU, when it happened."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """The error that counts against a GPU or a slice of one."""

    xid: int
    kind: XidClass
    """What it meant by the policy of its time."""
    at: float
    enumeration: int

    def means(self, policy: GpuPolicy) -> XidClass:
        """Tell what it means by another policy, which may excuse what happened but makes nothing graver of it."""
        now = policy.classify(self.xid)
        return self.kind if now is FATAL else now


@dataclass(frozen=True)
class Troubles:
    """All errors that count or counted, the newest of each number. Bounded by the GPUs and slices, and by XIDs."""

    by_uuid: Mapping[str, tuple[Trouble, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def noted(self, event: GpuEvent, policy: GpuPolicy = DEFAULT_POLICY) -> Troubles:
        """Take an event in. One that leaves GPUs healthy, or names none, changes nothing.

        No error takes the place of another: the policy may excuse one of them later.
        """
        kind = policy.classify(event.xid)
        uuid = event.mig_uuid or event.gpu_uuid
        if not uuid or kind not in XID_REASONS:
            return self
        fresh = Trouble(event.xid, kind, event.at, event.enumeration)
        kept = (t for t in self.by_uuid.get(uuid, ()) if t.xid != fresh.xid and t.enumeration >= fresh.enumeration)
        return Troubles(MappingProxyType({**self.by_uuid, uuid: (*kept, fresh)}))

    def is_news(self, event: GpuEvent, looked_at: float, policy: GpuPolicy = DEFAULT_POLICY) -> bool:
        """Tell whether an event makes something else of a GPU than the last look did or will. A repeat does not."""
        old, after = self.by_uuid, self.noted(event, policy).by_uuid
        if after is old:
            return False
        uuid = event.mig_uuid or event.gpu_uuid
        was, now = _gravest(old.get(uuid, ()), policy), _gravest(after[uuid], policy)
        assert now is not None
        if was is None or (was.means(policy), was.enumeration) != (now.means(policy), now.enumeration):
            return True
        return now.means(policy) is TRANSIENT and max(now.at, looked_at) >= was.at + policy.quiet_seconds


NO_TROUBLES = Troubles()


def judge_gpu(
    gpu: Gpu,
    troubles: Troubles = NO_TROUBLES,
    now: float = 0.0,
    policy: GpuPolicy = DEFAULT_POLICY,
    mig_uuid: str = "",
) -> Health:
    """Judge a GPU, or a slice of it. A slice has its GPU's ailments and errors, and those of its own.

    What a reading shows comes first: it says more than that an error happened.
    """
    ailment = next((word for word in WITHHOLDING if word in gpu.ailments), None)
    if ailment is not None:
        return unhealthy(ailment)
    found = (t for uuid in (gpu.uuid, mig_uuid) if uuid for t in troubles.by_uuid.get(uuid, ()))
    trouble = _gravest((t for t in found if _counts(t, gpu, now, policy)), policy)
    return HEALTHY if trouble is None else unhealthy(XID_REASONS[trouble.means(policy)])


def next_recovery(troubles: Troubles, now: float, policy: GpuPolicy = DEFAULT_POLICY) -> float | None:
    """Tell when the next transient error ends by itself; None if there is none. In seconds of the monotonic clock."""
    every = (t for found in troubles.by_uuid.values() for t in found)
    ends = (t.at + policy.quiet_seconds for t in every if t.means(policy) is TRANSIENT)
    return min((end for end in ends if end > now), default=None)


def slice_of(gpu: Gpu, gpu_instance: int, compute_instance: int) -> str:
    """Find the slice that an event's instance numbers name; empty if it concerns the whole GPU.

    Memory and engines belong to the GPU instance, so an event without compute instance concerns all
    that is in it; that is one slice, unless somebody cut the instance further, and then the whole GPU.
    """
    if gpu_instance == NO_INSTANCE:
        return ""
    inside = [m for m in gpu.mig_devices if m.gpu_instance == gpu_instance]
    if compute_instance != NO_INSTANCE:
        inside = [m for m in inside if m.compute_instance == compute_instance]
    return inside[0].uuid if len(inside) == 1 else ""


def _gravest(found: Iterable[Trouble], policy: GpuPolicy) -> Trouble | None:
    """Return the gravest of several errors, and of such the newest; None if all are excused."""
    counting = [t for t in found if t.means(policy) in XID_REASONS]
    return min(counting, key=lambda t: (t.means(policy) is not FATAL, -t.at), default=None)


def _counts(trouble: Trouble, gpu: Gpu, now: float, policy: GpuPolicy) -> bool:
    if gpu.enumeration > trouble.enumeration:
        return False
    kind = trouble.means(policy)
    return kind is FATAL or (kind is TRANSIENT and now < trouble.at + policy.quiet_seconds)
