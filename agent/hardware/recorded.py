"""Node files: one machine's hardware as one JSON file, recorded or modelled, and its way back into a folder.

    {"format": 1, "name": …, "description": …,
     "tree": {"sys": {…}, "proc": {…}, "dev": {…}},
     "gpus": [{"uuid": …, …}],
     "vpd": {"0000:03:00.0": keyword V3 of the function's vital product data, …}}

In the tree an object is a folder, a text is a file's content, and a list of one text is a symbolic
link's target. `hack/record-node` writes such a file from a machine, `hack/make-nodes` from a
description. A GPU is written as

    {"uuid": …, "index": 0, "minor": 0, "pci_address": …, "name": …, "memory_bytes": …,
     "nvlinks": [[peer UUID, links], …], "fabric_clique": …, "mig_mode": true,
     "mig_devices": [{"uuid": …, "profile": "1g.10gb", "gpu_instance": 7, "compute_instance": 0, "memory_bytes": …}],
     "ailments": [word, …]}

The keys from `nvlinks` on are left out where they say nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from agent.config.section import path_of
from agent.errors import AgentError, ConfigError
from agent.hardware.adapter_ids import write_adapter_id
from agent.hardware.sysfs import scan as sysfs
from agent.hardware.sysfs.pci import PCI_DEVICES
from agent.model.device import Gpu, Snapshot, is_pci_address

FORMAT = 1
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_MAX_VPD = 255


def _as_label(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(f"must be a lower-case DNS label, is {text!r}")
    return text


def _as_pci_address(text: str) -> str:
    if not is_pci_address(text):
        raise ValueError(f"{text!r} is not a PCI address")
    return text


def _as_keyword(text: str) -> str:
    if len(text) > _MAX_VPD or not text.isascii():
        raise ValueError(f"must be at most {_MAX_VPD} ASCII characters")
    return text


@dataclass(frozen=True, slots=True)
class Node:
    """A node file, checked."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: Annotated[str, AfterValidator(_as_label)]
    description: str
    tree: Mapping[Literal["sys", "proc", "dev"], dict[str, Any]]
    """What is below the top folders is checked when it is laid out."""
    gpus: tuple[Gpu, ...] = ()
    vpd: Mapping[Annotated[str, AfterValidator(_as_pci_address)], Annotated[str, AfterValidator(_as_keyword)]] = field(
        default_factory=dict
    )
    """PCI address → keyword V3 of vital product data, which is binary."""


_NODE = TypeAdapter(Node)
GPUS = TypeAdapter(tuple[Gpu, ...])


@dataclass(frozen=True, slots=True)
class RecordedNode:
    """A node file laid out in a folder: hardware to look at, of which nothing can be changed."""

    root: Path
    gpus: tuple[Gpu, ...]

    @classmethod
    def lay_out(cls, node: Node, root: Path) -> RecordedNode:
        """Write the node's /sys, /proc and /dev below `root`, a folder that is there. Raises as `unpack` does."""
        unpack(node, root)
        return cls(root, node.gpus)

    def scan(self) -> Snapshot:
        """Read the hardware."""
        return replace(sysfs.scan(self.root), gpus=self.gpus)


def load(path: Path) -> Node:
    """Read a node file. Raises ConfigError with all that is wrong in it."""
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}"]) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), [f"is not JSON: {error}"]) from error
    return parse(document, str(path))


def parse(document: Any, source: str) -> Node:
    """Check a node document. Raises ConfigError with all that is wrong in it."""
    if not isinstance(document, dict):
        raise ConfigError(source, ["must be a JSON object"])
    if document.get("format") != FORMAT:
        raise ConfigError(source, [f"format: must be {FORMAT}, is {document.get('format')!r}: record the node again"])
    try:
        return _NODE.validate_python({"description": "", **{k: v for k, v in document.items() if k != "format"}})
    except ValidationError as error:
        raise ConfigError(
            source, [f"{path_of(line['loc'])}: {line['msg'].removeprefix('Value error, ')}" for line in error.errors()]
        ) from error


def unpack(node: Node, directory: Path) -> None:
    """Lay the node's tree out in an existing folder. Nothing is written outside of it. Raises AgentError."""
    try:
        _unpack(node.tree, os.fspath(directory), 0)
        for address, adapter_id in node.vpd.items():
            with open(f"{directory}{PCI_DEVICES}/{address}/vpd", "xb") as file:
                file.write(write_adapter_id(adapter_id))
    except OSError as error:
        raise AgentError(
            f"node {node.name} cannot be laid out: {error}: make room, or name another folder in the environment's"
            " TMPDIR; or record the node again"
        ) from error
    except (AttributeError, TypeError, ValueError) as error:  # what is no text
        raise AgentError(f"node {node.name} cannot be laid out: {error}: record it again") from error


def named(text: str) -> Path:
    """Find a node file by name or path, as the option `--node` takes them. Raises ConfigError as `find` does."""
    return Path(text) if "/" in text or text.endswith(".json") else find(text)


def find(name: str) -> Path:
    """Find a node file by name: among those installed with the agent, then in the checkout's tests.

    Raises ConfigError that lists the names there are.
    """
    for folder in _folders():
        path = folder / f"{name}.json"
        if _NAME.fullmatch(name) and path.is_file():
            return path
    raise ConfigError(name, [f"is not the name of a node file; there are: {', '.join(names()) or 'none'}"])


def names() -> tuple[str, ...]:
    """List the names of all node files that `find` knows."""
    return tuple(sorted({path.stem for folder in _folders() for path in folder.glob("*.json")}))


def _folders() -> tuple[Path, ...]:
    here = Path(__file__).parent
    return here / "nodes", here.parents[1] / "tests" / "nodes"


def _unpack(tree: Mapping[Any, Any], folder: str, depth: int) -> None:
    """Write a folder's entries; `depth` is that of the folder. Raises OSError, TypeError and ValueError."""
    for name, entry in tree.items():
        path = f"{folder}/{name}"
        if name in ("", ".", "..") or "/" in name:
            raise ValueError(f"{folder}: {name!r} is not a file name")
        if isinstance(entry, dict):
            os.makedirs(path, exist_ok=True)
            _unpack(entry, path, depth + 1)
        elif isinstance(entry, list):
            [target] = entry
            if not _stays_inside(target, depth):
                raise ValueError(f"{path}: the link to {target!r} leaves the tree")
            os.symlink(target, path)
        else:
            with open(path, "x", encoding="utf-8", newline="") as file:
                file.write(entry)


def _stays_inside(target: str, depth: int) -> bool:
    """Tell whether a link in a folder of that depth points into the tree.

    `..` may stand only at the front, as the kernel writes it: behind a name that is a link itself
    it could lead anywhere.
    """
    parts = target.split("/")
    ups = next((i for i, part in enumerate(parts) if part != ".."), len(parts))
    return ups <= depth and ".." not in parts[ups:] and parts[0] != ""
