"""Which devices a call names: by deviceID, by PFs or by a master, or, chained, what kubelet gave the pod.

`Targets._named` is the decision.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache

from agent.config.routing import NO_ROUTING
from agent.errors import AgentError, DeviceBusy, HardwareError, RequestInvalid, Unavailable
from agent.model.allocation import NO_SETTINGS, Hold, PodRef, is_place
from agent.model.device import LinkLayer, PciDevice, Snapshot, is_pci_address
from agent.model.pf_selector import PfSelector
from agent.model.unit_id import UnitId
from agent.placement import Distances, match_nics
from cni import netconf
from cni.call import Add, Call, GrantedDevice, Node, pf_in_pod
from cni.call_limits import Turns
from cni.modes import child
from cni.modes.choice import MODES
from cni.modes.mode import Target
from cni.netconf import NetConf
from cni.permission import Permission, device_names
from cni.pod_devices import HeldDevices
from cni.slots.binder import Binder

MAX_IFNAME = 15
MAX_BASE = 12
"""Of a bond's name, to have room for what its VFs' names have more."""

log = logging.getLogger(__name__)


Named = tuple[NetConf, str, GrantedDevice | Hold | None]
"""What a device is set up with, which names it or the interface that it is made upon; its name in the pod; and by what
the pod has it: None where the call itself names it."""


class Targets:
    """Finds what calls are to bring into their pods. Methods block and may run on many threads at once."""

    def __init__(
        self,
        node: Node,
        held: HeldDevices,
        slots: Binder,
        pool: Pool,
        permission: Permission,
        turns: Turns,
    ) -> None:
        """`turns` has room for calls that wait for a device."""
        self._node = node
        self._held = held
        self._slots = slots
        self._pool = pool
        self._permission = permission
        self._turns = turns

    @contextmanager
    def of(self, call: Call, add: Add) -> Iterator[tuple[Target, ...]]:
        """Yield what a call is to bring into its pod. What was chosen for it alone is free again if the block fails.

        Raises NotAllowed, RequestInvalid, DeviceBusy, and Unavailable if kubelet does not answer.
        """
        try:
            targets = tuple([self._target(call, *named) for named in self._named(call, add)])
            _refuse_same_guid(targets)
            yield targets
        except BaseException:
            self._let_slots_go(call)
            raise
        finally:
            if call.conf.pf:
                self._pool.let_go(call)

    def _named(self, call: Call, add: Add) -> Sequence[Named]:
        device = call.conf.device
        if device is None and call.conf.pf:
            return [(replace(call.conf, device=self._pool.take(call)), call.ifname, None)]
        if device is None and call.conf.master is None:
            return self._given_to_pod(call, add)
        if device is not None:
            unit = UnitId.parse(device)
            if unit.is_share:
                return self._share(call, device)
            if unit.is_slot:
                return self._slot(call, add, device)
            if is_place(device):
                return self._place(call, device)
        return [(self._named_before(call, call.conf), call.ifname, None)]

    # ------------------------------------------------------------------------------------ the ways to name devices

    def _share(self, call: Call, share: str) -> Sequence[Named]:
        """Multus names a share: the whole adapter stands behind it, which the interface is made upon."""
        adapter = hold.device if (hold := self._node.ledger.hold(share)) is not None else None
        if adapter is None and call.conf.master is None:
            raise RequestInvalid(f"deviceID {share} is a share that kubelet has given to no pod")
        return [(self._named_before(call, replace(call.conf, device=adapter)), call.ifname, None)]

    def _slot(self, call: Call, add: Add, slot: str) -> Sequence[Named]:
        """Multus names a slot: for it, kubelet's unit is the device."""
        found = next((found for found in self._bound(call, add) if found.unit_id == slot), None)
        if found is None:
            raise RequestInvalid(f"deviceID {slot} is a slot that kubelet has not given to pod {call.pod}")
        return [(replace(call.conf, device=found.device), call.ifname, found)]

    def _place(self, call: Call, place: str) -> Sequence[Named]:
        """Multus names a place, which the scheduler gave to a claim: one of the devices that were chosen for it.

        Several results of a claim may have one place: each call brings another of them.
        """
        here = self._held.of_place(call.pod, place)
        of_call = {row.parent for row in self._node.ledger.attachments_of(call.container_id, call.ifname)}
        in_pod = {row.parent for row in self._node.ledger.attachments() if row.owner.container_id == call.container_id}
        first = [found for found in here if found.device in of_call]  # a repeated call
        found = next(iter(first or [found for found in here if found.device not in in_pod]), None)
        if found is None:
            have = f"all {len(here)} devices that pod {call.pod} has there are in it"
            have = have if here else f"pod {call.pod} has no device there by a claim"
            raise RequestInvalid(
                f"deviceID {place} is a place of late-bound devices, and {have}: claim a device for each network of the"
                " pod that names this resource"
            )
        return [(replace(call.conf, device=found.device), call.ifname, found)]

    def _given_to_pod(self, call: Call, add: Add) -> Sequence[Named]:
        """The call names nothing, as a chained one does: all that kubelet gave to its pod, as net1, net2 …"""
        if call.conf.network:
            raise RequestInvalid(
                f"network {call.conf.network} is for a device that the call names, and deviceID is missing"
            )
        if call.conf.prev_result is None or not call.pod.name:
            return ()
        taken = {str(i.get("name")) for i in call.conf.prev_result.get("interfaces") or []} | {call.ifname}
        wanted = list[tuple[NetConf, GrantedDevice]]()
        for given in (*self._held.devices(call.pod), *self._bound(call, add)):
            found = self._held.settled(given)
            conf = self._limited(_conf_of(found, call.conf), found.resource_name)
            if found.files_only or self._needs_nothing(conf):
                self._node.ledger.bind([found.unit_id], call.pod)  # others are named with their rows
            else:
                wanted.append((conf, found))
        if any(conf.bond for conf, _ in wanted):
            return self._joined(wanted, taken)
        names = interface_names([(found.ifname, _usual(found)) for _, found in wanted], taken)
        return [(conf, name, found) for (conf, found), name in zip(wanted, names, strict=True)]

    def _joined(self, wanted: Sequence[tuple[NetConf, GrantedDevice]], taken: Collection[str]) -> Sequence[Named]:
        """Name what comes along where some of it is joined to bonds: VFs first, then what is made over them."""
        groups = _grouped(wanted, self._node.scans.value)
        names = interface_names([(group[0][1].ifname, _usual(group[0][1])) for group in groups], taken)
        used, named = {*taken, *names}, list[Named]()
        for group, name in zip(groups, names, strict=True):
            ports = tuple(found.device for _, found in group)
            if len(group) == 1:
                own, inner = [name], [group[0][0]]
            else:
                own = interface_names([("", f"{name[:MAX_BASE]}p%d")] * len(group), used)
                inner = [_as_port(conf, ports) for conf, _ in group]
            used.update(own)
            named += [(conf, each, found) for conf, each, (_, found) in zip(inner, own, group, strict=True)]
            if len(group) > 1:
                conf = replace(group[0][0], device=None, ports=ports, settings=NO_SETTINGS, rdma=None)
                named.append((conf, name, GrantedDevice("", group[0][1].resource_name, None)))
        return named

    # ------------------------------------------------------------------------------------------------------ steps

    def _target(self, call: Call, conf: NetConf, ifname: str, given: GrantedDevice | Hold | None) -> Target:
        """Work out what becomes of a device. Raises NotAllowed.

        Of one that the call itself names the books say which resource it was granted for.
        """
        if conf.network:
            conf = self._as_configured(conf)
        mode = mode_for(conf, self._node.scans.value)
        device = MODES[mode].key(self._node.host, conf, call.container_id, ifname)
        if conf.bond is not None and not conf.ports:
            raise RequestInvalid(
                f"bond: {conf.bond} joins two VFs that kubelet gave to the pod, and this call names one device:"
                " leave bond out, or chain the plugin after the pod's network, with a network that their resource names"
            )
        is_granted = given is not None and call.conf.master is None  # a slot's network may name one, too
        if mode != "bond" and (self._held.settings.protect or not is_granted):  # of a bond its VFs are looked at, each
            self._permission.check(call, conf, mode, device, is_granted=is_granted)
        if given is None:
            given = self._held.claimed(call.pod, conf.device or device)
        name = given.resource_name if given is not None else self._node.ledger.resource_held(device) or ""
        if mode in ("vf", "vfio"):
            conf = self._limited(conf, name)
        claim_uid = given.claim_uid if given is not None else ""
        unit_id = given.unit_id if isinstance(given, GrantedDevice) else ""
        return Target(device, name, call.container_id, ifname, mode, conf, claim_uid, unit_id)

    def _as_configured(self, conf: NetConf) -> NetConf:
        """Set a call's device up as the network says that it names. What is the pod's own stays: MAC, GUID, file."""
        made = netconf.with_network(conf, self._held.named_network(conf.network, conf.device or ""))
        settings = replace(made.settings, mac=conf.mac or made.settings.mac)
        guid = conf.guid or made.guid
        return replace(made, settings=settings, guid=guid, device_info_file=conf.device_info_file)

    def _limited(self, conf: NetConf, resource_name: str) -> NetConf:
        """Give a VF the rates of its resource, where its network says nothing of any."""
        settings = conf.settings
        if settings.min_tx_rate is not None or settings.max_tx_rate is not None:
            return conf
        rates = self._held.rates_of(resource_name)
        if rates.is_empty:
            return conf
        return replace(conf, settings=replace(settings, min_tx_rate=rates.min_tx_rate, max_tx_rate=rates.max_tx_rate))

    def _bound(self, call: Call, add: Add) -> Sequence[GrantedDevice]:
        """List the devices of the pod's slots. Who has to wait for them needs a place, as who has a device does."""
        if not (self._slots.specs.had_slots or self._held.has_late):
            return ()
        with ExitStack() as place:

            @cache
            def take_place() -> bool:
                place.enter_context(self._turns.hold("ADD", call.conf.name, namespace=call.pod.namespace))
                return True

            return self._slots.bind(call, lambda: not add.overtaken and take_place())

    def _let_slots_go(self, call: Call) -> None:
        try:
            self._slots.unbind(call.container_id, call.ifname)
        except AgentError as error:
            log.error("the slots of container %s stay bound: %s", call.container_id, error)

    def _named_before(self, call: Call, conf: NetConf) -> NetConf:
        """Name the device of a repeated call as the first did: an interface in a pod no longer tells what it is of."""
        if conf.mode == "nic" and conf.device is None:
            for row in self._node.ledger.attachments_of(call.container_id, call.ifname):
                if row.undo.mode == "nic" and row.undo.netdev == conf.master and is_pci_address(row.device):
                    return replace(conf, device=row.device)
        return conf

    def _needs_nothing(self, conf: NetConf) -> bool:
        """Return whether there is nothing to move or to set: a program drives the device, or it has no interface.

        But what is asked for must not be passed over.
        """
        facts = self._node.scans.value.by_address.get(conf.device or "")
        is_plain = conf.guid is None and conf.pkey is None and not conf.rdma and not conf.function_reset
        if facts is None or not (is_plain and conf.settings.is_empty):
            return False
        return facts.is_for_programs or (conf.mode == "nic" and conf.ipam is None and self._has_no_interface(facts))

    def _has_no_interface(self, facts: PciDevice) -> bool:
        """Return whether an adapter is there for RDMA alone. One whose interface is still in a pod is not."""
        node = self._node
        is_away = (
            node.ledger.attachment_on(facts.address) is not None or node.host.find_netdev(facts.address) is not None
        )
        return facts.is_for_rdma_alone and not node.scans.value.rdma_exclusive and not is_away


def mode_for(conf: NetConf, snapshot: Snapshot) -> str:
    """Choose the mode for a configuration: the asked one, or what the VF shows to be."""
    if conf.ports and conf.device is None:
        return "bond"
    if conf.mode not in ("vf", "nic"):
        return conf.mode
    facts = snapshot.by_address.get(conf.device or "")
    if conf.vfio or (conf.vfio is None and facts is not None and facts.is_for_programs):
        return "vfio"  # whose `plan` refuses any other driver
    if conf.mode == "nic":
        return conf.mode
    uplink = snapshot.pf_netdev(facts) if facts is not None else None
    if uplink is not None and uplink.link_layer is LinkLayer.INFINIBAND:
        return "infiniband"
    return "vf"


def interface_names(wanted: Sequence[tuple[str, str]], taken: Collection[str]) -> list[str]:
    """Name interfaces: each as it must be called, else as it usually is, else net1, net2 … The former two may be empty.

    In both %d stands for a number from 0 on. A usual name that another has is followed by -2, -3 …
    Raises RequestInvalid for a name that the pod has already, or that two are to have.
    """
    used = set(taken)
    for name in (name for name, _ in wanted if name and "%d" not in name):
        if name in used:
            raise RequestInvalid(
                f"two interfaces of the pod would be called {name}: give the one that a claim names so another ifName"
            )
        used.add(name)

    def next_of(pattern: str, first: int) -> str:
        name = next(name for n in range(first, 1000) if (name := pattern.replace("%d", str(n))) not in used)
        if len(name) > MAX_IFNAME:
            raise RequestInvalid(f"{name} has more than {MAX_IFNAME} characters: give the network a shorter ifName")
        used.add(name)
        return name

    def name_of(name: str, usual: str) -> str:
        pattern = name or usual
        if not pattern:
            return next_of("net%d", 1)
        if "%d" in pattern:
            return next_of(pattern, 0)
        if name:
            return name
        if usual in used:
            return next_of(f"{usual}-%d", 2)
        used.add(usual)
        return usual

    return [name_of(name, usual) for name, usual in wanted]


def _usual(found: GrantedDevice) -> str:
    return found.usual or (found.network.ifname if found.network is not None else "")


def _conf_of(found: GrantedDevice, conf: NetConf) -> NetConf:
    """Say what a device that comes along with a pod's network is set up with.

    A MAC or a file in the call is meant for the interface of the call, not for each VF.
    """
    own = replace(conf, device=found.device, settings=replace(conf.settings, mac=None), device_info_file=None)
    return netconf.with_network(own, found.network) if found.network is not None else own


def _grouped(
    wanted: Sequence[tuple[NetConf, GrantedDevice]], snapshot: Snapshot
) -> list[tuple[tuple[NetConf, GrantedDevice], ...]]:
    """Put each device by itself, and those of a bond together, where the first of them stands."""
    by_device = {found.device: (conf, found) for conf, found in wanted}
    bonded: dict[tuple[str, str], list[str]] = {}
    for conf, found in wanted:
        if conf.bond is not None:
            if mode_for(conf, snapshot) != "vf":
                raise RequestInvalid(f"bond: {found.device} is no Ethernet VF with an interface: leave bond out")
            bonded.setdefault((found.resource_name, found.claim_uid), []).append(found.device)
    pairs = {pair[0]: pair for devices in bonded.values() for pair in child.pairs(devices, snapshot)}
    seconds = {pair[1] for pair in pairs.values()}
    return [
        tuple(by_device[device] for device in pairs.get(found.device, (found.device,)))
        for _, found in wanted
        if found.device not in seconds
    ]


def _as_port(conf: NetConf, ports: tuple[str, ...]) -> NetConf:
    """Say what a bond's VF is set up with: what concerns the interface alone is the bond's."""
    return replace(conf, ports=ports, ipam=None, for_ipam={}, altnames=(), routing=NO_ROUTING)


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


class Pool:
    """Chooses a VF for a call that names PFs instead of a device. Methods block and may run on many threads at once.

    The VFs of these PFs that no resource offers are the plugin's to give. Placement orders them: near the GPUs that the
    pod has, then of the PF with the fewest in use. What is left the books tell.
    """

    def __init__(self, node: Node, held: HeldDevices) -> None:
        self._node = node
        self._held = held
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
        snapshot = self._node.scans.value
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
            return distances.gpus_of(self._held.units(pod))
        except Unavailable as error:
            log.info("the GPUs of %s are not known, and its VF is chosen without: %s", pod, error)
            return ()

    def _choose(self, call: Call, gpus: tuple[str, ...], snapshot: Snapshot) -> str:
        wanted = call.conf.pf
        pool = {device.address: device for device in snapshot.devices if _is_vf_of(device, wanted, snapshot)}
        if not pool:
            names = ", ".join(selector.pf for selector in wanted)
            raise HardwareError(f"pf selects no VF of this node: look at the names ({names}) and at sriov_numvfs")
        held = {row.device for row in self._node.ledger.attachments()} | set(self._chosen.values())
        protected = frozenset(self._held.settings.protect)
        reasons = (
            ("in pods", held),
            (
                "of adapters that cni.protect names",
                {a for a, d in pool.items() if protected & device_names(d, snapshot)},
            ),
            (
                "of resources that kubelet gives",
                {
                    *self._held.offered(),
                    *(a for a in pool if self._node.ledger.holds_on(a)),
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


def _is_vf_of(device: PciDevice, wanted: tuple[PfSelector, ...], snapshot: Snapshot) -> bool:
    pf = snapshot.parent(device)
    if pf is None:
        return False
    names = {pf.address, *(netdev.name for netdev in pf.netdevs)}
    return any(selector.takes(names, device.vf_index) for selector in wanted)
