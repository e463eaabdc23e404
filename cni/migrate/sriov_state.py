"""What the replaced plugins wrote down of the devices that they put into pods.

    sriov     <state>/sriov/<container>-<interface>     netconf, PF, VF index, what the VF was like
              <state>/sriov/pci/<PCI address>           path of the pod's namespace
              <state>/sriov/pci/vf_lock/<PCI>.lock      flock of whoever works on the VF
    ib-sriov  <state>/ib-sriov/<container>-<interface>  netconf, names and GUID in the host
              <run>/ib-sriov/cni.lock                   one flock for all: a rebind renumbers RDMA devices
    rdma      <state>/rdma/<network>-<container>-<interface>   names of the RDMA device in the host and the pod

    libcni    <state>/results/<network>-<container>-<interface>, Multus the same below <state>/multus ("cniCacheV1"):
              the configuration as it was sent, and the result

<state> is /var/lib/cni, <run> is /var/run/cni. All is read as Go wrote it, within bounds, never trusted, and nothing
changed. The plugins themselves kept no more of the IPAM section than its type, which is too little to give an address
back with: that is why libcni's files are read.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent.config.networks import MAX_MTU, is_host_ifname
from agent.errors import RequestInvalid
from agent.model.allocation import PodRef, VfSettings
from agent.model.fields import MAX_BYTES, Fields, decode, unicast_mac
from cni import netconf
from cni.netconf import NetConf
from cni.result import check_result, in_version

STATE = Path("/var/lib/cni")
RUN = Path("/var/run/cni")
KINDS = ("sriov", "ib-sriov")
CACHE_FOLDERS = ("results", "multus/results")
CACHE_KIND = "cniCacheV1"
_HEX_CONTAINER = re.compile(r"([0-9a-f]{64})-(.+)")
_IFNAME = re.compile(r"(?!\.{1,2}$)[!-.0-9;-~]{1,15}")
_LINK_STATES = {0: "auto", 1: "enable", 2: "disable"}
"""IFLA_VF_LINK_STATE_* (include/uapi/linux/if_link.h)."""
_VLAN_PROTOCOLS = {0x8100: "802.1q", 0x88A8: "802.1ad"}
_HIGHEST = 2**32 - 1
_NO_MAC = "00:00:00:00:00:00"
_NO_POD = PodRef("", "")

log = logging.getLogger(__name__)


class Unreadable(Exception):
    """A file of another program is not understood."""


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


def files_in(folder: Path) -> list[Path]:
    """List what a folder holds besides folders. An absent one holds nothing. Raises Unreadable."""
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if not entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Unreadable(f"{folder} cannot be read: {error.strerror}") from error


def text_of(file: Path) -> bytes | None:
    """Read a regular file; None if there is none. Raises Unreadable."""
    try:
        # Neither to follow a link nor to hang on a pipe: it is not our folder.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unreadable(f"{file} cannot be read: {error.strerror}") from error
    with open(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Unreadable(f"{file} is no regular file")
        try:
            text = opened.read(MAX_BYTES + 1)
        except OSError as error:
            raise Unreadable(f"{file} cannot be read: {error.strerror}") from error
    if len(text) > MAX_BYTES:
        raise Unreadable(f"{file} has more than {MAX_BYTES} bytes")
    return text


def fields_of(file: Path) -> Fields | None:
    """Read a JSON object that a Go program wrote; None if there is none. Raises Unreadable."""
    text = text_of(file)
    if text is None:
        return None
    try:
        return Fields(decode(text, "the file"), what="the file", fold=True)
    except RequestInvalid as error:
        raise Unreadable(f"{file}: {error}") from error


def text_in(fields: Fields, key: str) -> str:
    """Read any text; one that is not there is empty. Raises RequestInvalid."""
    return fields.text(key, "", _is_any, "a text")


def _is_any(_: object) -> bool:
    return True


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
    call = cached_call(state, record.kind, network, container_id, ifname)
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


@dataclass(frozen=True, slots=True)
class CachedCall:
    """One ADD as it was made."""

    conf: NetConf | None
    """As the plugin got it; None if that cannot be told."""
    result: Mapping[str, Any] | None
    """Of the whole network, translated to the newest version."""
    netns_path: str
    cni_args: str
    pod: PodRef


def cached_call(state: Path, kind: str, network: str, container_id: str, ifname: str) -> CachedCall | None:
    """Look a call to a plugin of a type up. None if it is not there, or not to be understood."""
    for folder in CACHE_FOLDERS:
        file = state / folder / f"{network}-{container_id}-{ifname}"
        try:
            fields = fields_of(file)
            if fields is not None:
                return _cached(fields, kind, network)
        except (Unreadable, RequestInvalid) as error:
            log.warning("%s is of no use: %s", file, error)
    return None


def cache_without(content: bytes, take_out: Callable[[bytes], bytes | None]) -> bytes | None:
    """Take something out of the configuration in a file's content; None where there is nothing to take out.

    `take_out` does it to the configuration, and returns None or raises ValueError where there is nothing.
    """
    try:
        document = json.loads(content)
        if document["kind"] != CACHE_KIND:
            return None
        changed = take_out(base64.b64decode(document["config"], validate=True))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if changed is None:
        return None
    return json.dumps({**document, "config": base64.b64encode(changed).decode()}).encode()


def _cached(fields: Fields, kind: str, network: str) -> CachedCall:
    if text_in(fields, "kind") != CACHE_KIND:
        raise RequestInvalid(f"kind must be {CACHE_KIND}")
    pairs = fields.take("cniArgs", _are_pairs, "a list of pairs of texts") or []
    args = dict(pairs)
    result = fields.mapping("result")
    if result is not None:
        check_result(result, "result")
        result = in_version(result, netconf.SUPPORTED_VERSIONS[-1])
    return CachedCall(
        conf=_cached_conf(fields, kind, network, args),
        result=result,
        netns_path=fields.text("netns", "", _is_path, "a path"),
        cni_args=";".join(f"{name}={value}" for name, value in pairs),
        pod=PodRef(args.get("K8S_POD_NAMESPACE", ""), args.get("K8S_POD_NAME", ""), args.get("K8S_POD_UID", "")),
    )


def _is_path(text: str) -> bool:
    return text.startswith("/")


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _are_pairs(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in value
    )


def _cached_conf(fields: Fields, kind: str, network: str, args: Mapping[str, str]) -> NetConf | None:
    encoded = text_in(fields, "config")
    try:
        document = decode(base64.b64decode(encoded, validate=True), "config")
    except binascii.Error as error:
        raise RequestInvalid(f"config is not base64: {error}") from error
    outer = Fields(document, "config", fold=True)
    plugins = outer.take("plugins", _is_list, "a list")
    found = document if plugins is None else next((p for p in plugins if _is_of(p, kind)), None)
    if found is None:
        return None
    version = text_in(outer, "cniVersion")
    return netconf.from_document({"cniVersion": _known(version), **found, "name": network}, args)


def _is_of(plugin: Any, kind: str) -> bool:
    return isinstance(plugin, dict) and plugin.get("type") == kind


def _known(version: str) -> str | None:
    return version if version in netconf.SUPPORTED_VERSIONS else None
