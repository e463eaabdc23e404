"""A CNI network configuration, read and checked.

Accepts what libcni, Multus and kubelet's chain put in, and the keys of the SR-IOV plugin it
replaces. An unknown key is an error that names it: a typo must not silently leave a VF open.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from agent.errors import RequestInvalid
from agent.model.allocation import VfSettings
from agent.model.device import is_pci_address

SUPPORTED_VERSIONS = ("0.3.1", "0.4.0", "1.0.0", "1.1.0")
MAX_MTU = 65520
_MAC = re.compile(r"[0-9a-f]{2}(?::[0-9a-f]{2}){5}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")
_PLUGIN_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

# Given to every plugin by the runtime or by Multus, and of no meaning to this one.
_FOREIGN_KEYS = frozenset(
    ("capabilities", "args", "dns", "disableCheck", "disableGC", "loadOnlyInlinedPlugins", "logLevel", "logFile")
)


@dataclass(frozen=True, slots=True)
class NetConf:
    """What one call asks for."""

    cni_version: str
    name: str
    device: str | None
    """PCI address; None to take the pod's granted devices."""
    settings: VfSettings
    mtu: int | None
    ipam: Mapping[str, Any] | None
    for_ipam: Mapping[str, Any]
    """What the pod asks of the IPAM plugin (runtimeConfig.ips, args.cni.ips …), in the keys it came in."""
    prev_result: Mapping[str, Any] | None
    valid_attachments: tuple[tuple[str, str], ...] | None
    """(container ID, interface) pairs that GC must keep; None outside GC."""

    @property
    def mac(self) -> str | None:
        return self.settings.mac


def parse(text: bytes, cni_args: Mapping[str, str] | None = None) -> NetConf:
    """Read the configuration of a CNI call. Raises RequestInvalid with the path of what is wrong."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestInvalid(f"the network configuration is not JSON: {error}") from error
    return from_document(document, cni_args or {})


def from_document(document: Any, cni_args: Mapping[str, str] | None = None) -> NetConf:
    """Read a decoded configuration. Raises RequestInvalid with the path of what is wrong."""
    fields = _Fields(document)
    version = fields.text("cniVersion", "0.3.1", lambda v: v in SUPPORTED_VERSIONS, " or ".join(SUPPORTED_VERSIONS))
    name = fields.text(
        "name", "", lambda v: bool(_NAME.fullmatch(v)), "a network name (letters, digits, '.', '_', '-')"
    )
    fields.text("type", "nodefabric", lambda v: bool(_PLUGIN_TYPE.fullmatch(v)), "a plugin type")
    fields.text("mode", "vf", lambda v: v == "vf", "vf")
    runtime = _Fields(fields.mapping("runtimeConfig") or {}, "runtimeConfig")
    # All are read before one is chosen: Multus gives deviceID and pciBusID at once.
    devices = fields.address("deviceID"), fields.address("pciBusID"), runtime.address("deviceID")
    macs = runtime.mac("mac"), _args_mac(cni_args or {}), fields.mac("mac")
    settings = replace(_settings(fields), mac=next(filter(None, macs), None))
    ipam = fields.mapping("ipam")
    if ipam is not None and ipam:
        kind = ipam.get("type")
        if not isinstance(kind, str) or not _PLUGIN_TYPE.fullmatch(kind):
            raise RequestInvalid(f"ipam.type must be the name of an IPAM plugin, is {kind!r}")
    previous = fields.mapping("prevResult")
    _check_result(_Fields(previous or {}, "prevResult"))
    valid = fields.take("cni.dev/valid-attachments", lambda v: isinstance(v, list), "a list")
    mtu = fields.whole("mtu", 68, MAX_MTU)
    fields.refuse_unknown()
    return NetConf(
        cni_version=version,
        name=name,
        device=next(filter(None, devices), None),
        settings=settings,
        mtu=mtu,
        ipam=ipam or None,
        for_ipam={key: document[key] for key in ("runtimeConfig", "args") if document.get(key) is not None},
        prev_result=previous,
        valid_attachments=None if valid is None else tuple(_valid_attachment(item, i) for i, item in enumerate(valid)),
    )


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
    )


class _Fields:
    """Typed access to one JSON object. None stands for an absent key: Go writes null for both."""

    def __init__(self, document: Any, path: str = "") -> None:
        self.path = path
        if not isinstance(document, dict):
            raise RequestInvalid(f"{path or 'the network configuration'} must be an object, is {_shown(document)}")
        self.document: dict[str, Any] = document
        self.asked: set[str] = set()

    def take(self, key: str, ok: Callable[[Any], bool], want: str) -> Any:
        self.asked.add(key)
        value = self.document.get(key)
        if value is not None and not ok(value):
            where = f"{self.path}.{key}" if self.path else key
            raise RequestInvalid(f"{where} must be {want}, is {_shown(value)}")
        return value

    def text(self, key: str, default: str, ok: Callable[[str], bool], want: str) -> str:
        value = self.take(key, lambda v: isinstance(v, str) and (v == "" or ok(v)), want)
        return value or default

    def whole(self, key: str, low: int, high: int) -> int | None:
        value: int | None = self.take(
            key, lambda v: type(v) is int and low <= v <= high, f"a whole number from {low} to {high}"
        )
        return value

    def mapping(self, key: str) -> dict[str, Any] | None:
        value: dict[str, Any] | None = self.take(key, lambda v: isinstance(v, dict), "an object")
        return value

    def switch(self, key: str) -> bool | None:
        value = self.take(key, lambda v: isinstance(v, bool) or v in ("", "on", "off"), '"on" or "off"')
        return None if value in (None, "") else value in (True, "on")

    def word(self, key: str, words: tuple[str, ...]) -> str | None:
        value = self.take(key, lambda v: v == "" or v in words, " or ".join(words))
        return value or None

    def mac(self, key: str) -> str | None:
        want = "a unicast MAC address such as 02:00:00:00:00:01"
        value = self.take(key, lambda v: isinstance(v, str) and (v == "" or _is_unicast(v)), want)
        return value.lower() if value else None

    def address(self, key: str) -> str | None:
        want = "a PCI address such as 0000:3b:02.1"
        value = self.take(key, lambda v: isinstance(v, str) and (v == "" or is_pci_address(v.lower())), want)
        return value.lower() if value else None

    def refuse_unknown(self) -> None:
        for key in self.document:
            if key not in self.asked and key not in _FOREIGN_KEYS and not key.startswith("cni.dev/"):
                known = ", ".join(sorted(self.asked))
                raise RequestInvalid(f"{key} is not a known key; known are: {known}")


def _settings(fields: _Fields) -> VfSettings:
    vlan = fields.whole("vlan", 0, 4094)
    qos = fields.whole("vlanQoS", 0, 7)
    proto = fields.word("vlanProto", ("802.1q", "802.1ad", "802.1Q"))
    if not vlan and (qos or (proto or "").lower() == "802.1ad"):
        raise RequestInvalid("vlanQoS and vlanProto 802.1ad need a vlan from 1 to 4094")
    low, high = fields.whole("min_tx_rate", 0, 2**31), fields.whole("max_tx_rate", 0, 2**31)
    if low and high and low > high:
        raise RequestInvalid(f"min_tx_rate {low} is above max_tx_rate {high} (Mbit/s)")
    return VfSettings(
        vlan=vlan,
        vlan_qos=qos,
        vlan_proto=proto.lower() if proto else None,
        min_tx_rate=low,
        max_tx_rate=high,
        spoofchk=fields.switch("spoofchk"),
        trust=fields.switch("trust"),
        link_state=fields.word("link_state", ("auto", "enable", "disable")),
    )


def _check_result(fields: _Fields) -> None:
    for key in ("interfaces", "ips", "routes"):
        fields.take(
            key, lambda v: isinstance(v, list) and all(isinstance(item, dict) for item in v), "a list of objects"
        )
    fields.mapping("dns")


def _args_mac(cni_args: Mapping[str, str]) -> str | None:
    value = cni_args.get("MAC")
    if value and not _is_unicast(value):
        raise RequestInvalid(f"CNI_ARGS MAC must be a unicast MAC address, is {_shown(value)}")
    return value.lower() if value else None


def _is_unicast(text: str) -> bool:
    text = text.lower()
    return bool(_MAC.fullmatch(text)) and not int(text[:2], 16) & 1 and text != "00:00:00:00:00:00"


def _valid_attachment(item: Any, index: int) -> tuple[str, str]:
    if isinstance(item, dict):
        pair = (item.get("containerID"), item.get("ifname"))
        if isinstance(pair[0], str) and isinstance(pair[1], str):
            return pair[0], pair[1]
    raise RequestInvalid(f"cni.dev/valid-attachments[{index}] must hold containerID and ifname, is {_shown(item)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
