"""What CNI does with devices: ADD in `attach`, DEL and healing in `detach`, CHECK and GC in `check`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.errors import RequestInvalid
from agent.hardware.host import Host
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.model.device import Snapshot
from agent.model.shares import is_share_id
from cni import chained_rdma, check, foreign, readiness
from cni.adoption import Adopter
from cni.attach import BUSY_SECONDS, MAX_ADDING, Attaching
from cni.call import Call, GrantedDevice, NoSlots, Slots
from cni.detach import HEAL_SECONDS, Detaching, PodKnown, Tell, tell_nobody
from cni.finding import NETNS_FOLDERS, Finder
from cni.locks import DeviceLocks
from cni.others import NO_OTHERS, Others
from cni.permission import Permission
from cni.pool import Pool
from cni.release import Wish, release

__all__ = ["Attachments", "Call", "GrantedDevice"]


class Attachments(Detaching):
    """Devices in pods, on the ledger and the hardware. Methods block and may run on many threads at once."""

    def __init__(
        self,
        host: Host,
        ledger: Ledger,
        snapshot: Callable[[], Snapshot],
        granted: Callable[[PodRef], Sequence[GrantedDevice]],
        *,
        busy_seconds: float = BUSY_SECONDS,
        max_adding: int = MAX_ADDING,
        netns_folders: Sequence[Path] = NETNS_FOLDERS,
        foreign_folders: tuple[Path, Path] = (foreign.STATE, foreign.RUN),
        network_of: Callable[[str], Mapping[str, Any] | None] = lambda resource_name: None,
        observe_steps: Callable[[Mapping[str, float]], None] = lambda seconds: None,
        slots: Slots | None = None,
        tell_lost: Tell = tell_nobody,
        heal_seconds: float = HEAL_SECONDS,
        others: Others = NO_OTHERS,
        pod_ended: Callable[[PodRef, float | None], None] = lambda pod, spooled_at: None,
        verbs_node: Callable[[str], str | None] = lambda device: None,
    ) -> None:
        """`granted` lists the VFs that kubelet gave to a pod; it may raise Unavailable. `slots` chooses devices late.

        `netns_folders` are where the runtime binds its pods' namespaces, `foreign_folders` where the replaced
        plugins keep their state and their locks. `network_of` tells which network a resource's VFs join.
        `observe_steps` is told what each of `laps.STEPS` took of an ADD that succeeded, `tell_lost` what the host does
        not take back with a device. `heal_seconds` is how long `heal` waits for a device, `others` tells what resources
        offer and kubelet gave. `pod_ended` is told of each DEL, and since when it lay on disk, if it did. `verbs_node`
        tells which one kubelet was told of a device when it was granted, if that is known. `max_adding` is how many
        ADDs with a device may be under way at once.
        """
        locks = DeviceLocks()
        self._slots = slots or NoSlots()
        self._pod_ended = pod_ended
        super().__init__(host, ledger, snapshot, locks, tell_lost, heal_seconds)
        self.finder = Finder(host, ledger, locks, snapshot, netns_folders=netns_folders, network_of=network_of)
        state, run = foreign_folders
        self.adopter = Adopter(host, ledger, locks, snapshot, state=state, run=run, netns_folders=netns_folders)
        self._attaching = Attaching(
            *(host, ledger, snapshot, granted, self._slots, Pool(ledger, snapshot, others)),
            *(Permission(host, ledger, snapshot, others), locks, self),
            busy_seconds=busy_seconds,
            max_adding=max_adding,
            observe_steps=observe_steps,
            verbs_node=verbs_node,
        )

    def add(self, call: Call) -> Mapping[str, Any]:
        """Attach the call's devices and return the CNI result. The same ADD again answers the same."""
        if call.conf.kind == chained_rdma.KIND:
            return chained_rdma.add(self._ledger, self._snapshot(), call)
        return self._attaching.add(self._upon_adapter(call))

    def _upon_adapter(self, call: Call) -> Call:
        """Put an adapter in the place of the share of it by which Multus names it: the share is what kubelet gave."""
        share = call.conf.device
        if share is None or not is_share_id(share):
            return call
        adapter = next((grant.device for grant in self._ledger.grants() if grant.unit_id == share), None)
        if adapter is None and call.conf.master is None:
            raise RequestInvalid(f"deviceID {share} is a share that kubelet has given to no pod")
        return replace(call, conf=replace(call.conf, device=adapter))

    def delete(self, call: Call) -> None:
        """Promise to detach what this container and interface own. Nothing owned is success."""
        if call.conf.kind != chained_rdma.KIND and not self.is_out_of_date(call):
            self.finder.name_owner(call)
            super().delete(call)
            self._slots.unbind(call.container_id, call.ifname)
            if call.pod.name:
                self._pod_ended(call.pod, call.spooled_at)

    def check(self, call: Call) -> None:
        """Compare what was set up with what is. Raises AttachmentError that lists the differences."""
        if call.conf.kind != chained_rdma.KIND:
            check.check(self._host, self._ledger, self.leases, call)

    def collect(self, call: Call) -> None:
        """GC: detach what this network holds for containers that the runtime no longer lists."""
        check.collect(self._ledger, self, call)
        self.leases.collect(call)

    def release(self, wish: Wish, pod_known: PodKnown) -> str:
        """Let go of a device by the operator's word, and tell what was done. Raises AgentError."""
        return release(self._host, self._ledger, self._locks, self, wish, pod_known)

    def status(self, call: Call) -> None:
        """Raise AgentError if the network, as far as its configuration tells, could take no pod now."""
        readiness.check(self._host, call.conf)
        self.leases.status(call)
