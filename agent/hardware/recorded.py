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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from agent.config.section import path_of
from agent.errors import AgentError, ConfigError
from agent.hardware.adapter_ids import write_adapter_id
from agent.hardware.sysfs import scan as sysfs
from agent.hardware.sysfs.pci import PCI_DEVICES
from agent.model.device import Gpu, Snapshot, is_pci_address

FORMAT = 1
_TOP_FOLDERS = frozenset({"sys", "proc", "dev"})
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_MAX_DEPTH = 40
_MAX_VPD = 255


def _as_label(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(f"must be a lower-case DNS label, is {text!r}")
    return text


def _as_keyword(text: str) -> str:
    if len(text) > _MAX_VPD or not text.isascii():
        raise ValueError(f"must be at most {_MAX_VPD} ASCII characters")
    return text


Tree = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Node:
    """A node file, checked."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: Annotated[str, AfterValidator(_as_label)]
    description: str
    tree: Tree
    gpus: tuple[Gpu, ...] = ()
    vpd: Mapping[str, Annotated[str, AfterValidator(_as_keyword)]] = field(default_factory=dict)
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
        node = _NODE.validate_python({"description": "", **{k: v for k, v in document.items() if k != "format"}})
    except ValidationError as error:
        raise ConfigError(
            source, [f"{path_of(line['loc'])}: {line['msg'].removeprefix('Value error, ')}" for line in error.errors()]
        ) from error
    problems = [f"tree.{top}: must be sys, proc or dev" for top in node.tree if top not in _TOP_FOLDERS]
    problems += _tree_problems(node.tree, ())
    problems += [
        f"gpus[{i}].pci_address: {gpu.pci_address!r} is not a PCI address"
        for i, gpu in enumerate(node.gpus)
        if not is_pci_address(gpu.pci_address)
    ]
    problems += [f"vpd.{a}: is no PCI function of the tree" for a in node.vpd if not _has_function(node.tree, a)]
    if problems:
        raise ConfigError(source, problems)
    return node


def unpack(node: Node, directory: Path) -> None:
    """Lay the node's tree out in an existing folder. Nothing is written outside of it. Raises AgentError."""
    try:
        _unpack(node.tree, os.fspath(directory))
        for address, adapter_id in node.vpd.items():
            with open(f"{directory}{PCI_DEVICES}/{address}/vpd", "xb") as file:
                file.write(write_adapter_id(adapter_id))
    except OSError as error:
        raise AgentError(
            f"{directory}: node {node.name} cannot be laid out there: {error.strerror}: "
            "make room, or name another folder in the environment's TMPDIR"
        ) from error


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


def _tree_problems(tree: Tree, where: tuple[str, ...]) -> Iterator[str]:
    if len(where) > _MAX_DEPTH:
        yield f"{'/'.join(where)}: is nested more than {_MAX_DEPTH} folders deep"
        return
    for name, entry in tree.items():
        at = (*where, name)
        if name in ("", ".", "..") or "/" in name or not _is_text(name):
            yield f"{'/'.join(where)}: {name!r} is not a file name"
        elif isinstance(entry, dict):
            yield from _tree_problems(entry, at)
        elif isinstance(entry, list):
            if len(entry) != 1 or not isinstance(entry[0], str):
                yield f"{'/'.join(at)}: a symbolic link must be a list of one text"
            elif not _stays_inside(entry[0], len(where)):
                yield f"{'/'.join(at)}: the link to {entry[0]!r} leaves the tree"
        elif isinstance(entry, str):
            if not _is_text(entry):
                yield f"{'/'.join(at)}: is not text that could be written"
        else:
            yield f"{'/'.join(at)}: must be an object, a text or a list, is {type(entry).__name__}"


def _has_function(tree: Tree, address: str) -> bool:
    """Report whether the tree has this PCI function: a link whose target is in the tree, too."""
    link = tree.get("sys", {})
    for name in ("bus", "pci", "devices", address):
        link = link.get(name) if isinstance(link, dict) else None
    if not (is_pci_address(address) and isinstance(link, list)):
        return False
    folder: Any = tree["sys"]
    for name in link[0].split("/")[3:]:
        folder = folder.get(name) if isinstance(folder, dict) else None
    return isinstance(folder, dict)


def _stays_inside(target: str, depth: int) -> bool:
    """Tell whether a link in a folder of that depth points into the tree.

    `..` may stand only at the front, as the kernel writes it: behind a name that is a link itself
    it could lead anywhere.
    """
    parts = target.split("/")
    ups = next((i for i, part in enumerate(parts) if part != ".."), len(parts))
    return ups <= depth and ".." not in parts[ups:] and bool(target) and parts[0] != "" and _is_text(target)


def _is_text(text: str) -> bool:
    """Tell whether the text can be written: JSON can spell half characters (lone surrogates)."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _unpack(tree: Tree, folder: str) -> None:
    for name, entry in tree.items():
        path = f"{folder}/{name}"
        if isinstance(entry, dict):
            os.makedirs(path, exist_ok=True)
            _unpack(entry, path)
        elif isinstance(entry, list):
            os.symlink(entry[0], path)
        else:
            with open(path, "x", encoding="utf-8", newline="") as file:
                file.write(entry)
