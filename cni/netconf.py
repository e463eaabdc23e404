"""A CNI network configuration, read and checked.

Accepts what libcni, Multus and kubelet's chain put in. What the keys mean depends on the plugin's type: our own
(`agent.config.networks`), or one of the plugins that are replaced. Those are Go programs: they take keys in any case
and pass over those they do not know, and their configurations are accepted here as they accept them. What they read and
never use (the `mtu` of sriov, the `pkey` of ib-sriov, which is for ib-kubernetes) has no effect here either.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from types import MappingProxyType
from typing import Any

from agent.config.networks import (
    FOREIGN,
    LINK_STATES,
    MAX_MTU,
    NETWORK_NAME,
    OF_SHARES,
    OWN,
    REPLACED,
    Network,
    Setup,
    for_ipam,
    interface_name,
    read_ipam,
    read_settings,
    read_setup,
    refuse_unknown,
)
from agent.errors import RequestInvalid
from agent.model.allocation import VfSettings
from agent.model.fields import Fields, decode, is_device, is_list, is_text, join, shown, unicast_mac
from agent.model.pf_selector import PfSelector, parse_pf
from agent.model.unit_id import UnitId
from cni.result import check_result

KINDS = (OWN, *REPLACED)
WITH_MAC = (OWN, "sriov")
"""The others do not look at the MAC that a pod asks for, and Multus hands it to all plugins of a chain."""
WITH_DEVICE = (OWN, "sriov", "ib-sriov")
"""The others take no device by what Multus calls it besides deviceID: it may be a share of an adapter, such as 17, or a
subfunction."""
SUPPORTED_VERSIONS = ("0.3.1", "0.4.0", "1.0.0", "1.1.0")
_LIKE_0_3_1 = "0.3.0"
"""Differs in nothing that a plugin does, and is what many a network for Multus says."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")
MAX_PFS = 64
MAX_PATH = 4095
MAX_KEPT, MAX_KEPT_BYTES = 256, 4096
"""So many configurations are remembered as read, each of at most so many bytes: pods of a network come with the same
one, or with one for each VF, and wait for it to be read."""
MAX_KEPT_MAC = 32
VALID_ATTACHMENTS = ("cni.dev/valid-attachments", "cni.dev/attachments")
"""What GC must keep. The specification has called it both; libcni says both, others the one or the other."""
OF_ONE_CALL = re.compile(rb"prevResult|CNIDeviceInfoFile|cni\.dev/(?:valid-)?attachments")
_AUXILIARY = re.compile(r"[a-z0-9_]{1,60}(?:\.[a-z0-9_]{1,60}){1,2}")
"""Such as mlx5_core.sf.4"""

# Those that the replaced plugins know themselves and that have no effect, there or here.
_EFFECTLESS = frozenset(
    (
        *("mtu", "pkey", "master", "vfid", "dpdkmode", "contifnames", "vlan_trunk", "ibkubernetesenabled"),
        *("deviceid", "pcibusid"),
    )
)


class VersionUnsupported(RequestInvalid):
    """The configuration is of a CNI version that this plugin does not speak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetConf(Setup):
    """What one call asks for."""

    cni_version: str
    name: str
    device: str | None
    """PCI address, a slot, or a share of an adapter; None to take the pod's granted devices."""
    prev_result: Mapping[str, Any] | None
    valid_attachments: tuple[tuple[str, str], ...] | None
    """(container ID, interface) pairs that GC must keep; None outside GC."""
    kind: str = OWN
    """The plugin's type: ours, or the one that the configuration was written for."""
    pf: tuple[PfSelector, ...] = ()
    """Whose VFs are a pool that CNI alone manages: without a device the first free one is taken."""
    device_info_file: str | None = None
    """Where the caller wants to read what the device is (runtimeConfig.CNIDeviceInfoFile)."""
    ports: tuple[str, ...] = ()
    """PCI addresses of the VFs that a bond joins: of its own configuration, which names no device, and of theirs."""
    ignored: tuple[str, ...] = ()
    """Keys that a replaced plugin would have passed over in silence."""
    network: str = ""
    """The entry of the agent's `networks` that says what becomes of the device; empty where the call itself does."""

    @property
    def mac(self) -> str | None:
        return self.settings.mac

    @property
    def is_chained(self) -> bool:
        """Whether it names no device, nor anything else by itself: what comes into the pod is what kubelet gave it."""
        named = self.device is not None or self.pf or self.master is not None or self.ipam is not None
        return self.kind == OWN and not named


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
    fields = Fields(document, fold=kind in REPLACED)
    version = _version(fields)
    name = fields.text("name", "", _NAME.fullmatch, "a network name (letters, digits, '.', '_', '-')")
    fields.take("type", is_text, "a plugin type")
    runtime = fields.inside("runtimeConfig")
    args = fields.inside("args").inside("cni")
    wanted = _READERS[kind](fields, runtime, args)
    setup, devices = wanted.setup, [wanted.device]
    if kind in WITH_DEVICE:  # all are read before one is chosen: Multus gives deviceID and pciBusID at once
        shares = setup.mode in OF_SHARES or wanted.network != ""
        devices += fields.device("pciBusID", shares=shares), runtime.device("deviceID", shares=shares)
    macs = (runtime.mac("mac"), _args_mac(cni_args or {}), setup.settings.mac) if kind in WITH_MAC else ()
    mac = next(filter(None, macs), None)
    if mac != setup.settings.mac:
        setup = replace(setup, settings=replace(setup.settings, mac=mac))
    if kind in REPLACED:  # to the Go plugins an ipam without a type is the same as none
        is_infiniband = setup.mode == "ipoib" or kind == "ib-sriov"
        ipam = read_ipam(fields, is_infiniband=is_infiniband, may_be_empty=True)
        setup = replace(setup, ipam=ipam, for_ipam=for_ipam(document) if ipam is not None else {})
    previous = fields.mapping("prevResult")
    if previous is not None:
        check_result(previous, "prevResult")
    info = runtime.text("CNIDeviceInfoFile", "", _is_plain_path, "an absolute path without '..'")
    if kind == OWN:
        refuse_unknown(fields)
    return NetConf(
        **_told(setup),
        cni_version=version,
        name=name,
        device=next(filter(None, devices), None),
        prev_result=previous,
        valid_attachments=_valid_attachments(fields, document),
        kind=kind,
        pf=wanted.pf,
        network=wanted.network,
        device_info_file=info or None,
        ignored=_passed_over(fields) if kind in REPLACED else (),
    )


def version_in(text: bytes) -> str:
    """Read no more than the CNI version of a configuration. Raises RequestInvalid."""
    return _version(Fields(decode(text, "the network configuration"), fold=True))


def version_key(version: str) -> tuple[int, ...]:
    """Return what orders versions."""
    return tuple(int(part) for part in version.split("."))


def with_network(conf: NetConf, network: Network) -> NetConf:
    """Set a call's interface up as a network of the agent's configuration says."""
    return replace(conf, name=network.name or conf.name, device_info_file=None, **_told(network.setup))


def _told(setup: Setup) -> dict[str, Any]:
    return {name: getattr(setup, name) for name in _OF_SETUP}


_OF_SETUP = tuple(field.name for field in fields_of(Setup))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the keys of one type ask for."""

    setup: Setup
    device: str | None
    pf: tuple[PfSelector, ...] = ()
    network: str = ""


def _own(fields: Fields, runtime: Fields, args: Fields) -> _Wanted:
    guid = runtime.guid("infinibandGUID") or args.guid("guid")
    setup = read_setup(fields)
    network = fields.text("network", "", NETWORK_NAME.fullmatch, "the name of a network of the agent's configuration")
    if network and setup != Setup():
        raise RequestInvalid(f"network {network} says all of the interface: leave out what else is said of it")
    device = fields.device("deviceID", shares=setup.mode in OF_SHARES or network != "")
    return _Wanted(setup if guid is None else replace(setup, guid=guid), device, _pf(fields), network)


def _sriov(fields: Fields, runtime: Fields, args: Fields) -> _Wanted:
    return _Wanted(Setup(settings=read_settings(fields, fields.go_switch)), fields.device("deviceID"))


def _ib_sriov(fields: Fields, runtime: Fields, args: Fields) -> _Wanted:
    guids = runtime.guid("infinibandGUID"), args.guid("guid"), fields.guid("guid")
    if fields.flag("ibKubernetesEnabled"):
        state = args.take("mellanox.infiniband.app", is_text, "a text")
        if state != "configured":
            raise RequestInvalid(
                f'args.cni["mellanox.infiniband.app"] must be configured, is {shown(state)}: ib-kubernetes has not'
                " set this pod up yet; see that it runs, or take ibKubernetesEnabled out"
            )
    setup = Setup(
        settings=VfSettings(link_state=fields.word("link_state", LINK_STATES)),
        guid=next(filter(None, guids), None),
        # Left to itself it goes along where RDMA devices are kept apart. The old plugin refuses to do without.
        rdma=True if fields.flag("rdmaIsolation") else None,
        vfio=True if fields.flag("vfioPciMode") else None,
    )
    return _Wanted(setup, fields.device("deviceID"))


def _rdma(fields: Fields, runtime: Fields, args: Fields) -> _Wanted:
    args.flag("debug")
    want = "a PCI address such as 0000:3b:02.1, or an auxiliary device such as mlx5_core.sf.4"
    device = fields.text("deviceID", "", _is_device_or_auxiliary, want)
    return _Wanted(Setup(), (device if UnitId.parse(device).is_slot else device.lower()) or None)


def _is_device_or_auxiliary(text: str) -> bool:
    return bool(_AUXILIARY.fullmatch(text)) or is_device(text)


def _ipoib(fields: Fields, runtime: Fields, args: Fields) -> _Wanted:
    master = interface_name(fields, "master")
    if master is None:
        raise RequestInvalid("master is missing: name the IPoIB interface of the host that the child belongs to")
    return _Wanted(Setup(mode="ipoib", master=master, mtu=fields.whole("mtu", 0, MAX_MTU) or None), None)


_READERS: Mapping[str, Callable[[Fields, Fields, Fields], _Wanted]] = MappingProxyType(
    {OWN: _own, "sriov": _sriov, "ib-sriov": _ib_sriov, "rdma": _rdma, "ipoib": _ipoib}
)
"""Each gets the document, its runtimeConfig and its args.cni."""


def _pf(fields: Fields) -> tuple[PfSelector, ...]:
    want = (
        f"a list of 1 to {MAX_PFS} PFs, such as ens1f0 or ens1f0#0-3,7 (its interface or PCI address, then VF indices)"
    )
    return tuple(map(parse_pf, fields.take("pf", _are_pfs, want) or ()))


def _are_pfs(value: Any) -> bool:
    return is_list(value) and 0 < len(value) <= MAX_PFS and all(map(_is_pf, value))


def _is_pf(value: object) -> bool:
    try:
        return isinstance(value, str) and parse_pf(value) is not None
    except ValueError:
        return False


def _passed_over(fields: Fields) -> tuple[str, ...]:
    """List the keys that no plugin knows."""
    known = {key.lower() for key in FOREIGN} | _EFFECTLESS
    return tuple(sorted(k for k in fields.unasked() if k.lower() not in known and not k.lower().startswith("cni.dev/")))


def _version(fields: Fields) -> str:
    version = fields.take("cniVersion", is_text, "a text such as 1.0.0") or "0.3.1"
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
        return OWN
    if not isinstance(value, str) or value not in KINDS:
        raise RequestInvalid(f"type must be {' or '.join(KINDS)}, is {shown(value)}")
    return value


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
        for index, item in enumerate(fields.take(key, is_list, "a list") or ()):
            found[_valid_attachment(item, join(key, index))] = None
    return tuple(found)


def _valid_attachment(item: Any, path: str) -> tuple[str, str]:
    if isinstance(item, dict):
        pair = (item.get("containerID"), item.get("ifname"))
        if isinstance(pair[0], str) and isinstance(pair[1], str):
            return pair[0], pair[1]
    raise RequestInvalid(f"{path} must hold containerID and ifname, is {shown(item)}")
