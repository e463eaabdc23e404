"""A VF for a call that names PFs instead of a device: of a pool that CNI alone manages.

The VFs of these PFs that no resource offers are the plugin's to give. Placement orders them: near the GPUs that the
pod has, then of the PF with the fewest in use. What is left the books tell.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter

from agent.errors import DeviceBusy, HardwareError, Unavailable
from agent.model.allocation import PodRef
from agent.model.device import PciDevice, Snapshot
from agent.model.pf_selector import PfSelector
from agent.placement import Distances, match_nics
from cni.call import Call
from cni.conflicts import pf_in_pod
from cni.grants import Grants
from cni.node import Node
from cni.permission import names_of

log = logging.getLogger(__name__)


class Pool:
    """Chooses VFs. Methods block, and may be called on many threads at once."""

    def __init__(self, node: Node, grants: Grants) -> None:
        self._node = node
        self._grants = grants
        self._guard = threading.Lock()
        self._chosen: dict[tuple[str, str], str] = {}
        """Container and interface → the VF that is on its way into the books."""

    def take(self, call: Call) -> str:
        """Choose a VF for a call and keep it from others until `let_go`. A repeated call gets the one it has.

        Raises DeviceBusy if none is free, HardwareError if the node has no such VF.
        """
        of = call.container_id, call.ifname
        if rows := self._node.ledger.attachments_of(*of):
            return rows[0].device
        snapshot = self._node.snapshot
        gpus = self._gpus(call.pod, snapshot)  # before the guard: kubelet takes its time
        with self._guard:
            if of not in self._chosen:
                self._chosen[of] = self._choose(call, gpus, snapshot)
                log.info("%s is for container %s %s: the first free of its pool", self._chosen[of], *of)
            return self._chosen[of]

    def let_go(self, call: Call) -> None:
        """End what `take` began: from here on the books say who has the VF, or nobody has."""
        with self._guard:
            self._chosen.pop((call.container_id, call.ifname), None)

    def _gpus(self, pod: PodRef, snapshot: Snapshot) -> tuple[str, ...]:
        """List the pod's GPUs, in the driver's order. Without them the choice is a worse one, and no failure."""
        if not snapshot.all_gpus or not pod.name:
            return ()
        distances = Distances(snapshot)
        try:
            return distances.gpus_of(self._grants.units(pod))
        except Unavailable as error:
            log.info("the GPUs of %s are not known, and its VF is chosen without: %s", pod, error)
            return ()

    def _choose(self, call: Call, gpus: tuple[str, ...], snapshot: Snapshot) -> str:
        wanted = call.conf.pf
        pool = {device.address: device for device in snapshot.devices if _is_of(device, wanted, snapshot)}
        if not pool:
            names = ", ".join(selector.pf for selector in wanted)
            raise HardwareError(f"pf selects no VF of this node: look at the names ({names}) and at sriov_numvfs")
        held = {row.device for row in self._node.ledger.attachments()} | set(self._chosen.values())
        protected = frozenset(self._grants.settings.protect)
        reasons = (
            ("in pods", held),
            ("of adapters that cni.protect names", {a for a, d in pool.items() if protected & names_of(d, snapshot)}),
            (
                "of resources that kubelet gives",
                {
                    *self._grants.offered(),
                    *(device for g in self._node.ledger.grants() for device in g.devices),
                    *self._node.ledger.claimed_devices(),
                },
            ),
            ("in quarantine", {entry.device for entry in self._node.ledger.quarantines()}),
            ("without an interface in the host", {a for a, device in pool.items() if device.netdev is None}),
            # ADD would refuse these, and the next call be given the same.
            ("that the host itself uses", {a for a, device in pool.items() if snapshot.is_needed(device)}),
            (
                "of an adapter that a pod has",
                {a for a in pool if pf_in_pod(self._node.ledger, snapshot, a, call.container_id) is not None},
            ),
        )
        free, told = set(pool), []
        for what, devices in reasons:
            if lost := free & devices:
                told.append(f"{len(lost)} {what}")
                free -= lost
        distances = Distances(snapshot)
        found = match_nics(distances, gpus, sorted(free), 1, Counter(map(distances.port, held)))
        if not found:
            raise DeviceBusy(f"no VF is free: of the {len(pool)} that pf selects, {' and '.join(told)}")
        return found[0]


def _is_of(device: PciDevice, wanted: tuple[PfSelector, ...], snapshot: Snapshot) -> bool:
    pf = snapshot.parent(device)
    if pf is None:
        return False
    names = {pf.address, *(netdev.name for netdev in pf.netdevs)}
    return any(selector.takes(names, device.vf_index) for selector in wanted)
