"""What a container is told at ADD, when its devices are in the pod: variables, and files with facts of its rails. Pure.

A container's edits name its RDMA devices in a variable for each library, see `agent.edits.environment`. Which GID these
are to send with is known once their interfaces have addresses. It joins the edits if it has one index on all of them,
for the libraries take no more than one; else they are left to choose by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.edits.environment import FILES
from agent.model.allocation import Attachment
from agent.model.network_data import NetworkData, network_data

GID_INDEXES: Mapping[str, str] = {
    "NCCL_IB_HCA": "NCCL_IB_GID_INDEX",
    "UCX_NET_DEVICES": "UCX_IB_GID_INDEX",
    "NVSHMEM_HCA_LIST": "NVSHMEM_IB_GID_INDEX",
    "MV2_IBA_HCA": "MV2_DEFAULT_GID_INDEX",
}
"""The variable that names RDMA devices → the one with the index of the GID that the library uses on each of them."""
SOCKET_IFNAME = {"NCCL_IB_HCA": "NCCL_SOCKET_IFNAME"}
"""The same for the interface by which processes find each other."""
DECIDED = frozenset((*GID_INDEXES.values(), *SOCKET_IFNAME.values()))
NOTED = "rdma"
"""Key of a row's request: what was found out of its RDMA device in the pod."""


@dataclass(frozen=True, slots=True)
class RdmaFacts:
    """A device's RDMA device in its pod."""

    name: str
    is_roce: bool = False
    """It has a table of GIDs that can be seen, and needs one of them; InfiniBand does not."""
    port: int = 1
    gid_index: int | None = None
    gid: str = ""
    """The address that it stands for."""

    def document(self) -> dict[str, Any]:
        """Return all fields, as JSON holds them."""
        return {name: getattr(self, name) for name in RdmaFacts.__slots__}


@dataclass(frozen=True, slots=True)
class Nic:
    """A device as it is in its pod."""

    device: str
    """PCI address; of an interface that was made upon a device, that one's."""
    resource_name: str
    network: NetworkData
    rdma: RdmaFacts | None = None

    @classmethod
    def of(cls, row: Attachment, result: Mapping[str, Any] | None = None) -> Nic:
        """Make it of an attachment. `result` is what its ADD is to answer, if it has not yet."""
        noted = row.request.get(NOTED)
        network = network_data(row.result or result or {}, row.ifname)
        rdma = RdmaFacts(**noted) if noted else None
        return cls(row.device.partition("/")[0], row.resource_name, network, rdma)


@dataclass(frozen=True, slots=True)
class Told:
    """What joins some edits, as CDI has it, and what is left out: sentences."""

    edits: Mapping[str, Any]
    left_out: tuple[str, ...] = ()

    def beside(self, edits: Mapping[str, Any]) -> Mapping[str, Any]:
        """Say it with some edits, in place of what was said with them before."""
        env = [f"{name}={value}" for name, value in _split(edits) if name not in DECIDED]
        mounts = [mount for mount in edits.get("mounts", ()) if mount["containerPath"] not in FILES.values()]
        said = {"env": [*env, *self.edits.get("env", ())], "mounts": [*mounts, *self.edits.get("mounts", ())]}
        return {key: value for key, value in {**edits, **said}.items() if value}


def told(
    edits: Mapping[str, Any], nics: Sequence[Nic], socket_ifname: str = "", files: Mapping[str, str] | None = None
) -> Told:
    """Work out what joins containerEdits, by what is known of a pod's devices now.

    `socket_ifname` is the pod's interface to everybody; `files` maps the variables of `FILES` to paths on the host.
    """
    asked = dict(_split(edits))
    env, left_out = list[str](), list[str]()
    for variable, index_variable in GID_INDEXES.items():
        index = _index(names_in(variable, asked[variable]), nics) if variable in asked else None
        if isinstance(index, int):
            env.append(f"{index_variable}={index}")
        elif index:
            left_out.append(f"{index_variable} is left out, for the library to choose: {index}")
    for variable, ifname_variable in SOCKET_IFNAME.items():
        if variable in asked and socket_ifname:
            env.append(f"{ifname_variable}=={socket_ifname}")
    options = ["ro", "bind", "nosuid", "nodev"]
    mounts = [
        {"hostPath": host_path, "containerPath": asked[variable], "options": options}
        for variable, host_path in (files or {}).items()
        if variable in asked
    ]
    found = {"env": env, "mounts": mounts}
    return Told({key: value for key, value in found.items() if value}, tuple(left_out))


def asks(edits: Mapping[str, Any]) -> bool:
    """Tell whether there is anything to be told at ADD beside what some edits say."""
    return any(variable in GID_INDEXES or variable in FILES for variable, _ in _split(edits))


def files_asked(edits: Mapping[str, Any]) -> frozenset[str]:
    """List the variables of some edits that name files."""
    return frozenset(variable for variable, _ in _split(edits) if variable in FILES)


def names_in(variable: str, value: str) -> tuple[str, ...]:
    """List the RDMA devices that a variable of `GID_INDEXES` names."""
    if variable == "MV2_IBA_HCA":
        return tuple(value.split(":"))
    return tuple(dict.fromkeys(part.partition(":")[0] for part in value.removeprefix("=").split(",")))


def _index(names: Sequence[str], nics: Sequence[Nic]) -> int | str | None:
    """Tell the index that some RDMA devices have in common, or why there is none; None if they need none."""
    mine = [nic.rdma for nic in nics if nic.rdma is not None and nic.rdma.name in names]
    indexes: dict[str, set[int | None]] = {}
    for rdma in mine:
        if rdma.is_roce:
            indexes.setdefault(rdma.name, set()).add(rdma.gid_index)
    if not indexes:
        return None
    needed = [name for name in names if name in indexes or name not in {rdma.name for rdma in mine}]
    unknown = [name for name in needed if None in indexes.get(name, {None})]
    if unknown:
        return f"{', '.join(unknown)} has no RoCE v2 GID that is known to be the pod's"
    different = {index for found in indexes.values() for index in found}
    if len(different) == 1:
        return different.pop()
    each = (f"{name}: {', '.join(map(str, found))}" for name, found in indexes.items())
    return f"it differs ({'; '.join(each)})"


def _split(edits: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for entry in edits.get("env", ()):
        name, _, value = entry.partition("=")
        yield name, value
