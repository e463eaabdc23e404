"""Every error the agent raises on purpose.

    AgentError
    ├── ConfigError             the configuration cannot be used
    ├── HardwareError           the kernel or a driver refused
    │   ├── DeviceGone          a device that should be there is not
    │   ├── DriverUnavailable   a library or kernel subsystem is absent (NVML, RDMA)
    │   └── NetlinkFailed       a netlink request was answered with an errno
    ├── AllocationError         a unit cannot be granted
    │   ├── UnknownUnit
    │   ├── UnitUnhealthy
    │   ├── ClaimInvalid        a claim's allocation or parameters cannot be used
    │   ├── ClaimConflict       its device is in other hands
    │   └── NotYet              its devices cannot be chosen now
    ├── AttachmentError         a device cannot enter or leave a pod
    │   ├── RequestInvalid      the CNI request or its netconf is wrong
    │   │   └── NotAllowed      it names a device that its pod may not have
    │   ├── DeviceBusy          another pod or call holds the device; trying again may help
    │   ├── InUse               an operator's release would take the device from a pod
    │   ├── UnknownDevice       nobody holds the device
    │   └── IpamFailed          the delegated IPAM plugin failed
    ├── LedgerError             the books cannot be read or written
    │   ├── LedgerDamaged       their file is damaged, gone, or stuck
    │   └── LedgerInUse         another agent works with them
    ├── InstallFailed           the CNI relay cannot be put in place or taken away
    └── Unavailable             a peer (kubelet, API server) does not answer
        └── Refused             the API server answered no (permission, missing CRD, invalid object)
            └── Conflicted      another writer owns fields that were to be applied

Each class has a `reason`: one word that serves as metric label, log field and Event reason.
Adapters translate their library's errors at their edge; a door (gRPC, CNI, HTTP, exit status)
has one table from classes to its own codes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


class AgentError(Exception):
    """Base of all errors raised on purpose."""

    reason = "AgentError"


class ConfigError(AgentError):
    """The configuration cannot be used. Carries every problem found, path first."""

    reason = "ConfigInvalid"

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__(f"{source}: " + "; ".join(self.problems))


class HardwareError(AgentError):
    """The kernel or a driver refused what was asked of it."""

    reason = "HardwareError"


class DeviceGone(HardwareError):
    """A device that should be there is not."""

    reason = "DeviceGone"

    def __init__(self, device: str, where: str) -> None:
        self.device = device
        super().__init__(f"{device} is gone: not found {where}")


class DriverUnavailable(HardwareError):
    """A library or kernel subsystem is absent on this node."""

    reason = "DriverUnavailable"


class NetlinkFailed(HardwareError):
    """A netlink request was answered with an errno."""

    reason = "NetlinkFailed"

    def __init__(self, action: str, errno: int, text: str) -> None:
        self.action = action
        self.errno = errno
        super().__init__(f"{action}: {text} (errno {errno})")


class AllocationError(AgentError):
    """A unit cannot be granted."""

    reason = "AllocationError"


class UnknownUnit(AllocationError):
    """kubelet asked for a unit this resource never offered."""

    reason = "UnknownUnit"


class UnitUnhealthy(AllocationError):
    """kubelet asked for a unit whose device cannot be handed out now."""

    reason = "UnitUnhealthy"


class ClaimInvalid(AllocationError):
    """A claim's allocation or parameters cannot be used; only another claim, class or configuration helps."""

    reason = "ClaimInvalid"


class ClaimConflict(AllocationError):
    """A device that somebody is to have alone is in other hands: a claim's, a plugin unit's, or a pod's."""

    reason = "ClaimConflict"

    def __init__(self, device: str, how: str) -> None:
        self.device = device
        self.how = how
        """How it is held, in words: claimed by, granted to, attached to."""
        super().__init__(f"{device} is not free: it is {how}, which must end first")


class NotYet(AllocationError):
    """The devices of a claim cannot be chosen now, and maybe in a moment."""

    reason = "NotYet"

    def __init__(self, text: str, devices: Collection[str] | None = None) -> None:
        self.devices = tuple(devices) if devices is not None else None
        """PCI addresses of those that others have, and that would do; None if that is not what it waits for."""
        super().__init__(text)


class AttachmentError(AgentError):
    """A device cannot enter or leave a pod."""

    reason = "AttachmentError"


class RequestInvalid(AttachmentError):
    """The CNI request or its network configuration is wrong; repeating it cannot help."""

    reason = "RequestInvalid"


class EnvironmentInvalid(RequestInvalid):
    """A CNI_* variable is missing or wrong."""


class NotAllowed(RequestInvalid):
    """The request names a device that its pod may not have: kubelet gave it to no pod, or to another, or must not."""

    reason = "NotAllowed"


class DeviceBusy(AttachmentError):
    """Another pod or call still holds the device, or what its move needs; trying again later may help."""

    reason = "DeviceBusy"


class InUse(AttachmentError):
    """An operator's release would take the device from a pod that may live."""

    reason = "InUse"


class UnknownDevice(AttachmentError):
    """No attachment and no quarantine has this device."""

    reason = "UnknownDevice"


class IpamFailed(AttachmentError):
    """The delegated IPAM plugin failed. `code` is the CNI error code it gave, if any."""

    reason = "IpamFailed"

    def __init__(self, plugin: str, text: str, code: int | None = None) -> None:
        self.plugin = plugin
        self.code = code
        super().__init__(f"IPAM plugin {plugin}: {text}")


class LedgerError(AgentError):
    """The books cannot be read or written."""

    reason = "LedgerError"


class LedgerDamaged(LedgerError):
    """The file of the open books is damaged, gone, or in a change that does not end: only another start helps."""


class LedgerInUse(LedgerError):
    """Another agent works with the books."""

    reason = "LedgerInUse"


class InstallFailed(AgentError):
    """The CNI relay cannot be put in place or taken away."""

    reason = "InstallFailed"


class Unavailable(AgentError):
    """A peer (kubelet, API server, agent) does not answer."""

    reason = "Unavailable"

    def __init__(self, text: str, retry_after: float | None = None) -> None:
        self.retry_after = retry_after
        """Seconds the peer asked to wait, if it did."""
        super().__init__(text)


class ConnectivityLimited(Unavailable):
    """No pod can join a network now, and those that have joined may reach nobody."""

    reason = "ConnectivityLimited"


class Refused(Unavailable):
    """The API server answered no; only a change in the cluster makes a repeat succeed."""

    reason = "Refused"

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


class Conflicted(Refused):
    """Another writer owns fields of the object that were to be applied."""

    reason = "Conflicted"

    def __init__(self, text: str, owners: Sequence[tuple[str, str]]) -> None:
        self.owners = tuple(owners)
        """(field such as `.metadata.labels.example.com/rack`, manager) of each conflict."""
        super().__init__(409, text)
