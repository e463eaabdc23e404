"""ADD: finds out what a call wants, frees it of a former owner, and brings it into the pod.

The *attaching* row is written before anything is touched; whatever fails afterwards, the mode's
`leave` brings the device back from the row.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

from agent import device_info
from agent.errors import AgentError, DeviceBusy, RequestInvalid
from agent.hardware import netns as namespaces
from agent.hardware.announce import Announcer
from agent.hardware.host import Host
from agent.ledger import Ledger
from agent.model.allocation import Attachment, AttachmentState, Owner, PodRef
from agent.model.device import Snapshot, is_pci_address
from agent.model.slots import is_slot_id
from cni import netconf, result
from cni.answers import EnvironmentInvalid
from cni.call import BEGUN, Call, GrantedDevice, LeasingNetwork, Slots, request_of
from cni.detach import Detaching
from cni.laps import Laps
from cni.locks import DeviceLocks
from cni.modes import choice, nic, rdma
from cni.modes.mode import InterfaceFacts, Planned, Target
from cni.netconf import NetConf
from cni.permission import Permission
from cni.places import Places, Rules
from cni.pool import Pool
from cni.ruled import ruler
from cni.underway import Mark

BUSY_SECONDS = 5.0
"""How long ADD waits for the device's former owner to let go."""
POLL_SECONDS = 0.05
MAX_ADDING = 96
"""So many ADDs that have a device, or wait for one, are under way at once; those of one network at most half of it.

Any may take minutes: for an address, a device, another's work on it, a driver. Others of pods that have nothing of ours
need none of these places.
"""

log = logging.getLogger(__name__)


class Attaching:
    """Brings devices into pods. Methods block and may run on many threads at once."""

    def __init__(
        self,
        host: Host,
        ledger: Ledger,
        snapshot: Callable[[], Snapshot],
        granted: Callable[[PodRef], Sequence[GrantedDevice]],
        slots: Slots,
        pool: Pool,
        permission: Permission,
        locks: DeviceLocks,
        detaching: Detaching,
        *,
        busy_seconds: float,
        max_adding: int,
        observe_steps: Callable[[Mapping[str, float]], None],
        verbs_node: Callable[[str], str | None],
    ) -> None:
        self._host = host
        self._ledger = ledger
        self._snapshot = snapshot
        self._granted = granted
        self._slots = slots
        self._pool = pool
        self._permission = permission
        self._locks = locks
        self._detaching = detaching
        self._busy_seconds = busy_seconds
        self._places = Places("ADDs under way", Rules(max_adding))
        self._announcer = Announcer()
        self._own_netns = namespaces.own()
        self._observe_steps = observe_steps
        self._verbs_node = verbs_node
        self._beginning = threading.Lock()
        """Held from a look at the rows of other devices until the own is there."""

    def add(self, call: Call) -> Mapping[str, Any]:
        """Attach the call's devices and return the CNI result. The same ADD again answers the same."""
        if call.netns is None:
            raise RequestInvalid("ADD came without a network namespace")
        # Before kubelet is asked, which takes its time: a DEL that comes meanwhile finds no row.
        with self._detaching.underway.add(call.container_id, call.ifname) as mark:
            try:
                targets = self._targets(call, mark)
                if not targets:
                    return self._passed_through(call, mark)
                owner = Owner(call.container_id, call.ifname, call.pod, namespaces.identity(call.netns))
                if owner.netns == self._own_netns:
                    raise EnvironmentInvalid(
                        f"CNI_NETNS {call.netns_path} is the namespace of the host, which must not get a pod's"
                        " interfaces, addresses and routes: the process that it names may have ended, and another have"
                        " its number"
                    )
                with self._places.hold("ADD", *{_network_of(target.conf) for target in targets}):
                    return self._add(call, owner, targets, mark)
            except BaseException:
                self._let_slots_go(call)
                raise
            finally:
                if call.conf.pf:
                    self._pool.let_go(call)

    def _passed_through(self, call: Call, mark: Mark) -> Mapping[str, Any]:
        """Answer for a pod that no interface is for. What was chosen for its slots ends with a DEL all the same."""
        if call.conf.prev_result is None:
            raise RequestInvalid(
                "deviceID is missing: name a VF, let Multus do so, or chain this plugin after the pod's network"
            )
        if mark.close():
            raise DeviceBusy(f"DEL of {call.container_id} {call.ifname} came while its ADD was under way")
        return call.conf.prev_result

    def _let_slots_go(self, call: Call) -> None:
        try:
            self._slots.unbind(call.container_id, call.ifname)
        except AgentError as error:
            log.error("the slots of container %s stay bound: %s", call.container_id, error)

    def _add(self, call: Call, owner: Owner, targets: tuple[Target, ...], mark: Mark) -> Mapping[str, Any]:
        deadline = time.monotonic() + self._busy_seconds
        while True:
            with self._locks.hold(target.device for target in targets):
                answered = self._answered_before(owner, targets)
                if answered is not None:
                    return answered
                former = [row for t in targets if (row := self._ledger.attachment_on(t.device)) is not None]
                for row in former:
                    self._refuse_second_interface(owner, row)
                obstacle = None
                for row in former:
                    obstacle = obstacle or self._free(row)
                if obstacle is None:
                    return self._attach(call, owner, targets, mark)
            if time.monotonic() > deadline or mark.overtaken:
                raise DeviceBusy(obstacle)
            time.sleep(POLL_SECONDS)  # without the locks: the former owner's DEL needs them

    def _targets(self, call: Call, mark: Mark) -> tuple[Target, ...]:
        conf = call.conf
        if conf.device is not None and is_slot_id(conf.device):
            found = self._behind_slot(call, conf.device, mark)
            return (self._target(call, replace(conf, device=found.device), found.resource_name, call.ifname),)
        if conf.pf and conf.device is None:
            conf = replace(conf, device=self._pool.take(call))
            return (self._target(call, conf, None, call.ifname),)
        if conf.device is not None or conf.master is not None:
            return (self._target(call, self._named_before(call), None, call.ifname),)
        if conf.prev_result is None or not call.pod.name:
            return ()
        taken = {i.get("name") for i in conf.prev_result.get("interfaces") or []} | {call.ifname}
        names = (name for n in range(1, 1000) if (name := f"net{n}") not in taken)
        targets = []
        for found in (*self._granted(call.pod), *self._bound(call, mark)):
            # A MAC or a file in the call is meant for the interface of the call, not for each VF that comes along.
            settings = replace(conf.settings, mac=None)
            own = replace(conf, device=found.device, settings=settings, device_info_file=None)
            if found.network is not None:
                own = netconf.with_network(own, found.network)
            # There is nothing to move then. But what is asked for must not be passed over.
            if not (self._is_for_programs(found.device) and _asks_nothing(own)):
                targets.append(self._target(call, own, found.resource_name, next(names)))
        _refuse_same_guid(targets)
        return tuple(targets)

    def _behind_slot(self, call: Call, slot: str, mark: Mark) -> GrantedDevice:
        """Find the device of a slot that Multus names: for it, kubelet's unit is the device."""
        for found in self._bound(call, mark):
            if found.unit_id == slot:
                return found
        raise RequestInvalid(f"deviceID {slot} is a slot that kubelet has not given to pod {call.pod}")

    def _bound(self, call: Call, mark: Mark) -> Sequence[GrantedDevice]:
        """List the devices of the pod's slots. Who has to wait for them needs a place, as who has a device does."""
        with ExitStack() as place:

            @cache
            def take_place() -> bool:
                place.enter_context(self._places.hold("ADD", call.conf.name))
                return True

            return self._slots.bind(call, lambda: not mark.overtaken and take_place())

    def _target(self, call: Call, conf: NetConf, resource_name: str | None, ifname: str) -> Target:
        """Tell what becomes of a device that kubelet gave for a resource, or that the call names.

        Without `resource_name` the books say whose it was granted as. Raises NotAllowed.
        """
        mode = choice.name_for(conf, self._snapshot())
        device = choice.named(mode).key(self._host, conf, call.container_id, ifname)
        self._permission.check(call, conf, mode, device, is_granted=resource_name is not None)
        if resource_name is None:
            resource_name = self._ledger.granted_resource(device) or ""
        return Target(device, resource_name, call.container_id, ifname, mode, conf, call.cpu)

    def _named_before(self, call: Call) -> NetConf:
        """Name the device of a repeated call as the first did: an interface in a pod no longer tells what it is of."""
        conf = call.conf
        if conf.mode == "nic" and conf.device is None:
            for row in self._ledger.attachments_of(call.container_id, call.ifname):
                if row.undo.mode == "nic" and row.undo.netdev == conf.master and is_pci_address(row.device):
                    return replace(conf, device=row.device)
        return conf

    def _is_for_programs(self, device: str) -> bool:
        facts = self._snapshot().by_address.get(device)
        return facts is not None and facts.is_for_programs

    def _answered_before(self, owner: Owner, targets: tuple[Target, ...]) -> Mapping[str, Any] | None:
        rows = self._ledger.attachments_of(owner.container_id, owner.cni_ifname)
        if not rows:
            return None
        same = {row.device for row in rows} == {target.device for target in targets}
        if same and all(row.state is AttachmentState.ATTACHED and row.owner.netns == owner.netns for row in rows):
            return rows[0].result
        raise DeviceBusy(f"an earlier ADD of {owner.container_id} {owner.cni_ifname} is still being undone")

    def _refuse_second_interface(self, owner: Owner, row: Attachment) -> None:
        """Refuse a device that the same sandbox has under another interface: no waiting can help."""
        if row.owner.container_id == owner.container_id != "" and row.owner != owner:
            raise RequestInvalid(
                f"{row.device} is in this pod already, attached by the call for {row.owner.cni_ifname}: let either"
                " the chained plugin or Multus attach the pod's VFs, not both"
            )

    def _refuse_shared(self, owner: Owner, target: Target, planned: Planned) -> None:
        """Refuse to take an adapter away that pods have a part of: its VFs, or what was made upon its interface.

        From another namespace it could not give back what it enforces on VFs, and the pod with it would rule them.
        The kernel shows an interface's uppers in its own namespace only. So a VF waits, too, while another pod has
        its adapter, and so does what is to be made upon an interface that is about to move.
        """
        row = ruler(self._ledger, self._snapshot(), planned.device, owner.container_id)
        if row is not None:
            raise DeviceBusy(f"{planned.device} is ruled by {row.device}, which pod {row.owner.pod} has")
        if "kind" in planned.undo.extra and planned.link is not None:
            row = self._ledger.attachment_on(nic.device_of(planned.link))
            if row is not None and row.state is not AttachmentState.DETACHING:
                raise DeviceBusy(f"{planned.link.name} is on its way into pod {row.owner.pod}")
        if target.mode != "nic":
            return
        assert planned.link is not None
        devices = self._snapshot().by_address
        for row in self._ledger.attachments():
            facts = devices.get(row.device)
            is_vf = facts is not None and facts.physfn == planned.device
            if is_vf or ("kind" in row.undo.extra and row.undo.netdev == planned.link.name):
                raise DeviceBusy(f"{planned.link.name} is needed by {row.device}, which pod {row.owner.pod} has")

    def _free(self, row: Attachment) -> str | None:
        """Clean up after a former owner that is gone. Tell what is in the way if one is not."""
        if self._detaching.is_leaving(row):
            return f"{row.device} is on its way back from container {row.owner.container_id}"
        if row.state is not AttachmentState.DETACHING and self._detaching.owner_alive(row):
            return f"{row.device} is still held by pod {row.owner.pod} (container {row.owner.container_id})"
        log.info("finishing the clean-up of %s, left by container %s", row.device, row.owner.container_id)
        self._detaching.undo(row)
        return None

    def _attach(self, call: Call, owner: Owner, targets: tuple[Target, ...], mark: Mark) -> Mapping[str, Any]:
        assert call.netns is not None
        rows: list[Attachment] = []
        made: list[tuple[InterfaceFacts, result.Leases]] = []
        laps = Laps()
        try:
            for target in targets:
                conf, mode = target.conf, choice.named(target.mode)
                planned = mode.plan(self._host, self._snapshot(), target)
                laps.end("plan")
                with self._beginning:
                    self._refuse_shared(owner, target, planned)
                    row = self._ledger.begin_attach(
                        owner,
                        ifname=target.ifname,
                        device=planned.device,
                        resource_name=target.resource_name,
                        undo=planned.undo,
                        netns_path=call.netns_path,
                        request=request_of(call, conf) | {BEGUN: mark.begun},
                        durable=conf.ipam is not None,
                    )
                rows.append(row)
                laps.end("books")
                facts = mode.enter(self._host, planned, call.netns)
                self._require_promised_node(row, call.netns)
                laps.end("device")
                if conf.device_info_file is not None and facts.pci_id == row.device:
                    about = device_info.describe(self._snapshot(), row.device, filter(None, [row.undo.rdma]))
                    device_info.write_attached(conf.device_info_file, about)
                leases = result.Leases()
                if conf.ipam is not None:
                    leases = self._detaching.leases.take(row)
                    laps.end("ipam")
                    if facts.in_kernel:
                        self._host.links.configure(target.ifname, call.netns, leases.addresses, leases.kernel_routes())
                        laps.end("addresses")
                made.append((facts, leases))
            answer = _answer(call, made)
            if mark.close():  # from here on a DEL finds the rows
                raise DeviceBusy(f"DEL of {owner.container_id} {owner.cni_ifname} came while its ADD was under way")
            self._ledger.finish_attach([row.attachment_id for row in rows], answer)
            laps.end("books")
        except BaseException:
            for row in reversed(rows):
                self._undo_failed_add(row, call.netns)
            raise
        self._observe_steps(laps.taken)
        for facts, leases in made:
            if facts.in_kernel and leases.ips:
                self._announcer.start(call.netns, facts.name, leases.addresses)
        return answer

    def _require_promised_node(self, row: Attachment, netns: int) -> None:
        """Raise HardwareError for a device with another verbs node than its container was promised.

        A mode sees to it for its own steps. But numbers change at other pods' moves and failed ADDs, too, and kubelet
        keeps to what Allocate answered once, however often it makes the pod's sandbox anew. What a slot was bound to
        was chosen by a scan, which may be of before such a change.
        """
        promised = self._verbs_node(row.device)
        binding = self._ledger.binding_on(row.device)
        if binding is not None and binding.container_id == row.owner.container_id:
            promised = rdma.node_of_edits(binding.edits)
        elif promised is not None and all(map(is_slot_id, self._ledger.granted_units(row.device))):
            promised = None
        if promised is not None:
            rdma.require_node(self._host, row, netns, promised)

    def _undo_failed_add(self, row: Attachment, netns: int) -> None:
        # The row is not marked first: it may be a full disk that brought us here, and an *attaching*
        # row that no ADD works on says as much.
        try:
            self._detaching.undo(row, netns)
        except AgentError as error:
            log.error("%s stays in the books as half attached: %s", row.device, error)


def _network_of(conf: NetConf) -> Hashable:
    """Tell which network a device joins, where it counts whose calls wait."""
    return conf.name if conf.ipam is None else LeasingNetwork.of(conf.name, conf.ipam)


def _answer(call: Call, made: Sequence[tuple[InterfaceFacts, result.Leases]]) -> Mapping[str, Any]:
    return result.build(
        call.conf.cni_version,
        call.conf.prev_result,
        [(result.Interface(f.name, f.mac, f.mtu, call.netns_path, f.pci_id or ""), leases) for f, leases in made],
    )


def _asks_nothing(conf: NetConf) -> bool:
    """Tell whether a device that programs drive would be attached as it is."""
    is_plain = conf.guid is None and conf.pkey is None and not conf.rdma
    return conf.settings.is_empty and is_plain and not conf.function_reset


def _refuse_same_guid(targets: Sequence[Target]) -> None:
    """Refuse to give one GUID to several VFs: the fabric would take them for one port."""
    given: dict[str, str] = {}
    for target in targets:
        guid = target.conf.guid
        if guid is not None and (other := given.setdefault(guid, target.device)) != target.device:
            raise RequestInvalid(
                f"guid {guid} cannot be given to {other} and {target.device} at once: leave it out of what all VFs of a"
                " pod get, and let Multus or a network for each resource name the VF that it is for"
            )
