"""Claims as the books have them, for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agent.ledger import Ledger
from agent.model.allocation import Claim, ClaimDevice, ClaimRef, ClaimState, PodRef
from tests.agent.books import POD, VF


def claimed_vf(device: str = VF, **more: Any) -> ClaimDevice:
    """Say that a claim has a VF."""
    return replace(ClaimDevice("nic", "node", "vf", "rdma/vf", "vf", device, f"name-{device}"), **more)


def prepare(
    books: Ledger,
    name: str = "nics",
    *devices: ClaimDevice,
    pod: PodRef = POD,
    state: ClaimState = ClaimState.PREPARED,
    **more: Any,
) -> Claim:
    """Bring a claim of one pod into a state, with one VF if nothing else is said."""
    ref = ClaimRef(f"uid-{name}", "default", name)
    claim = Claim(ref, ClaimState.PREPARING, devices or (claimed_vf(),), (pod,), pod.uid)
    books.prepare_claim(replace(claim, **more))
    books.set_claim_state(ref.uid, state)
    found = books.claim(ref.uid)
    assert found is not None
    return found
