"""What every mode can do: plan, enter, leave, compare.

A mode knows one kind of device and nothing of calls, leases and books. The row in the ledger is written
between `plan`, which changes nothing, and `enter`; so `leave` and `differences` have the row alone to
work from, whoever wrote it and however far `enter` came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agent.hardware.host import Child, Host, Link, LinkChange
from agent.model.allocation import Attachment, Undo
from agent.model.device import Snapshot
from cni.netconf import NetConf


@dataclass(frozen=True, slots=True)
class Target:
    """One device that a call is to bring into the pod."""

    device: str
    """The ledger's key, as the mode's `key` made it: no two pods may have rows with the same one."""
    resource_name: str
    container_id: str
    ifname: str
    """Name of the interface in the pod."""
    mode: str
    conf: NetConf
    claim_uid: str = ""
    """The DRA claim that brings it; empty for none."""
    unit_id: str = ""
    """The unit or slot by which the pod has it; empty where the call itself names the device."""


@dataclass(frozen=True, slots=True)
class InterfaceFacts:
    """What the answer to ADD says of an interface."""

    name: str
    mac: str
    mtu: int
    pci_id: str | None
    in_kernel: bool = True
    """False where a program in the pod drives the device itself: there is nothing to give addresses to."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What entering needs to know, found out before anything is changed."""

    target: Target
    undo: Undo
    link: Link | None = None
    change: LinkChange = field(default_factory=LinkChange)
    child: Child | None = None
    """What is to be made upon `link`, where that stays in the host."""
    any_node: bool = False
    """Whether it may come to another verbs node than it has in the host: containers are told afterwards."""


class Mode(Protocol):
    """A module of this package, or of `child` a class."""

    def key(self, host: Host, conf: NetConf, container_id: str, ifname: str) -> str:
        """Name what the ledger keeps a row of. Raises AgentError if the configuration does not tell."""

    def plan(self, host: Host, snapshot: Snapshot, target: Target) -> Planned:
        """Find the device and record how it is now. Changes nothing. Raises AgentError."""

    def enter(self, host: Host, planned: Planned, netns: int) -> InterfaceFacts:
        """Bring it into the namespace of a descriptor. Raises AgentError; then `leave` undoes what was done."""

    def leave(self, host: Host, attachment: Attachment, netns: int | None) -> Sequence[str]:
        """Bring the device back as it was found, from wherever it is, and verify it. Repeatable.

        A device that no longer exists is success. `netns` is the pod's namespace if it is still open.
        Returns what the host itself does not take any more: no reason to withhold the device, but to be told.
        Raises AgentError if the device is not verifiably back.
        """

    def away(self, host: Host, attachment: Attachment) -> bool:
        """Tell whether the device still is where only a living namespace can keep it."""

    def differences(self, host: Host, attachment: Attachment, netns: int, conf: NetConf) -> list[str]:
        """Tell what about an attached device is not as its row says. Empty: all is well.

        `conf` is the configuration of the call that asks.
        """
