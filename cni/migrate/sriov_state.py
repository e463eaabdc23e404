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
import functools
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import TypeAdapter

from agent.config.networks import INTERFACE, MAX_MTU, OBJECT
from agent.config.section import FLAG, JsonSection, checked, fold, string, that, whole
from agent.errors import RequestInvalid
from agent.model.allocation import PodRef, VfSettings
from agent.model.device import is_pci_address
from agent.model.fields import MAX_BYTES, decode, unicast_mac
from cni import netconf
from cni.modes import pf
from cni.netconf import NetConf
from cni.result import check_result, in_version

KINDS = ("sriov", "ib-sriov")
CACHE_FOLDERS = ("results", "multus/results")
CACHE_KIND = "cniCacheV1"
_OWNER = re.compile(r"([0-9a-f]{64}|.+)-((?!\.{1,2}$)[!-.0-9;-~]{1,15})")
"""A container as runtimes name it, else up to the last dash after which there is a name for an interface."""
_LINK_STATES = {0: "auto", 1: "enable", 2: "disable"}
"""IFLA_VF_LINK_STATE_* (include/uapi/linux/if_link.h)."""
_VLAN_PROTOCOLS = {0x8100: "802.1q", 0x88A8: "802.1ad"}
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
    """Read a file, not much further than JSON may go; None if there is none. Raises Unreadable."""
    try:
        # Neither to follow a link nor to hang on a pipe: it is not our folder.
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            return opened.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unreadable(f"{file} cannot be read: {error.strerror}") from error


def _pci_address(text: str) -> str | None:
    return text.lower() if is_pci_address(text.lower()) else None


def _hardware_address(text: str) -> str | None:
    """Spell a MAC address, of which all zeros is one too: the PF enforced none."""
    return text.lower() if text == _NO_MAC or unicast_mac(text) is not None else None


def _former_guid(text: str) -> str | None:
    """Spell the GUID before. All zeros is given back as all ones, which drivers take for "none"."""
    is_one = re.fullmatch(r"[0-9a-fA-F:]{23}", text)
    return text.lower().replace("00:00:00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff:ff:ff") if is_one else None


_TEXT = string("a text", str)
_WORD = that("a name", re.compile(r"[A-Za-z0-9_.-]{1,64}").fullmatch)
_MAC = that("a MAC address", _hardware_address)
_NUMBER = whole(-(2**63), 2**63 - 1)
"""Whatever it says of what nobody had changed, which is not put back."""


@dataclass(frozen=True, slots=True)
class _Rdma(JsonSection):
    """Names of an RDMA device that moved along. Keys of Go are found in any case, here and below."""

    sandbox_rdma_dev_name: Annotated[str | None, _WORD] = None
    container_rdma_dev_name: Annotated[str | None, _WORD] = None

    @property
    def names(self) -> tuple[str, str] | None:
        """In the host, and in the pod."""
        host = self.sandbox_rdma_dev_name
        return (host, self.container_rdma_dev_name or host) if host else None


@dataclass(frozen=True, slots=True)
class _VfState(JsonSection):
    """What sriov found of a VF."""

    host_if_name: Annotated[str | None, INTERFACE] = None
    effective_mac: Annotated[str | None, _MAC] = None
    admin_mac: Annotated[str | None, _MAC] = None
    mtu: Annotated[int | None, _NUMBER] = None
    spoof_chk: Annotated[bool | None, FLAG] = None
    trust: Annotated[bool | None, FLAG] = None
    link_state: Annotated[int | None, _NUMBER] = None
    vlan: Annotated[int | None, _NUMBER] = None
    vlan_qos: Annotated[int | None, _NUMBER] = None
    vlan_proto: Annotated[int | None, _NUMBER] = None
    min_tx_rate: Annotated[int | None, _NUMBER] = None
    max_tx_rate: Annotated[int | None, _NUMBER] = None

    def settings(self, asked: VfSettings) -> VfSettings:
        """Return what the PF enforced, of the settings that were asked to be otherwise."""
        found = VfSettings(
            mac=self.admin_mac,
            vlan=self.vlan or 0,
            vlan_qos=self.vlan_qos or 0,
            vlan_proto=_VLAN_PROTOCOLS.get(self.vlan_proto or 0, "802.1q"),
            min_tx_rate=self.min_tx_rate or 0,
            max_tx_rate=self.max_tx_rate or 0,
            spoofchk=self.spoof_chk,
            trust=self.trust,
            link_state=_LINK_STATES.get(self.link_state or 0),
        )
        return pf.only(found, asked.document().keys())


@dataclass(frozen=True, slots=True)
class _Written(JsonSection):
    """What sriov and ib-sriov write of an attachment, beside its configuration."""

    device_id: Annotated[str | None, that("a PCI address such as 0000:3b:02.1", _pci_address)] = None
    vfid: Annotated[int | None, _NUMBER] = None
    dpdk_mode: Annotated[bool | None, FLAG] = None
    orig_vf_state: _VfState = _VfState()
    host_if_names: Annotated[str, _TEXT] = ""
    host_if_guid: Annotated[str | None, that("a GUID", _former_guid)] = None
    vfio_pci_mode: Annotated[bool | None, FLAG] = None
    rdma_net_state: _Rdma = _Rdma()


@dataclass(frozen=True, slots=True)
class _Cache(JsonSection):
    """A file of libcni."""

    kind: Annotated[str, _TEXT] = ""
    cni_args: list[tuple[str, str]] = field(default_factory=list)
    result: Annotated[Mapping[str, Any] | None, OBJECT] = None
    netns: Annotated[str | None, that("a path", lambda text: text.startswith("/"))] = None
    config: Annotated[str, _TEXT] = ""


T = TypeVar("T", bound=JsonSection)
_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def _read(model: type[T], file: Path) -> tuple[T, Any] | None:
    """Read a JSON object that a Go program wrote, and the same as it stands there. None if there is no file.

    Raises Unreadable.
    """
    text = text_of(file)
    try:
        document = decode(text, "the file") if text is not None else None
        return (checked(_adapter(model), document, fold=True), document) if text is not None else None
    except RequestInvalid as error:
        raise Unreadable(f"{file}: {error}") from error


def lock_of(state: Path, run: Path, kind: str, device: str) -> Path:
    """Name the file that a plugin locks while it works on a device."""
    return run / "ib-sriov/cni.lock" if kind == "ib-sriov" else state / "sriov/pci/vf_lock" / f"{device}.lock"


def read(state: Path, kind: str, file: Path) -> Record:
    """Read what a plugin wrote of one attachment, and what others wrote of the same. Raises Unreadable.

    Who goes by it holds the device's lock, and reads it once more.
    """
    found = _read(_Written, file)
    if found is None:
        raise Unreadable(f"{file} has gone")
    written, document = found
    if written.device_id is None:
        raise Unreadable(f"{file}: deviceID is missing")
    try:
        conf = _conf(document, kind)
        owner = _owner(file.name)
        record = Record(kind, *owner, written.device_id, conf, (file,), **_before(kind, written, conf))
        return _with_others(state, record)
    except RequestInvalid as error:
        raise Unreadable(f"{file}: {error}") from error


def _conf(document: Mapping[str, Any], kind: str) -> NetConf:
    """Read the configuration within what was kept. Keys that only told the plugin itself something are passed over."""
    kept = {fold(key): value for key, value in document.items() if value is not None}
    version = kept.get("cniversion")
    left_out = ("prevresult", "type", "cniversion", "ibkubernetesenabled")
    own = {key: value for key, value in kept.items() if key not in left_out}
    known = {"cniVersion": version if version in netconf.SUPPORTED_VERSIONS else None, "type": kind}
    return netconf.from_document(own | known)


def _owner(name: str) -> tuple[str, str]:
    """Split a file's name into container and interface, either of which may hold a dash."""
    found = _OWNER.fullmatch(name)
    if found is None:
        raise RequestInvalid("the name is not CONTAINER-INTERFACE")
    return found[1], found[2]


def _before(kind: str, written: _Written, conf: NetConf) -> dict[str, Any]:
    """Say how the device was in the host."""
    found: dict[str, Any] = {"vf_index": written.vfid}
    if kind == "ib-sriov":
        link_state = conf.settings.link_state
        return found | {
            # Of several names, as representors make them, the first is the interface's.
            "netdev": (written.host_if_names.split() or [""])[0],
            "guid": written.host_if_guid,
            "for_programs": bool(written.vfio_pci_mode),
            "rdma": written.rdma_net_state.names,
            "before": VfSettings(link_state="auto" if link_state is not None else None),
        }
    was = written.orig_vf_state
    return found | {
        "netdev": was.host_if_name or "",
        "mac": was.effective_mac,
        "mtu": was.mtu if was.mtu in range(1, MAX_MTU + 1) else None,
        "for_programs": bool(written.dpdk_mode),
        "before": was.settings(conf.settings),
    }


def _with_others(state: Path, record: Record) -> Record:
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
    moved = _read(_Rdma, file)
    if moved is not None:
        files.append(file)
        rdma = moved[0].names or rdma
    record = replace(record, files=tuple(files), netns_path=netns_path, rdma=rdma)
    for folder in CACHE_FOLDERS:
        file = state / folder / f"{network}-{container_id}-{ifname}"
        try:
            found = _read(_Cache, file)
            if found is not None:
                return _with_call(record, found[0])
        except (Unreadable, RequestInvalid) as error:
            log.warning("%s is of no use: %s", file, error)
    return record


def _path_in(text: bytes) -> str:
    path = text.decode(errors="replace").strip()
    return path if path.startswith("/") and path.isprintable() else ""


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


def _with_call(record: Record, cache: _Cache) -> Record:
    """Add the ADD as it was made, and the result of the whole network, translated to the newest version."""
    if cache.kind != CACHE_KIND:
        raise RequestInvalid(f"kind must be {CACHE_KIND}")
    args, conf, result = dict(cache.cni_args), record.conf, cache.result
    if result is not None:
        check_result(result, "result")
        result = in_version(result, netconf.SUPPORTED_VERSIONS[-1])
    sent = _cached_conf(cache.config, record.kind, conf.name, args)
    if sent is not None and sent.ipam is not None:
        conf = replace(conf, ipam=sent.ipam, for_ipam=sent.for_ipam, cni_version=sent.cni_version)
    return replace(
        record,
        conf=conf,
        netns_path=record.netns_path or cache.netns or "",
        result=result,
        cni_args=";".join(f"{name}={value}" for name, value in cache.cni_args),
        pod=PodRef(args.get("K8S_POD_NAMESPACE", ""), args.get("K8S_POD_NAME", ""), args.get("K8S_POD_UID", "")),
    )


def _cached_conf(encoded: str, kind: str, network: str, args: Mapping[str, str]) -> NetConf | None:
    """Read the configuration as the plugin got it. None if that cannot be told. Raises RequestInvalid."""
    try:
        document = decode(base64.b64decode(encoded, validate=True), "config")
    except ValueError as error:  # binascii.Error, and a character that is not ASCII
        raise RequestInvalid(f"config is not base64: {error}") from error
    if not isinstance(document, dict):
        raise RequestInvalid("config must be an object")
    listed = document.get("plugins", [document])
    plugins = listed if isinstance(listed, list) else []
    fitting = [each for each in plugins if isinstance(each, dict) and each.get("type", kind) == kind]
    if not fitting:
        return None
    version = document.get("cniVersion")
    known = version if version in netconf.SUPPORTED_VERSIONS else None
    return netconf.from_document({"cniVersion": known, **fitting[0], "type": kind, "name": network}, args)
