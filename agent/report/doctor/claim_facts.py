"""What the checks about claims look at, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from agent.report.dra import DriverState


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """A DeviceClass of the cluster, as far as it is of interest here."""

    name: str
    expressions: tuple[str, ...] = ()
    """The CEL expressions of its selectors."""


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """What the API server tells."""

    kubelet_version: str = ""
    """Of this node; empty if it is not told."""
    classes: tuple[DeviceClass, ...] | None = None
    problem: str = ""
    """Why it was not asked, or did not answer."""


@dataclass(frozen=True, slots=True)
class HeldClaim:
    """A claim that the agent has prepared."""

    name: str
    """With its namespace."""
    state: str
    since: float
    pods: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClaimFacts:
    """One look at what claims need on a node that offers something to them."""

    now: float = 0.0
    """Seconds since the epoch."""
    folders: tuple[tuple[str, str | None], ...] = ()
    """(path of a folder that the driver needs, None if it may be used or what is wrong)."""
    sockets: tuple[tuple[str, str | None], ...] = ()
    """(a socket by which kubelet finds the driver, None if it answers or what is wrong)."""
    state: DriverState | None = None
    """As the agent tells it; None if it does not."""
    claims: tuple[HeldClaim, ...] = ()
    cluster: ClusterFacts = ClusterFacts(problem="the cluster was not asked")
