"""The configuration: one YAML file, read into frozen values, with every problem listed at once.

Owns the types, their defaults and their rules. Whether a selector matches anything on a node is
`deviceplugin.resources`' business.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agent.errors import ConfigError
from agent.model.device import LinkLayer, is_pci_address

MAX_CONFIG_BYTES = 1 << 20
MAX_NETWORK_VALUES = 1000
MAX_NETWORK_DEPTH = 20
KINDS = ("hca", "vf", "gpu")
NETWORK_KINDS = ("vf", "hca")
SHARED_MODES = ("macvlan", "ipoib")
"""Modes that leave the adapter in the host, for all that share it."""
DEFAULT_SHARES = 63
"""A RoCE port has 128 GIDs and a sharer takes two (v1 and v2): about 63 pods fit one HCA."""

_RESOURCE_NAME = re.compile(
    r"(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)*[a-z0-9](?:[a-z0-9-]*[a-z0-9])?/"
    r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
)
_NETWORK_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_PATH = re.compile(r"(?:/(?!\.\.(?:/|$))[^/\0\n]*)+")
_HEX_ID = re.compile(r"(?:0x)?[0-9a-fA-F]{4}")


@dataclass(frozen=True, slots=True)
class PfSelector:
    """`ens1f0`, `ens1f0#0-7,9` or `0000:3b:00.0#0-3`: a PF and, optionally, some of its VFs."""

    pf: str
    vf_indices: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Select:
    """Which devices a resource takes: AND between fields, OR inside one. Empty: no condition."""

    vendors: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    drivers: tuple[str, ...] = ()
    pci_addresses: tuple[str, ...] = ()
    pf: tuple[PfSelector, ...] = ()
    netdevs: tuple[str, ...] = ()
    rdma_devices: tuple[str, ...] = ()
    link_layers: tuple[LinkLayer, ...] = ()


@dataclass(frozen=True, slots=True)
class Resource:
    name: str
    kind: str
    select: Select = Select()
    shares: int = DEFAULT_SHARES
    """hca only: how many units one HCA offers."""
    management: bool = False
    """hca and vf: hand out umad and issm devices too."""
    network: str | None = None
    """vf and hca: the entry of `networks` that a VF joins when the CNI request names no device; or that says what
    interface a pod gets upon the netdev of its HCA."""


@dataclass(frozen=True, slots=True)
class Network:
    """How a VF is set up in a pod. `netconf` holds CNI network configuration keys, unparsed."""

    name: str
    netconf: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Endpoints:
    address: str = "127.0.0.1"
    port: int = 9808


@dataclass(frozen=True, slots=True)
class Topology:
    publish: bool = False
    """Publish a NodeResourceTopology object for this node."""
    coalesce_seconds: float = 2.0
    heartbeat_seconds: float = 600.0
    start_spread_seconds: float = 30.0
    """The first write comes at a random moment within this time, so that a cluster's nodes do not write at once."""
    kubelet_config: Path = Path("/var/lib/kubelet/config.yaml")


@dataclass(frozen=True, slots=True)
class Config:
    resources: tuple[Resource, ...] = ()
    networks: tuple[Network, ...] = ()
    endpoints: Endpoints = Endpoints()
    topology: Topology = Topology()
    kubelet_dir: Path = Path("/var/lib/kubelet")
    state_dir: Path = Path("/var/lib/nodefabric")
    run_dir: Path = Path("/run/nodefabric")
    netns_folders: tuple[Path, ...] = (Path("/var/run/netns"), Path("/run/netns"), Path("/var/run/docker/netns"))
    """Where the container runtime binds the network namespaces of pods."""
    runtime_socket: Path | None = None
    """The container runtime's socket, to ask which sandboxes live; without it kubelet's word alone counts."""
    rescan_seconds: float = 60.0
    source: str = field(default="defaults", compare=False)

    def network(self, name: str) -> Network | None:
        return next((n for n in self.networks if n.name == name), None)

    @property
    def ledger_path(self) -> Path:
        return self.state_dir / "ledger.db"

    @property
    def spool_dir(self) -> Path:
        return self.state_dir / "spool"

    @property
    def cni_socket(self) -> Path:
        return self.run_dir / "cni.sock"

    @property
    def admin_socket(self) -> Path:
        return self.run_dir / "admin.sock"


_TOPOLOGY = Topology()
_DEFAULTS = Config()


def load(path: Path) -> Config:
    """Read the configuration file. Raises ConfigError with all that is wrong in it."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}"]) from error
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(str(path), [f"is larger than {MAX_CONFIG_BYTES} bytes"])
    return parse(text, str(path))


def parse(text: str | bytes, source: str) -> Config:
    """Read configuration text. Raises ConfigError with all that is wrong in it."""
    try:
        document = yaml.load(text, _Loader)  # noqa: S506 -- a SafeLoader that also refuses repeated keys
    except Exception as error:  # for a bad tag or number PyYAML raises whatever int(), date() or a lookup raise
        said = (
            " ".join(str(error).split())
            .replace(' in "<byte string>",', " in")
            .replace(' in "<unicode string>",', " in")
        )
        raise ConfigError(source, [f"is not YAML: {said or type(error).__name__}"]) from error
    problems: list[str] = []
    config = _config(_Reader({} if document is None else document, "", problems), source)
    if problems:
        raise ConfigError(source, problems)
    return config


def describe(config: Config) -> str:
    """Return the configuration in effect, defaults included, as one line of JSON."""

    def plain(value: Any) -> Any:
        if isinstance(value, frozenset):
            return sorted(value)
        return value.value if isinstance(value, LinkLayer) else str(value)

    return json.dumps(asdict(config), default=plain)


class _Loader(yaml.SafeLoader):
    """Plain YAML in which no key may stand twice in a mapping: the last one would win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key} stands twice", node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Reader:
    """Typed access to one mapping of the document, noting problems with their path."""

    def __init__(self, value: Any, path: str, problems: list[str]) -> None:
        self.path = path
        self.problems = problems
        self.asked: set[str] = set()
        if isinstance(value, dict) and all(isinstance(k, str) for k in value):
            self.value: dict[str, Any] = value
        else:
            self.value = {}
            self.note("", f"must be a mapping with text keys, is {_kind(value)}")

    def at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path and key else self.path + key

    def note(self, key: str, text: str) -> None:
        self.problems.append(f"{self.at(key) or 'the document'}: {text}")

    def take(self, key: str, default: Any, want: str, ok: Callable[[Any], bool]) -> Any:
        self.asked.add(key)
        if key not in self.value:
            return default
        value = self.value[key]
        if ok(value):
            return value
        self.note(key, f"must be {want}, is {_kind(value)}")
        return default

    def text(self, key: str, default: Any = None, want: str = "text", pattern: re.Pattern[str] | None = None) -> Any:
        return self.take(
            key, default, want, lambda v: isinstance(v, str) and (pattern is None or bool(pattern.fullmatch(v)))
        )

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.take(key, default, "true or false", lambda v: isinstance(v, bool)))

    def whole(self, key: str, default: int, low: int, high: int) -> int:
        want = f"a whole number from {low} to {high}"
        return int(self.take(key, default, want, lambda v: type(v) is int and low <= v <= high))

    def seconds(self, key: str, default: float, low: float, high: float) -> float:
        want = f"a number of seconds from {low:g} to {high:g}"
        return float(self.take(key, default, want, lambda v: type(v) in (int, float) and low <= v <= high))

    def path_to(self, key: str, default: Path | None) -> Any:
        found = self.text(key, None, "an absolute path", _PATH)
        return default if found is None else Path(found)

    def section(self, key: str) -> _Reader:
        self.asked.add(key)
        return _Reader(self.value.get(key, {}), self.at(key), self.problems)

    def sections(self, key: str) -> list[_Reader]:
        items = self.take(key, [], "a list", lambda v: isinstance(v, list))
        return [_Reader(item, f"{self.at(key)}[{i}]", self.problems) for i, item in enumerate(items)]

    def strings(self, key: str, want: str, convert: Callable[[str], Any]) -> tuple[Any, ...]:
        """A list of texts, each converted; a conversion says no with ValueError."""
        items = self.take(key, [], "a list", lambda v: isinstance(v, list))
        found = []
        for i, item in enumerate(items):
            try:
                if not isinstance(item, str):
                    raise ValueError(item)
                found.append(convert(item))
            except ValueError:
                self.note(f"{key}[{i}]", f"must be {want}, is {_kind(item)}")
        return tuple(found)

    def done(self) -> None:
        for key in self.value:
            if key not in self.asked:
                known = ", ".join(sorted(self.asked))
                self.note(key, f"is not a known key here; known are: {known}")


def _kind(value: Any) -> str:
    # Aliases can make a short document endless when written out, hence not repr().
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother = 2, 80, 80
    try:
        text = short.repr(value)
    except ValueError:
        return "a number too long to show"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_ip_address(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(ipaddress.ip_address(value))
    except ValueError:
        return False


def _is_json(value: Any) -> bool:
    """Tell whether JSON can express the value, in a bounded size: aliases can make it endless."""
    waiting = [(value, 0)]
    for _ in range(MAX_NETWORK_VALUES):
        if not waiting:
            return True
        item, depth = waiting.pop()
        if isinstance(item, dict) and all(isinstance(key, str) for key in item):
            waiting.extend((inner, depth + 1) for inner in item.values())
        elif isinstance(item, list):
            waiting.extend((inner, depth + 1) for inner in item)
        elif isinstance(item, float):
            if not math.isfinite(item):
                return False
        elif type(item) is int:
            if abs(item) >= 1 << 63:
                return False
        elif item is not None and not isinstance(item, str | bool):
            return False
        if depth > MAX_NETWORK_DEPTH:
            return False
    return False


def _config(top: _Reader, source: str) -> Config:
    networks = tuple(_network(r) for r in top.sections("networks"))
    resources = tuple(_resource(r) for r in top.sections("resources"))
    _unique(top, "networks", [n.name for n in networks])
    _unique(top, "resources", [r.name for r in resources])
    for i, resource in enumerate(resources):
        if resource.network is None:
            continue
        network = next((n for n in networks if n.name == resource.network), None)
        if network is None:
            top.note(f"resources[{i}].network", f"{resource.network!r} is not among the networks")
            continue
        mode = network.netconf.get("mode") or "vf"
        if resource.kind == "hca" and mode not in SHARED_MODES:
            top.note(
                f"resources[{i}].network",
                f"{resource.network!r} has mode {mode}, which takes the adapter from the others that share it: an hca"
                f" needs a network of mode {' or '.join(SHARED_MODES)}",
            )
        if resource.kind == "vf" and mode in SHARED_MODES:
            top.note(f"resources[{i}].network", f"{resource.network!r} has mode {mode}, which is for kind hca, not vf")
    http = top.section("endpoints")
    topology = top.section("topology")
    config = Config(
        resources=resources,
        networks=networks,
        endpoints=Endpoints(
            address=http.take("address", "127.0.0.1", "an IP address", _is_ip_address),
            port=http.whole("port", 9808, 0, 65535),
        ),
        topology=Topology(
            publish=topology.flag("publish", False),
            coalesce_seconds=topology.seconds("coalesceSeconds", 2.0, 0, 60),
            heartbeat_seconds=topology.seconds("heartbeatSeconds", 600.0, 10, 86400),
            start_spread_seconds=topology.seconds("startSpreadSeconds", 30.0, 0, 600),
            kubelet_config=topology.path_to("kubeletConfig", _TOPOLOGY.kubelet_config),
        ),
        kubelet_dir=top.path_to("kubeletDir", _DEFAULTS.kubelet_dir),
        state_dir=top.path_to("stateDir", _DEFAULTS.state_dir),
        run_dir=top.path_to("runDir", _DEFAULTS.run_dir),
        netns_folders=top.strings("netnsDirs", "an absolute path", _absolute) or _DEFAULTS.netns_folders,
        runtime_socket=top.path_to("runtimeSocket", None),
        rescan_seconds=top.seconds("rescanSeconds", 60.0, 1, 3600),
        source=source,
    )
    for reader in (http, topology, top):
        reader.done()
    return config


def _absolute(text: str) -> Path:
    if not _PATH.fullmatch(text):
        raise ValueError(text)
    return Path(text)


def _unique(top: _Reader, key: str, names: list[str]) -> None:
    for i, name in enumerate(names):
        if name and name in names[:i]:
            top.note(f"{key}[{i}].name", f"{name!r} is used by {key}[{names.index(name)}] already")


def _network(reader: _Reader) -> Network:
    name = reader.text("name", None, "a lower-case DNS label", _NETWORK_NAME)
    if "name" not in reader.value:
        reader.note("name", "is missing")
    netconf = {k: v for k, v in reader.value.items() if k != "name"}
    for key, value in netconf.items():
        if not _is_json(value):
            reader.note(key, f"must be plain JSON values, not dates or the like, is {_kind(value)}")
    return Network(name or "", netconf)


def _resource(reader: _Reader) -> Resource:
    name = reader.text("name", None, "domain/name, such as rdma/hca", _RESOURCE_NAME)
    kind = reader.take("kind", None, f"one of {', '.join(KINDS)}", lambda v: v in KINDS)
    for key in ("name", "kind"):
        if key not in reader.value:
            reader.note(key, "is missing")
    resource = Resource(
        name=name or "",
        kind=kind or "",
        select=_select(reader.section("select"), kind),
        shares=reader.whole("shares", DEFAULT_SHARES, 1, 10_000) if kind == "hca" else DEFAULT_SHARES,
        management=reader.flag("management", False) if kind in ("hca", "vf") else False,
        network=reader.text("network", None, "the name of a network", _NETWORK_NAME) if kind in NETWORK_KINDS else None,
    )
    if kind:
        reader.done()
    return resource


def _select(reader: _Reader, kind: str | None) -> Select:
    if kind == "gpu":
        for key in reader.value.keys() & {"pf", "netdevs", "rdmaDevices", "linkLayer"}:
            reader.note(key, "matches no GPU; a GPU is selected by vendors, devices, drivers or pciAddresses")
    select = Select(
        vendors=reader.strings("vendors", "a four-digit hexadecimal ID such as 15b3", _hex_id),
        devices=reader.strings("devices", "a four-digit hexadecimal ID such as 101e", _hex_id),
        drivers=reader.strings("drivers", "a driver name", _word),
        pci_addresses=reader.strings("pciAddresses", "a PCI address such as 0000:3b:00.0", _address),
        pf=reader.strings("pf", "NAME or NAME#0-7,9 (a PF's interface or PCI address, then VF indices)", parse_pf),
        netdevs=reader.strings("netdevs", "an interface name", _word),
        rdma_devices=reader.strings("rdmaDevices", "an RDMA device name such as mlx5_0", _word),
        link_layers=reader.strings("linkLayer", "InfiniBand or Ethernet", LinkLayer),
    )
    reader.done()
    return select


def _hex_id(text: str) -> int:
    if not _HEX_ID.fullmatch(text):
        raise ValueError(text)
    return int(text, 16)


def _word(text: str) -> str:
    if not re.fullmatch(r"[^\s/]{1,64}", text) or text in (".", ".."):
        raise ValueError(text)
    return text


def _address(text: str) -> str:
    if not is_pci_address(text.lower()):
        raise ValueError(text)
    return text.lower()


def parse_pf(text: str) -> PfSelector:
    """Read `NAME` or `NAME#0-7,9`. Raises ValueError for anything else."""
    name, sharp, ranges = text.partition("#")
    _word(name)
    if not sharp:
        return PfSelector(name)
    indices: set[int] = set()
    for part in ranges.split(","):
        low, dash, high = part.partition("-")
        if not part.isascii() or not low.isdecimal() or (dash and not high.isdecimal()) or len(part) > 11:
            raise ValueError(text)
        first, last = int(low), int(high if dash else low)
        if not first <= last <= 65535:
            raise ValueError(text)
        indices.update(range(first, last + 1))
    return PfSelector(name, frozenset(indices))
