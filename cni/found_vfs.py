"""VFs without a row: in pods' namespaces after the books were lost, or back in the host under a pod's name.

Both get a row before anything is done to them, so what follows is what follows any row: the one in a
pod stays until that pod's namespace ends and no other pod gets it; the other is put back at once. What undoes them is
worked out from what can be seen now, since nobody remembers how they were found.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from io import FileIO
from pathlib import Path
from types import MappingProxyType

from agent.errors import AgentError, DeviceBusy, HardwareError
from agent.hardware import netns as namespaces
from agent.hardware.host import Link
from agent.hardware.sysfs.netdev import udev_properties
from agent.model.allocation import Attachment, AttachmentState, NetnsId, Owner, PodRef, Undo, VfSettings
from agent.model.device import PciDevice
from agent.model.vf_identity import KnownDevice, is_left_over, is_strange, usual_name
from cni import netconf
from cni.call import Call, Node, request_of
from cni.modes.moving import EVERYBODY
from cni.pod_devices import HeldDevices

UNKNOWN = "?"
"""Stands for a container, an interface of a call and a network that nobody remembers: no request can name it."""
NOBODY = PodRef("", "")
CLEAN = VfSettings(
    vlan=0,
    vlan_qos=0,
    vlan_proto="802.1q",
    min_tx_rate=0,
    max_tx_rate=0,
    trust=False,
    link_state="auto",
    trunk="",
)
"""What a VF has that no pod ever had, whatever the driver. Spoof checking is on or off by driver."""

_OF_UDEV = re.compile(r"(en|ib)[opsxv][0-9a-f]")
CNI_PATH = "/opt/cni/bin:/usr/lib/cni"
"""Where IPAM plugins are, until a call tells."""
NO_MAC = "00:00:00:00:00:00"
NETNS_FOLDERS = (Path("/var/run/netns"), Path("/run/netns"), Path("/var/run/docker/netns"))
"""Where runtimes bind the namespaces of their pods."""

log = logging.getLogger(__name__)


class Finder:
    """Gives rows to VFs that have lost theirs. Methods block."""

    def __init__(
        self,
        node: Node,
        held: HeldDevices,
        *,
        netns_folders: Sequence[Path] = NETNS_FOLDERS,
        processes: Path = Path("/proc"),
    ) -> None:
        """`netns_folders` are where runtimes bind their pods' namespaces; `processes` is /proc."""
        self._node = node
        self._held = held
        self._netns_folders = tuple(netns_folders)
        self._processes = processes

    def in_namespaces(
        self,
        devices: Iterable[str],
        pods: Mapping[str, PodRef],
        containers: Mapping[tuple[str, str], str],
        resources: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[str, ...]:
        """Look for lost VFs in all namespaces, and give a row to each that is found. Returns those.

        `pods` tells which pod kubelet gave a device to, `containers` what the runtime calls the sandbox of
        a pod (namespace and name), `resources` for which resource a device was given if the books do not know.
        """
        lost = set(devices)
        found = []
        for netns, path in namespaces.living(self._netns_folders, self._processes).items():
            for device in sorted(self._among(netns, path, lost)):
                pod = pods.get(device, NOBODY)
                container_id = containers.get((pod.namespace, pod.name), UNKNOWN)
                owner = Owner(container_id, UNKNOWN, pod, netns)
                if self._take_over(device, owner, path, resources.get(device, "")):
                    found.append(device)
        return tuple(found)

    def under_a_strange_name(self, device: str, known: KnownDevice | None) -> bool:
        """Give a row to a VF that came back under a pod's name, so that it is put back. False if it is not so.

        Who comes back is down (net/core/dev.c, __dev_change_net_namespace). One that is up has a use in the host,
        and its name is somebody's choice.
        """
        with self._node.locks.hold([device], seconds=0.2):
            facts = self._node.scans.value.by_address.get(device)
            link = self._node.host.find_netdev(device)
            if facts is None or link is None or link.up or self._node.ledger.attachment_on(device) is not None:
                return False
            usual = usual_name(facts, self._node.scans.value, self._name_in(known), self.udev(link.ifindex))
            if not is_strange(link.name, usual):
                return False
            log.warning(
                "%s is in the host as %s, left by nobody known; it should be %s (%s)",
                device,
                link.name,
                usual.name,
                usual.witness.value,
            )
            undo = self._undo(facts, link, usual.name, known)
            owner = Owner(UNKNOWN, UNKNOWN, NOBODY, NetnsId(0, 0))
            self._write(device, owner, link.name, undo, "", AttachmentState.DETACHING)
            return True

    def udev(self, ifindex: int) -> Mapping[str, str]:
        """Read what udev's database says of an interface in the host; nothing where there is none."""
        return udev_properties(self._node.host.root, ifindex)

    def _name_in(self, known: KnownDevice | None) -> str | None:
        """Return what a device was called in this boot; what it was in an earlier one says nothing."""
        return known.netdev if known is not None and known.boot_id == self._node.ledger.boot_id else None

    def _among(self, netns: NetnsId, path: Path, lost: set[str]) -> set[str]:
        try:
            with FileIO(path) as descriptor:
                if namespaces.identity(descriptor.fileno()) != netns:
                    return set()
                found = self._node.host.links.listed(descriptor.fileno(), lambda link: link.device in lost)
                return {link.device for link in found if link.device is not None}
        except FileNotFoundError:  # its last process has ended since it was listed
            return set()
        except (AgentError, OSError) as error:
            log.warning("the namespace at %s cannot be searched: %s", path, error)
            return set()

    def _take_over(self, device: str, owner: Owner, path: Path, resource_name: str) -> bool:
        try:
            with self._node.locks.hold([device], seconds=0.2), FileIO(path) as descriptor:
                facts = self._node.scans.value.by_address.get(device)
                # Now that nobody else is at it: an ADD may have begun, or a DEL ended, since it was searched.
                if facts is None or self._node.ledger.attachment_on(device) or self._node.host.find_netdev(device):
                    return False
                link = self._node.host.links.find_device(device, descriptor.fileno())
                if link is None or namespaces.identity(descriptor.fileno()) != owner.netns:
                    return False
                known = next((k for k in self._node.ledger.known_devices() if k.device == device), None)
                name = usual_name(facts, self._node.scans.value, self._name_in(known)).name
                undo = self._undo(facts, link, name, known)
                owner = replace(owner, cni_ifname=link.name)  # as Multus calls; a chained call says eth0
                self._write(device, owner, link.name, undo, str(path), AttachmentState.ATTACHED, resource_name)
        except (DeviceBusy, HardwareError, OSError) as error:
            log.info("%s is not taken over now: %s", device, error)
            return False
        log.warning("%s is in a pod (%s, %s) and in no books; it has a row again", device, owner.pod, path)
        return True

    def _write(
        self,
        device: str,
        owner: Owner,
        ifname: str,
        undo: Undo,
        netns_path: str,
        state: AttachmentState,
        resource_name: str = "",
    ) -> None:
        resource_name = resource_name or self._node.ledger.resource_held(device) or ""
        network = self._held.network_of(resource_name, device) if owner.container_id != UNKNOWN else None
        conf = netconf.from_document({})
        if network is not None:
            conf = netconf.with_network(conf, network)
        call = Call(owner.container_id, ifname, None, netns_path, owner.pod, "", CNI_PATH, conf)
        claim = self._node.ledger.claim_on(device)
        # Whatever it was set up with, all of it is in the undo record. Its addresses can be given back.
        request = {**request_of(call, conf), "name": UNKNOWN, "settings": VfSettings().document(), "mtu": None}
        self._node.ledger.adopt(
            Attachment(
                0,
                owner,
                ifname,
                device,
                resource_name,
                state,
                undo,
                self._node.ledger.boot_id,
                netns_path,
                request,
                claim_uid=claim.ref.uid if claim is not None and claim.is_for(owner.pod) else "",
            )
        )

    def _undo(self, facts: PciDevice, link: Link, name: str, known: KnownDevice | None) -> Undo:
        """Work out how a VF was before its pod had it."""
        same_boot = known if known is not None and known.boot_id == self._node.ledger.boot_id else None
        pf = self._node.scans.value.pf_netdev(facts)
        settings = VfSettings()
        if pf is not None and facts.vf_index is not None:
            settings = self._settings(facts, pf.name, facts.vf_index, same_boot.mac if same_boot else None)
        touched = pf is not None and not settings.is_empty
        usual = {neighbour.netdev.mtu for neighbour in self._neighbours(facts) if neighbour.netdev is not None}
        return Undo(
            netdev=name,
            mac=same_boot.mac if same_boot else link.mac,
            mtu=same_boot.mtu if same_boot else usual.pop() if len(usual) == 1 else link.mtu,
            up=False,
            pf_netdev=pf.name if pf is not None and touched else None,
            vf_index=facts.vf_index if touched else None,
            settings=settings,
            # Names that udev gives; any other the pod may have been given, and in the host it may be another's.
            altnames=tuple(name for name in link.altnames if _OF_UDEV.match(name)),
            promisc=False,
            allmulti=False,
            arp=True,
            multicast=True,
            broadcast=EVERYBODY if len(link.broadcast) == len(EVERYBODY) else None,
            link_mode=0,
            xdp=0,
        )

    def _settings(self, facts: PciDevice, pf_netdev: str, vf_index: int, own_mac: str | None) -> VfSettings:
        """List what the PF enforces and should not: what differs from a VF of its that no pod has."""
        try:
            now = self._node.host.vf_control.read(pf_netdev, vf_index)
            untouched = (vf.vf_index for vf in self._neighbours(facts) if vf.vf_index is not None)
            pattern = next((self._node.host.vf_control.read(pf_netdev, index) for index in untouched), CLEAN)
        except HardwareError as error:
            log.warning("what %s enforces on %s stays: %s", pf_netdev, facts.address, error)
            return VfSettings()
        differing = {}
        for field in fields(CLEAN):
            wanted, found = getattr(pattern, field.name), getattr(now, field.name)
            if field.name == "mac":
                # Where its neighbours have none from their PF it had none; otherwise it had one of its own.
                wanted = NO_MAC if wanted == NO_MAC else own_mac
            elif getattr(CLEAN, field.name) is None and field.name != "spoofchk":
                continue  # GUIDs are each VF's own
            if wanted is not None and found is not None and wanted != found:
                differing[field.name] = wanted
        if differing.keys() & {"vlan", "vlan_qos", "vlan_proto"}:
            differing |= {k: getattr(pattern, k) for k in ("vlan", "vlan_qos", "vlan_proto")}
        return VfSettings(**differing)

    def _neighbours(self, facts: PciDevice) -> tuple[PciDevice, ...]:
        """List the same PF's VFs that are in the host, without a row, and not just back from a pod."""
        snapshot = self._node.scans.value
        pf = snapshot.parent(facts)
        held = {row.device for row in self._node.ledger.attachments()} | {facts.address}
        siblings = (snapshot.by_address.get(address) for address in (pf.vfs if pf is not None else ()))
        return tuple(
            s
            for s in siblings
            if s is not None and s.address not in held and s.netdev is not None and not is_left_over(s.netdev.name)
        )
