"""Reads the configuration file, with every problem listed at once."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agent.config.endpoints import read_endpoints
from agent.config.health import read_health
from agent.config.networks import read_network
from agent.config.reader import PATH, Reader, read_document
from agent.config.resources import read_resource
from agent.config.topology import read_topology
from agent.config.values import SHARED_MODES, Config, Network, Resource
from agent.errors import ConfigError
from agent.model.device import LinkLayer

MAX_CONFIG_BYTES = 1 << 20


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
    document = read_document(text, source)
    problems: list[str] = []
    config = read_config(Reader({} if document is None else document, "", problems), source)
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


def read_config(top: Reader, source: str) -> Config:
    """Read the whole document."""
    plain = Config()
    networks = tuple(read_network(r) for r in top.sections("networks", about="How VFs are set up in pods"))
    resources = tuple(read_resource(r) for r in top.sections("resources", about="What kubelet is offered"))
    _unique(top, "networks", [n.name for n in networks])
    _unique(top, "resources", [r.name for r in resources])
    for i, resource in enumerate(resources):
        _check_network(top, i, resource, networks)
    sections = [top.section(key) for key in ("endpoints", "topology", "health")]
    config = Config(
        resources=resources,
        networks=networks,
        endpoints=read_endpoints(sections[0]),
        topology=read_topology(sections[1]),
        health=read_health(sections[2]),
        kubelet_dir=top.path_to("kubeletDir", plain.kubelet_dir, about="The kubelet's folder"),
        state_dir=top.path_to("stateDir", plain.state_dir, about="Where the agent keeps its books; survives a reboot"),
        run_dir=top.path_to("runDir", plain.run_dir, about="Where the agent's sockets are; empty after a reboot"),
        netns_folders=top.strings(
            "netnsDirs",
            "an absolute path",
            _absolute,
            about="Where the container runtime binds the network namespaces of pods",
        )
        or plain.netns_folders,
        runtime_socket=top.path_to("runtimeSocket", None, about="The container runtime's CRI socket"),
        rescan_seconds=top.seconds("rescanSeconds", plain.rescan_seconds, 1, 3600, about="Time between full scans"),
        source=source,
    )
    for reader in (*sections, top):
        reader.done()
    return config


def _check_network(top: Reader, i: int, resource: Resource, networks: tuple[Network, ...]) -> None:
    if resource.network is None:
        return
    kind = resource.nic.kind if resource.kind == "rail" else resource.kind
    network = next((n for n in networks if n.name == resource.network), None)
    if network is None:
        top.note(f"resources[{i}].network", f"{resource.network!r} is not among the networks")
        return
    mode = network.netconf.get("mode") or "vf"
    if kind == "hca" and mode not in SHARED_MODES:
        top.note(
            f"resources[{i}].network",
            f"{resource.network!r} has mode {mode}, which takes the adapter from the others that share it: an hca"
            f" needs a network of mode {' or '.join(SHARED_MODES)}",
        )
    if kind == "vf" and mode in SHARED_MODES:
        top.note(f"resources[{i}].network", f"{resource.network!r} has mode {mode}, which is for kind hca, not vf")


def _absolute(text: str) -> Path:
    if not PATH.fullmatch(text):
        raise ValueError(text)
    return Path(text)


def _unique(top: Reader, key: str, names: list[str]) -> None:
    for i, name in enumerate(names):
        if name and name in names[:i]:
            top.note(f"{key}[{i}].name", f"{name!r} is used by {key}[{names.index(name)}] already")
