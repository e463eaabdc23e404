"""A reconciler over the attachments of a tiny node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from agent.reconcile import Claim, Reconciler
from tests.cni.tiny_node import Rig, vf


def reconciler_of(
    rig: Rig, boot_id: str = "boot", replay_spool: Callable[[], int] = lambda: 0
) -> tuple[Reconciler, list[tuple[str, str]]]:
    """Make a reconciler to which all VFs are offered, and the list of what it does."""
    counted: list[tuple[str, str]] = []

    async def claims() -> tuple[Claim, ...]:
        return ()

    made = Reconciler(
        rig.ledger,
        rig.attachments,
        claims=claims,
        devices_of_units=lambda: {vf(i): vf(i) for i in range(3)},
        replay_spool=replay_spool,
        count=lambda action, reason: counted.append((action, reason)),
        snapshot=lambda: replace(rig.machine.scan(), boot_id=boot_id),
        ours=lambda: {vf(i) for i in range(3)},
    )
    return made, counted
