"""What the replaced plugins wrote down of the devices that they put into pods.

    sriov     <state>/sriov/<container>-<interface>     netconf, PF, VF index, what the VF was like
              <state>/sriov/pci/<PCI address>           path of the pod's namespace
              <state>/sriov/pci/vf_lock/<PCI>.lock      flock of whoever works on the VF
    ib-sriov  <state>/ib-sriov/<container>-<interface>  netconf, names and GUID in the host
              <run>/ib-sriov/cni.lock                   one flock for all: a rebind renumbers RDMA devices
    rdma      <state>/rdma/<network>-<container>-<interface>   names of the RDMA device in the host and the pod

<state> is /var/lib/cni, <run> is /var/run/cni. All is read as Go wrote it, and nothing changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent.config.networks import MAX_MTU, is_host_ifname
from agent.errors import RequestInvalid
from agent.model.allocation import PodRef, VfSettings
from agent.model.fields import Fields, unicast_mac
from cni import netconf
from cni.migrate import libcni_cache
from cni.migrate.files import Unreadable, fields_of, text_in, text_of
from cni.netconf import NetConf

STATE = Path("/var/lib/cni")
RUN = Path("/var/run/cni")
KINDS = ("sriov", "ib-sriov")
_HEX_CONTAINER = re.compile(r"([0-9a-f]{64})-(.+)")
_IFNAME = re.compile(r"(?!\.{1,2}$)[!-.0-9;-~]{1,15}")
_LINK_STATES = {0: "auto", 1: "enable", 2: "disable"}
"""IFLA_VF_LINK_STATE_* (include/uapi/linux/if_link.h)."""
_VLAN_PROTOCOLS = {0x8100: "802.1q", 0x88A8: "802.1ad"}
_HIGHEST = 2**32 - 1
_NO_MAC = "00:00:00:00:00:00"
_NO_POD = PodRef("", "")


@dataclass(frozen=True, slots=True)
class Record:
    """One device in one pod, as a replaced plugin remembers it."""

    kind: str
    container_id: str
    ifname: str
    device: str
    conf: NetConf
    files: tuple[Path, ...]
    """What says so, to be removed when the device is back."""
    netns_path: str = ""
    """Empty where nobody wrote it down."""
    netdev: str = ""
    """Name in the host; empty for a device without an interface."""
    mac: str | None = None
    mtu: int | None = None
    guid: str | None = None
    pf_netdev: str | None = None
    vf_index: int | None = None
    before: VfSettings = field(default_factory=VfSettings)
    """What the PF enforced before, as far as it was changed."""
    for_programs: bool = False
    rdma: tuple[str, str] | None = None
    """Names of the RDMA device that moved along: in the host, and in the pod."""
    result: Mapping[str, Any] | None = None
    cni_args: str = ""
    pod: PodRef = _NO_POD

    def __str__(self) -> str:
        return f"{self.device} of container {self.container_id} ({self.ifname}, by {self.kind})"


def device_in(file: Path) -> str:
    """Read which device a file is about, and no more: to read on, hold its lock. Raises Unreadable."""
    fields = fields_of(file)
    if fields is None:
        raise Unreadable(f"{file} has gone")
    try:
        device = fields.address("deviceID")
    except RequestInvalid as error:
        raise Unreadable(f"{file}: {error}") from error
    if device is None:
        raise Unreadable(f"{file}: deviceID is missing")
    return device


def lock_of(state: Path, run: Path, kind: str, device: str) -> Path:
    """Name the file that a plugin locks while it works on a device."""
    return run / "ib-sriov/cni.lock" if kind == "ib-sriov" else state / "sriov/pci/vf_lock" / f"{device}.lock"


def read(state: Path, kind: str, file: Path) -> Record:
    """Read what a plugin wrote of one attachment, and what others wrote of the same. Raises Unreadable."""
    device = device_in(file)
    fields = fields_of(file)
    if fields is None:  # since it was looked into: its own DEL may not hold our lock
        raise Unreadable(f"{file} has gone")
    try:
        conf = _conf(fields.document, kind)
        container_id, ifname = _owner(file.name)
        record = Record(kind, container_id, ifname, device, conf, (file,), **_before(kind, fields, conf))
        return _with_others(state, record, fields)
    except RequestInvalid as error:
        raise Unreadable(f"{file}: {error}") from error


def _conf(document: Mapping[str, Any], kind: str) -> NetConf:
    """Read the configuration within what was kept. Keys that only told the plugin itself something are passed over."""
    version = document.get("cniversion")
    left_out = ("prevresult", "type", "cniversion", "ibkubernetesenabled")
    own = {key: value for key, value in document.items() if key not in left_out}
    known = {"cniVersion": version if version in netconf.SUPPORTED_VERSIONS else None, "type": kind}
    return netconf.from_document(own | known)


def _owner(name: str) -> tuple[str, str]:
    """Split a file's name into container and interface, either of which may hold a dash."""
    ways = [(name[:at], name[at + 1 :]) for at, letter in enumerate(name) if letter == "-"]
    fitting = [way for way in reversed(ways) if way[0] and _IFNAME.fullmatch(way[1])]
    if not fitting:
        raise RequestInvalid("the name is not CONTAINER-INTERFACE")
    runtimes = _HEX_CONTAINER.fullmatch(name)
    return next((way for way in fitting if runtimes and way[0] == runtimes[1]), fitting[0])


def _interface_name(fields: Fields, key: str) -> str | None:
    return fields.text(key, "", is_host_ifname, "an interface name of at most 15 characters") or None


def _before(kind: str, fields: Fields, conf: NetConf) -> dict[str, Any]:
    """Read how the device was in the host."""
    found: dict[str, Any] = {
        "pf_netdev": _interface_name(fields, "master"),
        "vf_index": fields.whole("vfid", 0, 65535),
    }
    if kind == "ib-sriov":
        link_state = conf.settings.link_state
        return found | {
            # Of several names, as representors make them, the first is the interface's.
            "netdev": (text_in(fields, "hostIFNames").split() or [""])[0],
            "guid": _guid(fields),
            "for_programs": bool(fields.flag("vfioPciMode")),
            "rdma": _rdma_names(fields.inside("rdmaNetState")),
            "before": VfSettings(link_state="auto" if link_state is not None else None),
        }
    was = fields.inside("origVfState")
    return found | {
        "netdev": _interface_name(was, "hostIFName") or "",
        "mac": _hardware_address(was, "effectiveMAC"),
        "mtu": was.whole("mtu", 0, MAX_MTU) or None,
        "for_programs": bool(fields.flag("dpdkMode")),
        "before": _settings_before(was, conf.settings),
    }


def _settings_before(was: Fields, asked: VfSettings) -> VfSettings:
    """Read what the PF enforced, of the settings that were asked to be otherwise."""
    spoofchk, trust = was.flag("spoofChk"), was.flag("trust")
    state = was.whole("linkState", 0, _HIGHEST)
    protocol = was.whole("vlanProto", 0, 0xFFFF)
    settings = VfSettings()
    if asked.mac is not None:
        settings = replace(settings, mac=_hardware_address(was, "adminMAC"))
    if asked.vlan is not None:
        settings = replace(
            settings,
            vlan=was.whole("vlan", 0, 4095) or 0,
            vlan_qos=was.whole("vlanQoS", 0, 7) or 0,
            vlan_proto=_VLAN_PROTOCOLS.get(protocol or 0, "802.1q"),
        )
    if asked.min_tx_rate is not None or asked.max_tx_rate is not None:
        low, high = was.whole("minTxRate", 0, _HIGHEST) or 0, was.whole("maxTxRate", 0, _HIGHEST) or 0
        settings = replace(settings, min_tx_rate=low, max_tx_rate=high)
    return replace(
        settings,
        spoofchk=spoofchk if asked.spoofchk is not None else None,
        trust=trust if asked.trust is not None else None,
        link_state=_LINK_STATES.get(state or 0) if asked.link_state is not None else None,
    )


def _with_others(state: Path, record: Record, fields: Fields) -> Record:
    """Add what is written elsewhere: the namespace's path, the RDMA device, the call and its result."""
    network, container_id, ifname = record.conf.name, record.container_id, record.ifname
    files, netns_path, rdma = list(record.files), "", record.rdma
    if record.kind == "sriov":
        file = state / "sriov/pci" / record.device
        written = text_of(file)
        if written is not None:
            files.append(file)
            netns_path = _path_in(written)
    file = state / "rdma" / f"{network}-{container_id}-{ifname}"
    moved = fields_of(file)
    if moved is not None:
        files.append(file)
        rdma = _rdma_names(moved) or rdma
    call = libcni_cache.find(state, record.kind, network, container_id, ifname)
    record = replace(record, files=tuple(files), netns_path=netns_path, rdma=rdma)
    if call is None:
        return record
    conf = record.conf
    if call.conf is not None and call.conf.ipam is not None:
        conf = replace(conf, ipam=call.conf.ipam, for_ipam=call.conf.for_ipam, cni_version=call.conf.cni_version)
    return replace(
        record,
        conf=conf,
        netns_path=netns_path or call.netns_path,
        result=call.result,
        cni_args=call.cni_args,
        pod=call.pod,
    )


def _path_in(text: bytes) -> str:
    path = text.decode(errors="replace").strip()
    return path if path.startswith("/") and path.isprintable() else ""


def _rdma_names(fields: Fields) -> tuple[str, str] | None:
    names = [fields.text(f"{where}RdmaDevName", "", _is_word, "a name") for where in ("sandbox", "container")]
    return (names[0], names[1] or names[0]) if names[0] else None


def _guid(fields: Fields) -> str | None:
    """Read the GUID before. All zeros is given back as all ones, which drivers take for "none"."""
    text = fields.text("hostIFGUID", "", _is_guid, "a GUID").lower()
    return text.replace("00:00:00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff:ff:ff") or None


def _hardware_address(fields: Fields, key: str) -> str | None:
    """Read a MAC address, of which all zeros is one too: the PF enforced none."""
    text = fields.text(key, "", _is_mac, "a MAC address")
    return text.lower() or None


def _is_guid(text: str) -> bool:
    return bool(re.fullmatch(r"[0-9a-fA-F:]{23}", text))


def _is_mac(text: str) -> bool:
    return text == _NO_MAC or unicast_mac(text) is not None


def _is_word(text: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", text))
