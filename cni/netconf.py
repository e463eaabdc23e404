"""A CNI network configuration, read and checked.

Accepts what libcni, Multus and kubelet's chain put in. What the keys mean depends on the plugin's
type, see `cni.kinds`: our own, or one of the plugins that are replaced.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from agent.errors import RequestInvalid
from agent.model.allocation import VfSettings
from agent.model.pf_selector import PfSelector
from cni import kinds, result_fields
from cni.fields import Fields, decode, join, shown, unicast_mac
from cni.kinds import MAX_MTU as MAX_MTU

SUPPORTED_VERSIONS = ("0.3.1", "0.4.0", "1.0.0", "1.1.0")
_LIKE_0_3_1 = "0.3.0"
"""Differs in nothing that a plugin does, and is what many a network for Multus says."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")
_PLUGIN_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
MAX_PATH = 4095
MAX_KEPT, MAX_KEPT_BYTES = 256, 4096
"""So many configurations are remembered as read, each of at most so many bytes: pods of a network come with the same
one, or with one for each VF, and wait for it to be read."""
MAX_KEPT_MAC = 32
VALID_ATTACHMENTS = ("cni.dev/valid-attachments", "cni.dev/attachments")
"""What GC must keep. The specification has called it both; libcni says both, others the one or the other."""
_TOLD_ANEW = frozenset(("cniversion", "name", "type", "ipam", "prevresult"))
OF_ONE_CALL = re.compile(rb"prevResult|CNIDeviceInfoFile|cni\.dev/(?:valid-)?attachments")


class VersionUnsupported(RequestInvalid):
    """The configuration is of a CNI version that this plugin does not speak."""


@dataclass(frozen=True, slots=True)
class NetConf:
    """What one call asks for."""

    cni_version: str
    name: str
    device: str | None
    """PCI address, a slot, or a share of an adapter; None to take the pod's granted devices."""
    settings: VfSettings
    mtu: int | None
    ipam: Mapping[str, Any] | None
    for_ipam: Mapping[str, Any]
    """All else that the configuration says, in the keys it came in: an IPAM plugin gets what the plugin got (CNI
    specification, section 4), such as what the pod asks of it (runtimeConfig.ips, args.cni.ips)."""
    prev_result: Mapping[str, Any] | None
    valid_attachments: tuple[tuple[str, str], ...] | None
    """(container ID, interface) pairs that GC must keep; None outside GC."""
    kind: str = "nodefabric"
    """The plugin's type: ours, or the one that the configuration was written for."""
    mode: str = "vf"
    """vf, nic, ipoib or macvlan. What a VF really is (Ethernet, InfiniBand, vfio) shows its device."""
    pf: tuple[PfSelector, ...] = ()
    """Whose VFs are a pool that CNI alone manages: without a device the first free one is taken."""
    master: str | None = None
    """Interface of the host: the parent of a child, or the one that mode nic moves."""
    guid: str | None = None
    """Node and port GUID of an InfiniBand VF, aa:bb:cc:dd:ee:ff:00:11."""
    pkey: int | None = None
    rdma: bool | None = None
    """Whether the RDMA device goes along. None: if the system keeps them apart. True: it must."""
    vfio: bool | None = None
    """True: the device must be bound to a driver for programs. None: look."""
    function_reset: bool = False
    """Reset the function when it comes back from a pod that drove it itself."""
    altnames: tuple[str, ...] = ()
    device_info_file: str | None = None
    """Where the caller wants to read what the device is (runtimeConfig.CNIDeviceInfoFile)."""
    macvlan_mode: str = "bridge"
    ignored: tuple[str, ...] = ()
    """Keys that a replaced plugin would have passed over in silence."""

    @property
    def mac(self) -> str | None:
        return self.settings.mac

    @property
    def is_chained(self) -> bool:
        """Whether it names no device, nor anything else by itself: what comes into the pod is what kubelet gave it."""
        named = self.device is not None or self.pf or self.master is not None or self.ipam is not None
        return self.kind == kinds.OWN and not named


def parse(text: bytes, cni_args: Mapping[str, str] | None = None) -> NetConf:
    """Read the configuration of a CNI call. Raises RequestInvalid with the path of what is wrong."""
    mac = (cni_args or {}).get("MAC") or ""
    # What is another for each call would only crowd out what comes again.
    if len(text) > MAX_KEPT_BYTES or len(mac) > MAX_KEPT_MAC or OF_ONE_CALL.search(text):
        return _parsed(text, mac)
    return _kept(text, mac)


def _parsed(text: bytes, mac: str) -> NetConf:
    return from_document(decode(text, "the network configuration"), {"MAC": mac})


_kept = functools.lru_cache(MAX_KEPT)(_parsed)


def from_document(document: Any, cni_args: Mapping[str, str] | None = None) -> NetConf:
    """Read a decoded configuration. Raises RequestInvalid with the path of what is wrong."""
    kind = _kind(document)
    fields = Fields(document, fold=kind in kinds.REPLACED)
    version = _version(fields)
    name = fields.text(
        "name", "", lambda v: bool(_NAME.fullmatch(v)), "a network name (letters, digits, '.', '_', '-')"
    )
    fields.take("type", lambda v: isinstance(v, str), "a plugin type")
    runtime = fields.inside("runtimeConfig")
    args = fields.inside("args").inside("cni")
    wanted = kinds.read(kind, fields, runtime, args)
    devices: tuple[str | None, ...] = (wanted.device,)
    if kind in kinds.WITH_DEVICE:  # all are read before one is chosen: Multus gives deviceID and pciBusID at once
        shares = wanted.mode in kinds.OF_SHARES
        devices += fields.device("pciBusID", shares=shares), runtime.device("deviceID", shares=shares)
    macs: tuple[str | None, ...] = ()
    if kind in kinds.WITH_MAC:
        macs = runtime.mac("mac"), _args_mac(cni_args or {}), wanted.settings.mac
    mac = next(filter(None, macs), None)
    ipam = _ipam(fields, kind, wanted.mode)
    previous = fields.mapping("prevResult")
    if previous is not None:
        result_fields.check(previous, "prevResult")
    info = runtime.text("CNIDeviceInfoFile", "", _is_plain_path, "an absolute path without '..'")
    if kind not in kinds.REPLACED:
        kinds.refuse_unknown(fields)
    return NetConf(
        cni_version=version,
        name=name,
        device=next(filter(None, devices), None),
        settings=wanted.settings if mac == wanted.settings.mac else replace(wanted.settings, mac=mac),
        mtu=wanted.mtu,
        ipam=ipam,
        for_ipam=_for_ipam(document) if ipam is not None else {},
        prev_result=previous,
        valid_attachments=_valid_attachments(fields, document),
        kind=kind,
        mode=wanted.mode,
        pf=wanted.pf,
        master=wanted.master,
        guid=wanted.guid,
        pkey=wanted.pkey,
        rdma=wanted.rdma,
        vfio=wanted.vfio,
        function_reset=wanted.function_reset,
        altnames=wanted.altnames,
        device_info_file=info or None,
        macvlan_mode=wanted.macvlan_mode,
        ignored=kinds.passed_over(fields) if kind in kinds.REPLACED else (),
    )


def version_in(text: bytes) -> str:
    """Read no more than the CNI version of a configuration. Raises RequestInvalid."""
    return _version(Fields(decode(text, "the network configuration"), fold=True))


def version_key(version: str) -> tuple[int, ...]:
    """Return what orders versions."""
    return tuple(int(part) for part in version.split("."))


def with_network(conf: NetConf, document: Mapping[str, Any]) -> NetConf:
    """Set a call's interface up as a network of the agent's configuration says."""
    network = from_document(dict(document))
    return replace(
        conf,
        name=network.name or conf.name,
        settings=network.settings,
        mtu=network.mtu,
        ipam=network.ipam,
        for_ipam=network.for_ipam,
        mode=network.mode,
        master=network.master,
        guid=network.guid,
        pkey=network.pkey,
        rdma=network.rdma,
        vfio=network.vfio,
        function_reset=network.function_reset,
        altnames=network.altnames,
        device_info_file=None,
        macvlan_mode=network.macvlan_mode,
    )


def _version(fields: Fields) -> str:
    version = fields.take("cniVersion", lambda v: isinstance(v, str), "a text such as 1.0.0") or "0.3.1"
    if version not in SUPPORTED_VERSIONS and version != _LIKE_0_3_1:
        raise VersionUnsupported(
            f"cniVersion must be {' or '.join(SUPPORTED_VERSIONS)}, is {shown(version)}: change it in the configuration"
        )
    return str(version)


def _kind(document: Any) -> str:
    """Find the plugin's type, which decides how all else is read. A Go plugin may have its key in any case."""
    exact = Fields(document).document.get("type")
    value = exact if exact else Fields(document, fold=True).document.get("type")
    if value is None or value == "":
        return kinds.OWN
    if not isinstance(value, str) or value not in kinds.KINDS:
        raise RequestInvalid(f"type must be {' or '.join(kinds.KINDS)}, is {shown(value)}")
    return value


def _ipam(fields: Fields, kind: str, mode: str) -> Mapping[str, Any] | None:
    ipam = fields.mapping("ipam")
    if not ipam:
        return None
    inside = fields.inside("ipam")
    name = inside.take("type", lambda v: isinstance(v, str), "the name of an IPAM plugin")
    if not name and kind in kinds.REPLACED:
        return None  # to the Go plugins this is the same as no ipam
    if not name or not _PLUGIN_TYPE.fullmatch(name):
        raise RequestInvalid(f"ipam.type must be the name of an IPAM plugin, is {shown(name)}")
    if name in kinds.NO_IPAM:
        raise RequestInvalid(
            f"ipam.type must be the name of an IPAM plugin, is {shown(name)}, which leases no addresses: take"
            " host-local, whereabouts or the like"
        )
    if name == "dhcp" and (mode == "ipoib" or kind == "ib-sriov"):
        raise RequestInvalid(
            "ipam.type must not be dhcp, which knows no InfiniBand addresses: take host-local or the like"
        )
    return {**ipam, "type": name}


def _for_ipam(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out what is told to an IPAM plugin in words of its own, and what came before or is for GC."""
    return {
        key: value
        for key, value in document.items()
        if value is not None and key.casefold() not in _TOLD_ANEW and not key.startswith("cni.dev/")
    }


def _args_mac(cni_args: Mapping[str, str]) -> str | None:
    value = cni_args.get("MAC")
    if not value:
        return None
    mac = unicast_mac(value)
    if mac is None:
        raise RequestInvalid(f"CNI_ARGS MAC must be a unicast MAC address, is {shown(value)}")
    return mac


def _is_plain_path(text: str) -> bool:
    return text.startswith("/") and ".." not in text.split("/") and "\0" not in text and len(text) <= MAX_PATH


def _valid_attachments(fields: Fields, document: Mapping[str, Any]) -> tuple[tuple[str, str], ...] | None:
    given = [key for key in VALID_ATTACHMENTS if key in document]
    if not given:
        return None
    found: dict[tuple[str, str], None] = {}
    for key in given:
        # null is what Go writes for an empty list: no attachment is valid.
        for index, item in enumerate(fields.take(key, lambda v: isinstance(v, list), "a list") or ()):
            found[_valid_attachment(item, join(key, index))] = None
    return tuple(found)


def _valid_attachment(item: Any, path: str) -> tuple[str, str]:
    if isinstance(item, dict):
        pair = (item.get("containerID"), item.get("ifname"))
        if isinstance(pair[0], str) and isinstance(pair[1], str):
            return pair[0], pair[1]
    raise RequestInvalid(f"{path} must hold containerID and ifname, is {shown(item)}")
