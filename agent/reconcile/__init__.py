"""Ledger × kernel × kubelet: finds what does not fit, and heals it.

Decisions are pure (`grants`, `vfs`, `cni.ailment`); `reconciler` looks, acts, logs and counts. Every action
has a reason word. A device that cannot be healed stays withheld, and is tried again, until it can.
"""

from __future__ import annotations

from agent.reconcile.grants import UNCLAIMED_SECONDS, Claim
from agent.reconcile.reconciler import Reconciler

__all__ = ["UNCLAIMED_SECONDS", "Claim", "Reconciler"]
