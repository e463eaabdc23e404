"""What the keys of a network configuration mean for each plugin type.

Our own type refuses a key it does not know: a typo must not silently leave a VF open. The replaced
plugins are Go programs: they take keys in any case and pass over those they do not know, and their
configurations are accepted here as they accept them. What they read and never use (the `mtu` of
sriov, the `pkey` of ib-sriov, which is for ib-kubernetes) has no effect here either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from agent.errors import RequestInvalid
from agent.model.allocation import NO_SETTINGS, VfSettings
from agent.model.pf_selector import PfSelector, parse_pf
from agent.model.slots import is_slot_id
from cni.fields import Fields, shown

OWN = "nodefabric"
REPLACED = ("sriov", "ib-sriov", "rdma", "ipoib")
KINDS = (OWN, *REPLACED)
NO_IPAM = frozenset(
    (
        *KINDS,
        *("bridge", "ptp", "macvlan", "macvtap", "ipvlan", "vlan", "host-device", "loopback", "dummy", "tap"),
        *("portmap", "bandwidth", "firewall", "tuning", "sbr", "vrf", "route-override", "accelerated-bridge", "ovs"),
        *("flannel", "calico", "cilium-cni", "multus", "multus-shim"),
    )
)
"""Types of plugins that attach interfaces, or change what others attached. One that is given itself as its IPAM plugin
calls itself without end."""
WITH_MAC = (OWN, "sriov")
"""The others do not look at the MAC that a pod asks for, and Multus hands it to all plugins of a chain."""
WITH_DEVICE = (OWN, "sriov", "ib-sriov")
"""The others take no device by what Multus calls it besides deviceID: it may be a share of an adapter, such as 17, or a
subfunction."""
MODES = ("vf", "nic", "ipoib", "macvlan")
OF_SHARES = ("ipoib", "macvlan")
"""Modes that build upon an adapter, and so for who has a share of it."""
MACVLAN_MODES = ("bridge", "private", "vepa", "passthru")
LINK_STATES = ("auto", "enable", "disable")
MAX_MTU = 65520
MAX_ALTNAMES = 16
MAX_PFS = 64
_RATE = 2**31
_IFNAME = re.compile(r"(?!\.{1,2}$)[!-.0-9;-~]{1,15}")
_ALTNAME = re.compile(r"(?!\.{1,2}$)[!-.0-9;-~]{1,127}")
_AUXILIARY = re.compile(r"[a-z0-9_]{1,60}(?:\.[a-z0-9_]{1,60}){1,2}")
"""Such as mlx5_core.sf.4"""

# Given to every plugin by the runtime or by Multus, and of no meaning to this one.
_FOREIGN = frozenset(
    (
        *("capabilities", "args", "dns", "cniVersions", "disableCheck", "disableGC", "loadOnlyInlinedPlugins"),
        *("logLevel", "logFile"),
    )
)
# Those that the replaced plugins know themselves and that have no effect, there or here.
_EFFECTLESS = frozenset(
    (
        *("mtu", "pkey", "master", "vfid", "dpdkmode", "contifnames", "vlan_trunk", "ibkubernetesenabled"),
        *("deviceid", "pcibusid"),
    )
)
_HEEDED_IN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "master": ("nic", "ipoib", "macvlan"),
        "mac": ("vf", "nic", "macvlan"),
        "rdma": ("vf", "nic"),
        "pkey": ("vf", "ipoib"),
        "macvlanMode": ("macvlan",),
        **dict.fromkeys(("pf", "guid", "vfio", "functionReset", "spoofchk", "trust", "link_state"), ("vf",)),
        **dict.fromkeys(("vlan", "vlanQoS", "vlanProto", "min_tx_rate", "max_tx_rate"), ("vf",)),
    }
)
"""Key → the modes that heed it; a key that is not here has a meaning in all of them."""
_SETTINGS = ("mac", "vlan", "vlanQoS", "vlanProto", "min_tx_rate", "max_tx_rate", "spoofchk", "trust", "link_state")
_RARE = ("pf", "master", "pkey", "vfio", "functionReset", "altNames", "macvlanMode")
_OFF_ANYWHERE = frozenset(("rdma", "functionReset"))
"""To switch these off asks for nothing."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the keys of one type ask for."""

    mode: str = "vf"
    device: str | None = None
    pf: tuple[PfSelector, ...] = ()
    settings: VfSettings = field(default_factory=VfSettings)
    mtu: int | None = None
    master: str | None = None
    guid: str | None = None
    pkey: int | None = None
    rdma: bool | None = None
    vfio: bool | None = None
    function_reset: bool = False
    altnames: tuple[str, ...] = ()
    macvlan_mode: str = "bridge"


def read(kind: str, fields: Fields, runtime: Fields, args: Fields) -> Wanted:
    """Read the keys of a type. `runtime` is runtimeConfig, `args` is args.cni. Raises RequestInvalid."""
    return _READERS[kind](fields, runtime, args)


def refuse_unknown(fields: Fields) -> None:
    """Raise RequestInvalid for a key that nobody asked for and that means nothing elsewhere either."""
    for key in fields.unasked():
        if key not in _FOREIGN and not key.startswith("cni.dev/"):
            known = ", ".join(sorted(fields.asked))
            raise RequestInvalid(f"{shown(key)[1:-1]} is not a known key; known are: {known}")


def passed_over(fields: Fields) -> tuple[str, ...]:
    """List the keys that no plugin knows."""
    known = {key.lower() for key in _FOREIGN} | _EFFECTLESS
    return tuple(sorted(k for k in fields.unasked() if k.lower() not in known and not k.lower().startswith("cni.dev/")))


def _own(fields: Fields, runtime: Fields, args: Fields) -> Wanted:
    guids = runtime.guid("infinibandGUID"), args.guid("guid"), fields.guid("guid")
    mode = fields.word("mode", MODES) or "vf"
    found = Wanted(
        mode=mode,
        device=fields.device("deviceID", shares=mode in OF_SHARES),
        settings=_settings(fields, fields.switch),
        mtu=fields.whole("mtu", 68, MAX_MTU),
        guid=next(filter(None, guids), None),
        rdma=fields.flag("rdma"),
    )
    if fields.has_any(_RARE):  # a pod's start waits: what is seldom there is not looked at key by key
        found = replace(
            found,
            pf=_pf(fields),
            master=interface_name(fields, "master"),
            pkey=_pkey(fields),
            vfio=fields.flag("vfio"),
            function_reset=bool(fields.flag("functionReset")),
            altnames=_altnames(fields),
            macvlan_mode=fields.word("macvlanMode", MACVLAN_MODES) or "bridge",
        )
    _refuse_misplaced(found.mode, fields)
    return found


def _refuse_misplaced(mode: str, fields: Fields) -> None:
    """Raise RequestInvalid for a key that the mode cannot heed: nobody would notice that it is not in force."""
    for key, value in fields.document.items():
        modes = _HEEDED_IN.get(key, MODES)
        asks = value is not None and value != "" and not (value is False and key in _OFF_ANYWHERE)
        if asks and mode not in modes:
            raise RequestInvalid(f"{key} has no effect in mode {mode}, only in {' and '.join(modes)}: leave it out")


def _sriov(fields: Fields, runtime: Fields, args: Fields) -> Wanted:
    return Wanted(device=fields.device("deviceID"), settings=_settings(fields, fields.go_switch))


def _ib_sriov(fields: Fields, runtime: Fields, args: Fields) -> Wanted:
    guids = runtime.guid("infinibandGUID"), args.guid("guid"), fields.guid("guid")
    if fields.flag("ibKubernetesEnabled"):
        state = args.take("mellanox.infiniband.app", lambda v: isinstance(v, str), "a text")
        if state != "configured":
            raise RequestInvalid(
                f'args.cni["mellanox.infiniband.app"] must be configured, is {shown(state)}: ib-kubernetes has not'
                " set this pod up yet; see that it runs, or take ibKubernetesEnabled out"
            )
    return Wanted(
        device=fields.device("deviceID"),
        settings=VfSettings(link_state=fields.word("link_state", LINK_STATES)),
        guid=next(filter(None, guids), None),
        # Left to itself it goes along where RDMA devices are kept apart. The old plugin refuses to do without.
        rdma=True if fields.flag("rdmaIsolation") else None,
        vfio=True if fields.flag("vfioPciMode") else None,
    )


def _rdma(fields: Fields, runtime: Fields, args: Fields) -> Wanted:
    args.flag("debug")
    device = fields.text(
        "deviceID",
        "",
        lambda v: bool(_AUXILIARY.fullmatch(v)) or Fields({"deviceID": v}).device("deviceID") is not None,
        "a PCI address such as 0000:3b:02.1, or an auxiliary device such as mlx5_core.sf.4",
    )
    return Wanted(device=(device if is_slot_id(device) else device.lower()) or None)


def _ipoib(fields: Fields, runtime: Fields, args: Fields) -> Wanted:
    master = interface_name(fields, "master")
    if master is None:
        raise RequestInvalid("master is missing: name the IPoIB interface of the host that the child belongs to")
    return Wanted(mode="ipoib", master=master, mtu=fields.whole("mtu", 0, MAX_MTU) or None)


_READERS: Mapping[str, Callable[[Fields, Fields, Fields], Wanted]] = MappingProxyType(
    {OWN: _own, "sriov": _sriov, "ib-sriov": _ib_sriov, "rdma": _rdma, "ipoib": _ipoib}
)


def _settings(fields: Fields, switch: Callable[[str], bool | None]) -> VfSettings:
    if not fields.has_any(_SETTINGS):
        return NO_SETTINGS
    vlan = fields.whole("vlan", 0, 4094)
    qos = fields.whole("vlanQoS", 0, 7)
    proto = fields.word("vlanProto", ("802.1q", "802.1ad", "802.1Q", "802.1AD", "802.1Ad"))
    if not vlan and (qos or (proto or "").lower() == "802.1ad"):
        raise RequestInvalid("vlanQoS and vlanProto 802.1ad need a vlan from 1 to 4094")
    low, high = fields.whole("min_tx_rate", 0, _RATE), fields.whole("max_tx_rate", 0, _RATE)
    if low and high and low > high:
        raise RequestInvalid(f"min_tx_rate {low} is above max_tx_rate {high} (Mbit/s)")
    return VfSettings(
        mac=fields.mac("mac"),
        vlan=vlan,
        vlan_qos=qos,
        vlan_proto=proto.lower() if proto else None,
        min_tx_rate=low,
        max_tx_rate=high,
        spoofchk=switch("spoofchk"),
        trust=switch("trust"),
        link_state=fields.word("link_state", LINK_STATES),
    )


def interface_name(fields: Fields, key: str) -> str | None:
    """Read an interface's name. Raises RequestInvalid for a text that is none."""
    want = "an interface name of at most 15 characters"
    return fields.text(key, "", lambda v: bool(_IFNAME.fullmatch(v)), want) or None


def _pf(fields: Fields) -> tuple[PfSelector, ...]:
    want = (
        f"a list of 1 to {MAX_PFS} PFs, such as ens1f0 or ens1f0#0-3,7 (its interface or PCI address, then VF indices)"
    )
    names = fields.take("pf", lambda v: isinstance(v, list) and 0 < len(v) <= MAX_PFS and all(map(_is_pf, v)), want)
    return tuple(map(parse_pf, names or ()))


def _is_pf(value: object) -> bool:
    try:
        return isinstance(value, str) and parse_pf(value) is not None
    except ValueError:
        return False


def _pkey(fields: Fields) -> int | None:
    want = "a partition key from 1 to 0xffff, such as 0x8001"
    value = fields.take("pkey", lambda v: v == "" or _pkey_of(v) is not None, want)
    return _pkey_of(value) if value is not None and value != "" else None


def _pkey_of(value: object) -> int | None:
    """Read a partition key. Its top bit says full member; the other 15 must not all be zero."""
    if isinstance(value, str) and re.fullmatch(r"0[xX][0-9a-fA-F]{1,4}|[0-9]{1,5}", value):
        value = int(value, 16 if value[:2] in ("0x", "0X") else 10)
    if type(value) is not int or not 0 < value <= 0xFFFF or not value & 0x7FFF:
        return None
    return value


def _altnames(fields: Fields) -> tuple[str, ...]:
    names = fields.take(
        "altNames",
        lambda v: (
            isinstance(v, list)
            and len(v) <= MAX_ALTNAMES
            and all(isinstance(name, str) and _ALTNAME.fullmatch(name) for name in v)
        ),
        f"a list of at most {MAX_ALTNAMES} interface names of at most 127 characters each",
    )
    return tuple(dict.fromkeys(names or ()))
