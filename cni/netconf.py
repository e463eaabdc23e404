"""A CNI network configuration, read and checked.

Accepts what libcni, Multus and kubelet's chain put in. What the keys mean depends on the plugin's type: our own
(`agent.config.networks`), or one of the plugins that are replaced. Those are Go programs: they take keys in any case
and pass over those they do not know, and their configurations are accepted here as they accept them. What they read and
never use (the `mtu` of sriov, the `pkey` of ib-sriov, which is for ib-kubernetes) has no effect here either.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator, TypeAdapter

from agent.config.networks import (
    DEVICE,
    GUID,
    INTERFACE,
    LINK_STATE,
    MAC,
    MAX_MTU,
    MAX_RATE,
    NETWORK_NAME,
    OBJECT,
    OF_SHARES,
    OWN,
    PROTOCOLS,
    REPLACED,
    Network,
    NetworkKeys,
    Setup,
    device_in,
    for_ipam,
    ipam_of,
    no_dhcp,
    of_settings,
    settings_of,
)
from agent.config.section import (
    FLAG,
    JsonSection,
    Refusal,
    checked,
    fold,
    must_be,
    refuse,
    string,
    that,
    value,
    whole,
)
from agent.errors import RequestInvalid
from agent.model.allocation import VfSettings
from agent.model.fields import decode, shown, unicast_mac
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
WHAT = "the network configuration"
VALID_ATTACHMENTS = ("cni.dev/valid-attachments", "cni.dev/attachments")
"""What GC must keep. The specification has called it both; libcni says both, others the one or the other."""
_AUXILIARY = re.compile(r"[a-z0-9_]{1,60}(?:\.[a-z0-9_]{1,60}){1,2}")
"""Such as mlx5_core.sf.4"""


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
    document, mac = decode(text, WHAT), (cni_args or {}).get("MAC") or ""
    is_own = isinstance(document, dict) and document.get("type") == OWN
    previous = document.pop("prevResult", None) if is_own else None  # all else is as in the network's other calls
    rest = json.dumps(document)
    conf = _kept(rest, mac) if len(rest + mac) <= MAX_KEPT_BYTES else from_document(document, {"MAC": mac})
    if previous is None:
        return conf
    check_result(previous, "prevResult")
    return replace(conf, prev_result=previous)


@functools.lru_cache(MAX_KEPT)
def _kept(document: str, mac: str) -> NetConf:
    return from_document(json.loads(document), {"MAC": mac})


def version_in(text: bytes) -> str:
    """Read no more than the CNI version of a configuration. Raises RequestInvalid."""
    document = decode(text, WHAT)
    return _version(next((value for key, value in _folded(document) if key == "cniversion"), None))


def version_key(version: str) -> tuple[int, ...]:
    """Return what orders versions."""
    return tuple(int(part) for part in version.split("."))


def with_network(conf: NetConf, network: Network) -> NetConf:
    """Set a call's interface up as a network of the agent's configuration says."""
    return replace(conf, name=network.name or conf.name, device_info_file=None, **_fields_of(network.setup))


def _fields_of(setup: Setup) -> dict[str, Any]:
    return {name: getattr(setup, name) for name in _OF_SETUP}


_OF_SETUP = tuple(field.name for field in fields_of(Setup))


def _plain_path(text: str) -> str | None:
    is_plain = text.startswith("/") and ".." not in text.split("/") and "\0" not in text and len(text) <= MAX_PATH
    return text if is_plain else None


def _device_or_auxiliary(text: str) -> str | None:
    return text.lower() if _AUXILIARY.fullmatch(text) else device_in(text)


def _pfs(given: Any) -> tuple[PfSelector, ...]:
    if not isinstance(given, list) or not 0 < len(given) <= MAX_PFS or not all(isinstance(each, str) for each in given):
        raise ValueError
    return tuple(map(parse_pf, given))


def _attachments(given: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(given, list):
        raise must_be("a list")
    found = [(i.get("containerID"), i.get("ifname")) if isinstance(i, dict) else (None, None) for i in given]
    wrong = (n for n, pair in enumerate(found) if not (isinstance(pair[0], str) and isinstance(pair[1], str)))
    refuse(Refusal((n,), f"must hold containerID and ifname, is {shown(given[n])}") for n in wrong)
    return tuple((str(container), str(ifname)) for container, ifname in found)


def _go_switch(given: Any) -> bool | None:
    """Read a switch as the Go plugins do: any text but "on" is off."""
    if given == "":
        return None
    if not isinstance(given, bool | str):
        raise ValueError
    return given in (True, "on")


_AUXILIARY_DEVICE = that(
    "a PCI address such as 0000:3b:02.1, or an auxiliary device such as mlx5_core.sf.4", _device_or_auxiliary
)
_PFS = value(
    f"a list of 1 to {MAX_PFS} PFs, such as ens1f0 or ens1f0#0-3,7 (its interface or PCI address, then VF indices)",
    _pfs,
    {},
)
_GO_SWITCH = value('"on" or "off"', _go_switch, {})
_TEXT = string("a text", str)
_ATTACHMENTS = PlainValidator(_attachments)


@dataclass(frozen=True, slots=True)
class _Runtime(JsonSection):
    """What the runtime asks of any plugin for a pod."""

    overlooked: ClassVar[bool] = True

    info: Annotated[
        str | None, that("an absolute path without '..'", _plain_path), Field(alias="CNIDeviceInfoFile")
    ] = None


@dataclass(frozen=True, slots=True)
class _RuntimeOfVf(_Runtime):
    device: Annotated[str | None, DEVICE, Field(alias="deviceID")] = None
    guid: Annotated[str | None, GUID, Field(alias="infinibandGUID")] = None


@dataclass(frozen=True, slots=True)
class _RuntimeWithMac(_RuntimeOfVf):
    mac: Annotated[str | None, MAC] = None


@dataclass(frozen=True, slots=True)
class _Args(JsonSection):
    """args.cni"""

    overlooked: ClassVar[bool] = True

    guid: Annotated[str | None, GUID] = None
    state: Annotated[str | None, _TEXT, Field(alias="mellanox.infiniband.app")] = None


@dataclass(frozen=True, slots=True)
class _AllArgs(JsonSection):
    overlooked: ClassVar[bool] = True

    cni: _Args = _Args()


_NO_ARGS = _AllArgs()


@dataclass(frozen=True, kw_only=True)  # without slots: _Own has two bases
class _Call(JsonSection):
    """What a configuration of any type has."""

    cni_version: Annotated[str | None, _TEXT] = None
    name: Annotated[str | None, that("a network name (letters, digits, '.', '_', '-')", _NAME.fullmatch)] = None
    type: Annotated[str | None, string("a plugin type", str)] = None
    args: _AllArgs = _NO_ARGS
    previous: Annotated[Mapping[str, Any] | None, OBJECT, Field(alias="prevResult")] = None
    valid: Annotated[tuple[tuple[str, str], ...], _ATTACHMENTS, Field(alias="cni.dev/valid-attachments")] = ()
    attachments: Annotated[tuple[tuple[str, str], ...], _ATTACHMENTS, Field(alias="cni.dev/attachments")] = ()


_OF_SHARE = "must be a PCI address such as 0000:3b:02.1, or a slot such as slot-rdma:vf-0-3, is {}"


def _no_shares(*devices: str | None) -> list[Refusal]:
    """Refuse shares of an adapter where only devices will do."""
    named = zip((("deviceID",), ("pciBusID",), ("runtimeConfig", "deviceID")), devices, strict=False)
    shares = ((loc, name) for loc, name in named if name is not None and UnitId.parse(name).is_share)
    return [Refusal(loc, _OF_SHARE.format(shown(name))) for loc, name in shares]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Own(NetworkKeys, _Call):
    runtime: Annotated[_RuntimeWithMac, Field(alias="runtimeConfig")] = _RuntimeWithMac()
    device: Annotated[str | None, DEVICE, Field(alias="deviceID")] = None
    bus_id: Annotated[str | None, DEVICE, Field(alias="pciBusID")] = None
    pf: Annotated[tuple[PfSelector, ...], _PFS] = ()
    network: Annotated[
        str | None, that("the name of a network of the agent's configuration", NETWORK_NAME.fullmatch)
    ] = None

    def contradictions(self) -> Iterator[Refusal]:
        yield from super(_Own, self).contradictions()
        if self.mode not in OF_SHARES and not self.network:
            yield from _no_shares(self.device, self.bus_id, self.runtime.device)
        if self.network and self.setup({}) != Setup(for_ipam={}):
            text = f"{self.network} says all of the interface: leave out what else is said of it"
            yield Refusal(("network",), text)

    def wanted(self, document: Mapping[str, Any]) -> Setup:
        guid = self.runtime.guid or self.args.cni.guid
        setup = self.setup(document)
        return setup if guid is None else replace(setup, guid=guid)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replaced(_Call):
    """What the configurations of the plugins that are replaced have. An ipam without a type is the same as none."""

    ipam: Annotated[Mapping[str, Any] | None, PlainValidator(ipam_of)] = None

    def wanted(self, document: Mapping[str, Any]) -> Setup:
        return Setup(ipam=self.ipam, for_ipam=for_ipam(document) if self.ipam is not None else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfVf(_Replaced):
    device: Annotated[str | None, DEVICE, Field(alias="deviceID")] = None
    bus_id: Annotated[str | None, DEVICE, Field(alias="pciBusID")] = None
    link_state: Annotated[str | None, LINK_STATE, Field(alias="link_state")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sriov(_OfVf):
    runtime: Annotated[_RuntimeWithMac, Field(alias="runtimeConfig")] = _RuntimeWithMac()
    mac: Annotated[str | None, MAC] = None
    vlan: Annotated[int | None, whole(0, 4094)] = None
    vlan_qos: Annotated[int | None, whole(0, 7), Field(alias="vlanQoS")] = None
    vlan_proto: Annotated[str | None, PROTOCOLS] = None
    min_tx_rate: Annotated[int | None, whole(0, MAX_RATE), Field(alias="min_tx_rate")] = None
    max_tx_rate: Annotated[int | None, whole(0, MAX_RATE), Field(alias="max_tx_rate")] = None
    spoofchk: Annotated[bool | None, _GO_SWITCH] = None
    trust: Annotated[bool | None, _GO_SWITCH] = None

    def contradictions(self) -> list[Refusal]:
        found = _no_shares(self.device, self.bus_id, self.runtime.device)
        found += of_settings(self.vlan, self.vlan_qos, self.vlan_proto, self.min_tx_rate, self.max_tx_rate)
        return found

    def wanted(self, document: Mapping[str, Any]) -> Setup:
        return replace(super(_Sriov, self).wanted(document), settings=settings_of(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class _IbSriov(_OfVf):
    runtime: Annotated[_RuntimeOfVf, Field(alias="runtimeConfig")] = _RuntimeOfVf()
    guid: Annotated[str | None, GUID] = None
    by_ib_kubernetes: Annotated[bool | None, FLAG, Field(alias="ibKubernetesEnabled")] = None
    isolation: Annotated[bool | None, FLAG, Field(alias="rdmaIsolation")] = None
    vfio: Annotated[bool | None, FLAG, Field(alias="vfioPciMode")] = None

    def contradictions(self) -> list[Refusal]:
        found = [*_no_shares(self.device, self.bus_id, self.runtime.device), *no_dhcp(self.ipam)]
        state = self.args.cni.state
        if self.by_ib_kubernetes and state != "configured":
            text = (
                f"must be configured, is {shown(state)}: ib-kubernetes has not set this pod up yet; see that it runs,"
                " or take ibKubernetesEnabled out"
            )
            found.append(Refusal(("args", "cni", "mellanox.infiniband.app"), text))
        return found

    def wanted(self, document: Mapping[str, Any]) -> Setup:
        return replace(
            super(_IbSriov, self).wanted(document),
            settings=VfSettings(link_state=self.link_state),
            guid=self.runtime.guid or self.args.cni.guid or self.guid,
            # Left to itself it goes along where RDMA devices are kept apart. The old plugin refuses to do without.
            rdma=True if self.isolation else None,
            vfio=True if self.vfio else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rdma(_Replaced):
    runtime: Annotated[_Runtime, Field(alias="runtimeConfig")] = _Runtime()
    device: Annotated[str | None, _AUXILIARY_DEVICE, Field(alias="deviceID")] = None

    def contradictions(self) -> list[Refusal]:
        return _no_shares(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ipoib(_Replaced):
    runtime: Annotated[_Runtime, Field(alias="runtimeConfig")] = _Runtime()
    master: Annotated[str | None, INTERFACE] = None
    mtu: Annotated[int | None, whole(0, MAX_MTU)] = None

    def contradictions(self) -> list[Refusal]:
        found = list(no_dhcp(self.ipam))
        if self.master is None:
            text = "is missing: name the IPoIB interface of the host that the child belongs to"
            found.append(Refusal(("master",), text))
        return found

    def wanted(self, document: Mapping[str, Any]) -> Setup:
        setup = super(_Ipoib, self).wanted(document)
        return replace(setup, mode="ipoib", master=self.master, mtu=self.mtu or None)


_MODELS: Mapping[str, type[_Own | _Replaced]] = MappingProxyType(
    {OWN: _Own, "sriov": _Sriov, "ib-sriov": _IbSriov, "rdma": _Rdma, "ipoib": _Ipoib}
)


_OF_OWN = TypeAdapter(_Own)


@functools.cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    return _OF_OWN if kind == OWN else TypeAdapter(_MODELS[kind])


def from_document(document: Any, cni_args: Mapping[str, str] | None = None) -> NetConf:
    """Read a decoded configuration. Raises RequestInvalid with the path of what is wrong."""
    kind = _kind(document)
    is_own = kind == OWN
    version = _version(document.get("cniVersion") if is_own else dict(_folded(document)).get("cniversion"))
    said = checked(_adapter(kind), document, fold=not is_own)
    setup: Setup = said.wanted(document)
    own_device = getattr(said, "device", None)
    devices = [own_device]
    if kind in WITH_DEVICE:  # Multus gives deviceID and pciBusID at once
        devices += said.bus_id, said.runtime.device
    macs = (said.runtime.mac, _args_mac(cni_args or {}), setup.settings.mac) if kind in WITH_MAC else ()
    mac = next(filter(None, macs), None)
    if mac != setup.settings.mac:
        setup = replace(setup, settings=replace(setup.settings, mac=mac))
    if said.previous is not None:
        check_result(said.previous, "prevResult")
    is_gc = any(key in document for key in VALID_ATTACHMENTS)  # null is what Go writes for an empty list
    return NetConf(
        **_fields_of(setup),
        cni_version=version,
        name=said.name or "",
        device=next(filter(None, devices), None),
        prev_result=said.previous,
        valid_attachments=tuple(dict.fromkeys((*said.valid, *said.attachments))) if is_gc else None,
        kind=kind,
        pf=getattr(said, "pf", ()),
        network=getattr(said, "network", None) or "",
        device_info_file=said.runtime.info,
    )


def _folded(document: Any) -> list[tuple[str, Any]]:
    """List the keys as Go's decoder takes them: in any case, the last that is not null wins."""
    if not isinstance(document, dict):
        raise RequestInvalid(f"the network configuration must be an object, is {shown(document)}")
    return list({fold(key): value for key, value in document.items() if value is not None}.items())


def _version(given: Any) -> str:
    version = given or "0.3.1"
    if not isinstance(version, str):
        raise RequestInvalid(f"cniVersion must be a text such as 1.0.0, is {shown(version)}")
    if version not in SUPPORTED_VERSIONS and version != _LIKE_0_3_1:
        raise VersionUnsupported(
            f"cniVersion must be {' or '.join(SUPPORTED_VERSIONS)}, is {shown(version)}: change it in the configuration"
        )
    return version


def _kind(document: Any) -> str:
    """Find the plugin's type, which decides how all else is read. A Go plugin may have its key in any case."""
    keys = dict(_folded(document))
    given = document.get("type") or keys.get("type")
    if given is None or given == "":
        return OWN
    if not isinstance(given, str) or given not in KINDS:
        raise RequestInvalid(f"type must be {' or '.join(KINDS)}, is {shown(given)}")
    return given


def _args_mac(cni_args: Mapping[str, str]) -> str | None:
    value = cni_args.get("MAC")
    if not value:
        return None
    mac = unicast_mac(value)
    if mac is None:
        raise RequestInvalid(f"CNI_ARGS MAC must be a unicast MAC address, is {shown(value)}")
    return mac
