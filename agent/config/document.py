"""Reads the configuration file, with every problem listed at once."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from agent.config.cni import read_cni
from agent.config.compat_shared import read_shared
from agent.config.compat_sriov import DEFAULT_PREFIX, read_sriov
from agent.config.covering import covered
from agent.config.endpoints import read_endpoints
from agent.config.health import read_health
from agent.config.networks import read_network
from agent.config.protecting import contradictions
from agent.config.reader import PATH, Reader
from agent.config.resources import read_resource
from agent.config.restart import read_restart
from agent.config.shape import Shape, read_any
from agent.config.topology import read_topology
from agent.config.values import SHARED_MODES, Config, Network, Resource
from agent.errors import ConfigError
from agent.model.device import LinkLayer, drives_for_programs
from agent.model.masking import masked

MAX_CONFIG_BYTES = 1 << 20
MAX_RESCAN_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Flags:
    """What the flags of another project's device plugin say besides its configuration."""

    sriov_prefix: str = DEFAULT_PREFIX
    use_cdi: bool = False


def load(path: Path, flags: Flags | None = None) -> Config:
    """Read a configuration file, ours or another project's. Raises ConfigError with all that is wrong in it."""
    return parse(read_file(path), str(path), flags)


def load_legible(path: Path) -> tuple[Config, ConfigError | None]:
    """Read what is right of a configuration file, with the error: a running agent may have refused that version.

    Where it is wrong it has its defaults. Raises ConfigError if there is no such file.
    """
    text, source = read_file(path), str(path)
    try:
        return parse(text, source), None
    except ConfigError as error:
        return _legible(text, source), error


def _legible(text: bytes, source: str) -> Config:
    try:
        shape, document = read_any(text, source)
    except ConfigError:
        return Config(source=source)
    own = document if shape is Shape.OWN and document is not None else {}
    return read_config(Reader(own, "", []), source)


def read_file(path: Path) -> bytes:
    """Read a file of configuration. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}"]) from error
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(str(path), [f"is larger than {MAX_CONFIG_BYTES} bytes"])
    return text


def parse(text: str | bytes, source: str, flags: Flags | None = None) -> Config:
    """Read configuration text, ours or another project's. Raises ConfigError with all that is wrong in it."""
    shape, document = read_any(text, source)
    problems: list[str] = []
    if shape is Shape.OWN:
        config = read_config(Reader({} if document is None else document, "", problems), source)
    else:
        config = _of_others(shape, document, problems, source, flags or Flags())
    if problems:
        raise ConfigError(source, problems)
    return config


def _of_others(shape: Shape, document: Any, problems: list[str], source: str, flags: Flags) -> Config:
    warnings: list[str] = []
    interval = None
    if shape is Shape.SRIOV:
        resources = read_sriov(document, problems, warnings, prefix=flags.sriov_prefix, use_cdi=flags.use_cdi)
    else:
        resources, interval = read_shared(document, problems, warnings, use_cdi=flags.use_cdi)
    plain = Config(resources=resources, source=source, warnings=tuple(warnings))
    return plain if interval is None else replace(plain, rescan_seconds=float(min(interval, MAX_RESCAN_SECONDS)))


def describe(config: Config) -> str:
    """Return the configuration in effect, defaults included, as one line of JSON, without secrets.

    Of resources and networks only what says something: most of a selector is empty.
    """
    document = asdict(config)
    for key in ("resources", "networks"):
        document[key] = [_telling(item) for item in document[key]]

    def plain(value: Any) -> Any:
        if isinstance(value, frozenset):
            return sorted(value)
        return value.value if isinstance(value, LinkLayer) else str(value)

    return json.dumps(masked(document), default=plain)


def _telling(value: Any) -> Any:
    """Leave out what is empty, at any depth."""
    if isinstance(value, dict):
        shorter = {key: _telling(inner) for key, inner in value.items()}
        return {key: inner for key, inner in shorter.items() if inner not in (None, "", (), [], {}, False)}
    return [_telling(inner) for inner in value] if isinstance(value, list | tuple) else value


def read_config(top: Reader, source: str) -> Config:
    """Read the whole document."""
    plain = Config()
    networks = tuple(read_network(r) for r in top.sections("networks", about="How VFs are set up in pods"))
    resources = tuple(read_resource(r) for r in top.sections("resources", about="What kubelet is offered"))
    _unique(top, "networks", [n.name for n in networks])
    _unique(top, "resources", [r.name for r in resources])
    for i, resource in enumerate(resources):
        _check_network(top, i, resource, networks)
        _check_environment(top, i, resources)
    unread = {i for i in range(len(resources)) if _is_unread(top, i)}
    for i, where, j in covered(resources):
        if i in unread or j in unread:
            continue
        top.note(
            f"resources[{i}].{where}",
            f"selects nothing that resources[{j}]{_named(resources[j])} does not select too, and a device serves one"
            " resource: narrow one of the two selectors",
        )
    sections = [
        top.section("endpoints", about="Where the agent answers HTTP"),
        top.section("topology", about="What is told to schedulers"),
        top.section("health", about="How patient the agent is with ill devices"),
        top.section("cni", about="Which devices networks may name"),
        top.section("restart", about="What the agent does before an end that is planned"),
    ]
    cni = read_cni(sections[3])
    for path, text in contradictions(cni.protect, resources, networks):
        top.note(path, text)
    config = Config(
        resources=resources,
        networks=networks,
        endpoints=read_endpoints(sections[0]),
        topology=read_topology(sections[1]),
        health=read_health(sections[2]),
        cni=cni,
        restart=read_restart(sections[4]),
        kubelet_dir=top.path_to("kubeletDir", plain.kubelet_dir, about="The kubelet's folder"),
        state_dir=top.path_to("stateDir", plain.state_dir, about="Where the agent keeps its books; survives a reboot"),
        run_dir=top.path_to("runDir", plain.run_dir, about="Where the agent's sockets are; empty after a reboot"),
        cdi_dir=top.path_to("cdiDir", plain.cdi_dir, about="Where the container runtime looks for CDI specs"),
        netns_folders=top.strings(
            "netnsDirs",
            "an absolute path",
            _absolute,
            about="Where the container runtime binds the network namespaces of pods",
        )
        or plain.netns_folders,
        runtime_socket=top.path_to("runtimeSocket", None, about="The container runtime's CRI socket"),
        rescan_seconds=top.seconds(
            "rescanSeconds", plain.rescan_seconds, 1, MAX_RESCAN_SECONDS, about="Time between full scans"
        ),
        source=source,
    )
    for reader in (*sections, top):
        reader.done()
    return config


def _is_unread(top: Reader, i: int) -> bool:
    """Tell whether a resource selects other devices than meant, as something of its selectors was refused."""
    paths = tuple(f"resources[{i}].{key}" for key in ("kind", "select", "gpu", "nic"))
    return any(problem.startswith(paths) for problem in top.problems)


def _named(resource: Resource) -> str:
    return f" ({resource.name})" if resource.name else ""  # empty where the name itself is wrong


def _check_environment(top: Reader, i: int, resources: tuple[Resource, ...]) -> None:
    """Note a variable that two resources of one container would both set: kubelet keeps either value."""
    if resources[i].binding == "late":
        return
    for word in resources[i].environment:
        for j, other in enumerate(resources[:i]):
            if word in other.environment and other.binding != "late":
                top.note(
                    f"resources[{i}].environment",
                    f"{word} is set by resources[{j}] ({other.name}) already, and for a container that asks for both"
                    " kubelet would keep either: set it at one of them, or give both binding: late",
                )


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
    drivers = (resource.nic.select if resource.kind == "rail" else resource.select).drivers
    if network.netconf.get("rdma") is True and drivers and all(map(drives_for_programs, drivers)):
        top.note(
            f"resources[{i}].network",
            f"{resource.network!r} says rdma: true, and the resource selects devices of {' and '.join(drivers)}, which"
            " makes no RDMA device: leave rdma out, or take another network",
        )


def _absolute(text: str) -> Path:
    if not PATH.fullmatch(text):
        raise ValueError(text)
    return Path(text)


def _unique(top: Reader, key: str, names: list[str]) -> None:
    for i, name in enumerate(names):
        if name and name in names[:i]:
            top.note(f"{key}[{i}].name", f"{name!r} is used by {key}[{names.index(name)}] already")
