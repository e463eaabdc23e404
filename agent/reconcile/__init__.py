"""Ledger × kernel × kubelet: finds what does not fit, and heals it.

One module for each healer; `reconciler` has the list of them, in order, and looks around for them. Decisions are pure
functions beside the healer that acts by them (and `cni.heal`). Every action has a reason word. A device that
cannot be healed stays in quarantine, and is tried again until it can.
"""

from __future__ import annotations

from agent.kubelet.podresources import HeldUnit
from agent.reconcile.grants import UNCLAIMED_SECONDS
from agent.reconcile.reconciler import Reconciler
from agent.reconcile.view import Outside

__all__ = ["UNCLAIMED_SECONDS", "HeldUnit", "Outside", "Reconciler"]
