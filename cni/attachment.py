"""ADD, DEL, CHECK and GC on the ledger and the hardware.

ADD writes the *attaching* row before it touches anything; whatever fails afterwards, `leave` brings
the device back from the row. DEL turns the rows into *detaching*, which is the promise, and lets the
move back and the return of leases run on a thread of its own: the pod's namespace stays alive as long
as its descriptor is held here, and after a crash the row is found again. So no runtime waits for a
slow driver, and a device is never handed on before it is verifiably back.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from ipaddress import ip_interface
from typing import Any

from agent.errors import AgentError, AttachmentError, DeviceBusy, IpamFailed, RequestInvalid
from agent.hardware import netns as namespaces
from agent.hardware.host import Host
from agent.ledger import Ledger
from agent.model.allocation import Attachment, AttachmentState, OwedLease, Owner, PodRef, VfSettings
from agent.model.device import Snapshot
from cni import ipam, netconf, result, vf
from cni.netconf import NetConf

BUSY_SECONDS = 5.0
"""How long ADD waits for the device's former owner to let go."""
POLL_SECONDS = 0.05
LOCK_SECONDS = 30.0
REBOOTED = "rebooted"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """One CNI call, checked. `netns` is an open descriptor, or None."""

    container_id: str
    ifname: str
    netns: int | None
    netns_path: str
    pod: PodRef
    cni_args: str
    cni_path: str
    conf: NetConf


@dataclass(frozen=True, slots=True)
class Target:
    """One device that a call is to bring into the pod."""

    device: str
    resource_name: str
    ifname: str
    conf: NetConf


@dataclass(frozen=True, slots=True)
class GrantedDevice:
    """A VF that kubelet granted to a pod, and the network it joins."""

    device: str
    resource_name: str
    network: Mapping[str, Any] | None


class Attachments:
    """What CNI does with devices. Methods block and may run on many threads at once."""

    def __init__(
        self,
        host: Host,
        ledger: Ledger,
        snapshot: Callable[[], Snapshot],
        granted: Callable[[PodRef], Sequence[GrantedDevice]],
        *,
        busy_seconds: float = BUSY_SECONDS,
    ) -> None:
        """`granted` lists the VFs that kubelet gave to a pod; it may raise Unavailable."""
        self._host = host
        self._ledger = ledger
        self._snapshot = snapshot
        self._granted = granted
        self._busy_seconds = busy_seconds
        self._guard = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._leaving: dict[int, threading.Thread] = {}

    def close(self, seconds: float = 1.0) -> None:
        """Wait a bounded time for devices on their way back; the rest is found at the next start."""
        deadline = time.monotonic() + seconds
        with self._guard:
            threads = list(self._leaving.values())
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # --------------------------------------------------------------------- ADD

    def add(self, call: Call) -> Mapping[str, Any]:
        """Attach the call's devices and return the CNI result. The same ADD again answers the same."""
        if call.netns is None:
            raise RequestInvalid("ADD came without a network namespace")
        targets = self._targets(call)
        if not targets:
            if call.conf.prev_result is None:
                raise RequestInvalid(
                    "deviceID is missing: name a VF, let Multus do so, or chain this plugin after the pod's network"
                )
            return call.conf.prev_result
        owner = Owner(call.container_id, call.ifname, call.pod, namespaces.identity(call.netns))
        deadline = time.monotonic() + self._busy_seconds
        while True:
            with self._locked(target.device for target in targets):
                answered = self._answered_before(owner, targets)
                if answered is not None:
                    return answered
                for target in targets:
                    self._refuse_second_interface(owner, target.device)
                obstacle = next((o for target in targets if (o := self._free(target.device)) is not None), None)
                if obstacle is None:
                    return self._attach(call, owner, targets)
            if time.monotonic() > deadline:
                raise DeviceBusy(obstacle)
            time.sleep(POLL_SECONDS)  # without the locks: the former owner's DEL needs them

    def _targets(self, call: Call) -> tuple[Target, ...]:
        conf = call.conf
        if conf.device is not None:
            resource_name = self._ledger.granted_resource(conf.device) or ""
            return (Target(conf.device, resource_name, call.ifname, conf),)
        if conf.prev_result is None or not call.pod.name:
            return ()
        taken = {i.get("name") for i in conf.prev_result.get("interfaces") or []} | {call.ifname}
        names = (name for n in range(1, 1000) if (name := f"net{n}") not in taken)
        targets = []
        for found in self._granted(call.pod):
            # A MAC in the call is meant for the interface of the call, not for each VF that comes along.
            own = replace(conf, settings=replace(conf.settings, mac=None))
            if found.network is not None:
                own = netconf.with_network(own, found.network)
            # There is nothing to move then. But a VLAN that is asked for must not be passed over.
            if not (self._is_for_vfio(found.device) and own.settings.is_empty):
                targets.append(Target(found.device, found.resource_name, next(names), own))
        return tuple(targets)

    def _is_for_vfio(self, device: str) -> bool:
        facts = self._snapshot().by_address.get(device)
        return facts is not None and facts.is_for_vfio

    def _answered_before(self, owner: Owner, targets: tuple[Target, ...]) -> Mapping[str, Any] | None:
        rows = self._ledger.attachments_of(owner.container_id, owner.cni_ifname)
        if not rows:
            return None
        same = {row.device for row in rows} == {target.device for target in targets}
        if same and all(row.state is AttachmentState.ATTACHED and row.owner.netns == owner.netns for row in rows):
            return rows[0].result
        raise DeviceBusy(f"an earlier ADD of {owner.container_id} {owner.cni_ifname} is still being undone")

    def _refuse_second_interface(self, owner: Owner, device: str) -> None:
        """Refuse a device that the same sandbox has under another interface: no waiting can help."""
        row = self._ledger.attachment_on(device)
        if row is not None and row.owner.container_id == owner.container_id != "" and row.owner != owner:
            raise RequestInvalid(
                f"{device} is in this pod already, attached by the call for {row.owner.cni_ifname}: let either"
                " the chained plugin or Multus attach the pod's VFs, not both"
            )

    def _free(self, device: str) -> str | None:
        """Clean up after a former owner that is gone. Tell what is in the way if one is not."""
        row = self._ledger.attachment_on(device)
        if row is None:
            return None
        if row.attachment_id in self._leaving:
            return f"{device} is on its way back from container {row.owner.container_id}"
        if row.state is not AttachmentState.DETACHING and self.owner_alive(row):
            return f"{device} is still held by pod {row.owner.pod} (container {row.owner.container_id})"
        log.info("finishing the clean-up of %s, left by container %s", device, row.owner.container_id)
        self.undo(row)
        return None

    def _attach(self, call: Call, owner: Owner, targets: tuple[Target, ...]) -> Mapping[str, Any]:
        assert call.netns is not None
        rows: list[Attachment] = []
        made: list[tuple[result.Interface, result.Leases]] = []
        try:
            for target in targets:
                conf = target.conf
                planned = vf.plan(self._host, self._snapshot(), target.device, target.ifname, conf.settings, conf.mtu)
                row = self._ledger.begin_attach(
                    owner,
                    ifname=target.ifname,
                    device=target.device,
                    resource_name=target.resource_name,
                    undo=planned.undo,
                    netns_path=call.netns_path,
                    request=_request(call, conf),
                    durable=conf.ipam is not None,
                )
                rows.append(row)
                vf.enter(self._host, planned, call.netns)
                leases = result.Leases()
                if conf.ipam is not None:
                    leases = ipam.add(
                        row.request["network"],
                        _ipam_call(row.request, owner.container_id, target.ifname, call.netns_path),
                    )
                    self._host.links.configure(target.ifname, call.netns, leases.addresses, leases.kernel_routes())
                mac = conf.mac or planned.undo.mac
                mtu = conf.mtu or planned.undo.mtu
                made.append((result.Interface(target.ifname, mac, mtu, call.netns_path, target.device), leases))
            answer = result.build(call.conf.cni_version, call.conf.prev_result, made)
            self._ledger.finish_attach([row.attachment_id for row in rows], answer)
        except BaseException:
            for row in reversed(rows):
                self._undo_failed_add(row, call.netns)
            raise
        return answer

    def _undo_failed_add(self, row: Attachment, netns: int) -> None:
        # The row is not marked first: it may be a full disk that brought us here, and an *attaching*
        # row that no ADD works on says as much.
        try:
            self.undo(row, netns)
        except AgentError as error:
            log.error("%s stays in the books as half attached: %s", row.device, error)

    # ------------------------------------------------------------- DEL and undo

    def delete(self, call: Call) -> None:
        """Promise to detach what this container and interface own. Nothing owned is success."""
        rows = self._ledger.attachments_of(call.container_id, call.ifname)
        if not rows:
            return
        self._ledger.begin_detach([row.attachment_id for row in rows])
        for row in rows:
            self.start_detach(row, call.netns)

    def start_detach(self, row: Attachment, netns: int | None) -> None:
        """Bring a *detaching* row's device back on a thread of its own."""
        held = os.dup(netns) if netns is not None else None

        def leave() -> None:
            try:
                with self._locked([row.device]):
                    current = self._ledger.attachment_on(row.device)
                    if current is not None and current.attachment_id == row.attachment_id:
                        self.undo(row, held)
            except AgentError as error:
                log.error("%s is not back yet: %s", row.device, error)
            finally:
                if held is not None:
                    os.close(held)
                with self._guard:
                    del self._leaving[row.attachment_id]

        thread = threading.Thread(target=leave, name="detach", daemon=True)
        with self._guard:
            if row.attachment_id in self._leaving:
                if held is not None:
                    os.close(held)
                return  # a repeated DEL
            self._leaving[row.attachment_id] = thread
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: the promise is kept by `heal`
            log.error("%s is not back yet: %s", row.device, error)
            with self._guard:
                del self._leaving[row.attachment_id]
            if held is not None:
                os.close(held)

    def undo(self, row: Attachment, netns: int | None = None, *, leases_later: bool = False) -> None:
        """Bring the device back, return its leases, drop the row. Repeatable after any crash.

        Without a descriptor the namespace is looked for at its path. The caller holds the device's
        lock. `leases_later` leaves the leases to `settle_leases`. Raises AgentError if the device is
        not verifiably back; the row then stays, and the device is in quarantine.
        """
        if row.boot_id == self._ledger.boot_id:
            try:
                with _open_netns(row, netns) as opened:
                    vf.leave(self._host, self._snapshot(), row, opened)
            except AgentError as error:
                self._ledger.quarantine(row.device, f"clean-up failed: {error}")
                raise
        owed = row.request["network"] is not None and (leases_later or not self._return_lease(row))
        self._ledger.finish_detach(row, lease_owed=owed)

    def _return_lease(self, row: Attachment | OwedLease) -> bool:
        """Give addresses back, if there are any. False if the plugin failed: then they are still owed."""
        network = row.request["network"]
        if network is None:
            return True
        container_id = row.owner.container_id if isinstance(row, Attachment) else row.container_id
        try:
            ipam.delete(network, _ipam_call(row.request, container_id, row.ifname, row.netns_path))
        except IpamFailed as error:
            log.error("the addresses of %s in container %s are still leased: %s", row.ifname, container_id, error)
            return False
        return True

    def settle_leases(self) -> int:
        """Try again to give back addresses that are owed. Returns how many were given back."""
        settled = 0
        live = {(row.owner.container_id, row.ifname) for row in self._ledger.attachments()}
        for lease in self._ledger.owed_leases():
            # A repeated ADD of the same container has taken the lease over: then its DEL returns it.
            if (lease.container_id, lease.ifname) in live or self._return_lease(lease):
                self._ledger.settle_lease(lease.lease_id)
                settled += 1
        return settled

    def heal(self, device: str) -> str | None:
        """Finish what a crash, a lost DEL or a reboot left of an attachment.

        Returns one word that says what was wrong, or None if all is well or somebody is at it.
        Raises AgentError if the device is still not back.
        """
        try:
            with self._locked([device], seconds=0.2):
                row = self._ledger.attachment_on(device)
                if row is None or row.attachment_id in self._leaving:
                    return None
                reason = self._ailment(row)
                if reason is None:
                    return None
                log.warning("healing %s of container %s: %s", device, row.owner.container_id, reason)
                self._ledger.begin_detach([row.attachment_id])
                # After a reboot there may be many, the start waits for all, and plugins may hang. At other
                # times the relay may ask again for the same container, which must not meet its old lease.
                self.undo(row, leases_later=reason == REBOOTED)
                return reason
        except DeviceBusy:
            return None

    def _ailment(self, row: Attachment) -> str | None:
        """Name what is wrong with a row. The caller holds the device's lock, so no ADD is under way."""
        if row.boot_id != self._ledger.boot_id:
            return REBOOTED
        if row.state is not AttachmentState.ATTACHED:
            return f"half-{row.state.value}"
        return None if self.owner_alive(row) else "owner-gone"

    def owner_alive(self, row: Attachment) -> bool:
        """Tell whether an attachment's pod may still use the device.

        The namespace at its path decides. Where that path cannot be seen, a device that is not back
        in the host still sits in a namespace that lives, and is left alone.
        """
        if row.boot_id != self._ledger.boot_id:
            return False
        if namespaces.is_at(row.owner.netns, row.netns_path):
            return True
        return vf.exists(self._host, row.device) and self._host.find_netdev(row.device) is None

    # ------------------------------------------------------------ CHECK and GC

    def check(self, call: Call) -> None:
        """Compare what was set up with what is. Raises AttachmentError that lists the differences."""
        if call.netns is None:
            raise RequestInvalid("CHECK came without a network namespace")
        rows = self._ledger.attachments_of(call.container_id, call.ifname)
        if not rows:
            if call.conf.device is not None:
                raise AttachmentError(f"{call.conf.device} is not attached for container {call.container_id}")
            return
        found: list[str] = []
        for row in rows:
            if row.state is not AttachmentState.ATTACHED:
                found.append(f"{row.device} is {row.state.value}")
                continue
            settings = VfSettings(**row.request["settings"])
            found += vf.differences(self._host, row, call.netns, settings, row.request["mtu"])
            missing = _leased(row) - set(self._host.links.addresses(row.ifname, call.netns))
            found += [f"{row.ifname} lacks address {address}" for address in sorted(missing)]
        if found:
            raise AttachmentError("; ".join(found))

    def collect(self, call: Call) -> None:
        """GC: detach what this network holds for containers that the runtime no longer lists."""
        valid = call.conf.valid_attachments
        if valid is None:
            raise RequestInvalid("GC came without cni.dev/valid-attachments")
        dead = [
            row
            for row in self._ledger.attachments()
            if row.request["name"] == call.conf.name and (row.owner.container_id, row.owner.cni_ifname) not in valid
        ]
        self._ledger.begin_detach([row.attachment_id for row in dead])
        for row in dead:
            log.info("garbage: %s of container %s", row.device, row.owner.container_id)
            self.start_detach(row, None)

    # ---------------------------------------------------------------- plumbing

    @contextmanager
    def _locked(self, devices: Iterable[str], seconds: float = LOCK_SECONDS) -> Iterator[None]:
        """Hold the locks of some devices, taken in one order so that two calls cannot block each other."""
        with ExitStack() as stack:
            for device in sorted(set(devices)):
                with self._guard:
                    lock = self._locks.setdefault(device, threading.Lock())
                if not lock.acquire(timeout=seconds):
                    raise DeviceBusy(f"another call has been working on {device} for {seconds:g} s")
                stack.callback(lock.release)
            yield


@contextmanager
def _open_netns(row: Attachment, netns: int | None) -> Iterator[int | None]:
    """Yield a descriptor of the row's namespace: the one given, or the one at its path if it is still it."""
    if netns is not None or not namespaces.is_at(row.owner.netns, row.netns_path):
        yield netns
        return
    try:
        opened = os.open(row.netns_path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # just now
        yield None
        return
    try:
        yield opened if namespaces.identity(opened) == row.owner.netns else None
    finally:
        os.close(opened)


def _request(call: Call, conf: NetConf) -> dict[str, Any]:
    """What the row must hold for CHECK, GC and the return of leases."""
    network = None
    if conf.ipam is not None:
        # Leases look the same in 1.0.0 and 1.1.0, and many installed plugins know only the former.
        version = min(conf.cni_version, "1.0.0")
        network = {"cniVersion": version, "name": conf.name, "type": "nodefabric", "ipam": dict(conf.ipam)}
        network |= conf.for_ipam
    return {
        "name": call.conf.name,
        "settings": conf.settings.document(),
        "mtu": conf.mtu,
        "network": network,
        "cni_args": call.cni_args,
        "cni_path": call.cni_path,
    }


def _ipam_call(request: Mapping[str, Any], container_id: str, ifname: str, netns_path: str) -> ipam.IpamCall:
    return ipam.IpamCall(container_id, ifname, netns_path, request["cni_args"], request["cni_path"])


def _leased(row: Attachment) -> set[str]:
    """The addresses that the answer gave to this interface, in the kernel's spelling."""
    answer = row.result or {}
    index = next((i for i, found in enumerate(answer.get("interfaces", [])) if found.get("name") == row.ifname), None)
    return {str(ip_interface(ip["address"])) for ip in answer.get("ips", []) if ip.get("interface") == index}
