"""What of a configuration does not go together, whatever node it meets. Pure.

Resources that select the same devices show on a node only: `overlap_problems` in `agent/offer/selection.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agent.config.networks import OF_SHARES, Network, misplaced_in
from agent.config.resources import Resource, Select
from agent.config.template import possible, problems
from agent.config.values import Config
from agent.model.device import drives_for_programs


def contradictions(config: Config) -> Iterator[tuple[str, str]]:
    """List what does not go together: a path of the document, and what is wrong there."""
    resources, networks = config.resources, config.networks
    yield from _repeated("networks", [n.name for n in networks])
    yield from _repeated("resources", [r.name for r in resources])
    for i, resource in enumerate(resources):
        for where, name in resource.networks.items():
            yield from ((f"resources[{i}].network{where}", text) for text in _of_network(resource, name, networks))
        yield from _misplaced(resource, networks)
        yield from ((f"resources[{i}].environment", text) for text in _of_environment(i, resources))
        yield from ((f"resources[{i}].mounts", text) for text in _of_mounts(resource))
    yield from _mixed(networks)
    for i, network in enumerate(networks):
        for where, text in problems(network, possible(config.topology.rails)):
            yield f"networks[{i}]{'.' if where else ''}{where}", text
        if (master := network.setup.master) in config.cni.protect:
            yield f"networks[{i}].master", f"{master} carries no pod's interface, since cni.protect names it"


def _repeated(key: str, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    for i, name in enumerate(names):
        if name and name in names[:i]:
            yield f"{key}[{i}].name", f"{name!r} is used by {key}[{names.index(name)}] already"


def _of_mounts(resource: Resource) -> Iterator[str]:
    paths = [mount.path for mount in resource.mounts]
    for path in sorted(set(paths)):
        if paths.count(path) > 1:
            yield f"gives {path} in the container twice: name it once"


def _of_environment(i: int, resources: Sequence[Resource]) -> Iterator[str]:
    """List variables that two resources of one container would both set: kubelet keeps either value."""
    if _sums_up(resources[i]):
        return
    for word in resources[i].environment:
        for j, other in enumerate(resources[:i]):
            if word in other.environment and not _sums_up(other):
                yield (
                    f"{word} is set by resources[{j}] ({other.name}) already, and for a container that asks for both"
                    " kubelet would keep either: set it at one of them, or give both binding: late or offer: dra"
                )


def _sums_up(resource: Resource) -> bool:
    """Return whether variables are set for all devices of a pod or claim together."""
    return resource.binding == "late" or resource.offer == "dra"


def _of_network(resource: Resource, name: str, networks: Sequence[Network]) -> Iterator[str]:
    """List what keeps a resource's devices from a network that it names."""
    network = next((n for n in networks if n.name == name), None)
    if network is None:
        yield f"{name!r} is not among the networks"
        return
    yield from (f"{name!r} {text}" for text in unfit(resource, network))


def unfit(resource: Resource, network: Network) -> Iterator[str]:
    """List what keeps a resource's devices from a network, in words that follow its name."""
    kind, mode = resource.nic_kind, network.for_devices(resource.nic_kind).setup.mode
    if kind == "hca" and mode not in OF_SHARES:
        yield (
            f"has mode {mode}, which takes the adapter from the others that share it: an hca"
            f" needs a network of mode {' or '.join(OF_SHARES)}"
        )
    if kind == "vf" and mode in OF_SHARES:
        yield f"has mode {mode}, which is for kind hca, not vf"
    if "vf" in network.words and kind != "vf":
        yield f"asks for {{vf}}, and a device of kind {kind} is no VF: take {{rail}} or {{pf}}"
    if network.setup.bond is not None and network.words:
        asked = " and ".join(f"{{{word}}}" for word in sorted(network.words))
        yield f"has bond: {network.setup.bond}, which joins VFs of different PFs, so {asked} would say two things"
    if network.setup.bond is not None and resource.kind != "vf":
        yield f"has bond: {network.setup.bond}, which joins two VFs of a pod: that is for kind vf, not {resource.kind}"
    if network.setup.bond is not None and not resource.spread:
        yield f"has bond: {network.setup.bond}, which joins VFs of different PFs, and spread: false takes them of one"
    drivers = (resource.nic.select if resource.kind == "rail" else resource.select).drivers
    if network.setup.rdma and drivers and all(map(drives_for_programs, drivers)):
        yield (
            f"says rdma: true, and the resource selects devices of {' and '.join(drivers)}, which"
            " makes no RDMA device: leave rdma out, or take another network"
        )


def _misplaced(resource: Resource, networks: Sequence[Network]) -> Iterator[tuple[str, str]]:
    """List keys that have no effect in the mode in which a resource's devices join a network that names none."""
    for i, network in enumerate(networks):
        joined = network.for_devices(resource.nic_kind)
        named = network.name in resource.networks.values()
        if named and joined is not network:
            yield from ((f"networks[{i}], for {resource.name}", text) for text in misplaced_in(joined))


def selectors_of(resource: Resource) -> tuple[tuple[str, str, Select], ...]:
    """List what a resource selects: where the selector stands, the kind of device, the selector."""
    if resource.kind == "rail":
        return ("gpu", "gpu", resource.gpu), ("nic.select", resource.nic.kind, resource.nic.select)
    return (("select", resource.kind, resource.select),)


def _mixed(networks: Sequence[Network]) -> Iterator[tuple[str, str]]:
    """List networks that build upon one interface what it cannot carry at once."""
    first: dict[str, int] = {}
    for i, network in enumerate(networks):
        setup = network.setup
        if setup.master is None or setup.mode not in ("macvlan", "ipvlan"):
            continue
        j = first.setdefault(setup.master, i)
        other = networks[j].setup
        if (setup.mode, setup.ipvlan_mode) != (other.mode, other.ipvlan_mode):
            text = (
                f"{setup.master} carries what networks[{j}] ({networks[j].name}) makes, and an interface carries"
                " macvlans or ipvlans, and ipvlans of one ipvlanMode: name another master in one of the two"
            )
            yield f"networks[{i}].master", text
