"""Ledger × kernel × kubelet: finds what does not fit, and heals it.

One module for each healer; `reconciler` has the list of them, in order, and looks around for them. Decisions are pure
functions beside the healer that acts by them (and `cni.heal`). Every action has a reason word. A device that
cannot be healed stays in quarantine, and is tried again until it can.
"""
