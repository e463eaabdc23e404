"""A reconciler over the attachments of a tiny node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from agent.reconcile.reconciler import Reconciler
from tests.agent.reconcile import scene
from tests.agent.reconcile.outside import Answers
from tests.cni.tiny_node import Rig, vf
from tests.live import Live


def reconciler_of(
    rig: Rig, boot_id: str = "boot", replay_spool: Callable[[], int] = lambda: 0
) -> tuple[Reconciler, list[tuple[str, str]]]:
    """Make a reconciler to which all VFs are offered, and the list of what it does."""
    outside = Answers(
        units=lambda: {vf(i): (vf(i),) for i in range(3)}, ours=lambda: {vf(i) for i in range(3)}, replay=replay_spool
    )
    scanning = Live(lambda: replace(rig.machine.scan(), boot_id=boot_id))
    return scene.reconciler_of(rig.ledger, rig.attachments, scanning, outside), outside.counted
