"""Writes node files, which `agent.hardware.recorded` reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from agent.hardware.recorded import FORMAT, Node
from agent.model.device import Gpu, MigDevice

_LINE_DEPTH = 6
_OURS = ("enumeration", "names")
"""Fields of a GPU that a reading makes."""


def dump(node: Node) -> str:
    """Write a node as JSON text: one line per device, so that changes can be reviewed."""
    document = {
        "format": FORMAT,
        "name": node.name,
        "description": node.description,
        "tree": node.tree,
        "gpus": [plain_gpu(gpu) for gpu in node.gpus],
    }
    if node.vpd:
        document["vpd"] = node.vpd
    return "".join(_lines(document, 0)) + "\n"


def _lines(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, dict) and value and depth < _LINE_DEPTH:
        yield "{\n"
        for i, (key, entry) in enumerate(value.items()):
            yield (",\n" if i else "") + " " * (depth + 1) + json.dumps(key) + ":"
            yield from _lines(entry, depth + 1)
        yield "\n" + " " * depth + "}"
    else:
        yield json.dumps(value, separators=(",", ":"))


def plain_gpu(gpu: Gpu) -> dict[str, Any]:
    """Spell a GPU as its JSON object."""
    document = asdict(gpu)
    return {f.name: document[f.name] for f in fields(Gpu) if f.name not in _OURS and document[f.name] != f.default}


def anonymous_gpus(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Number UUIDs and fabric clusters. Equal values stay equal."""
    uuids = {g.uuid: f"GPU-00000000-0000-0000-0000-{n:012x}" for n, g in enumerate(gpus)}
    slices = {m.uuid: f"MIG-00000000-0000-0000-0000-{n:012x}" for n, m in enumerate(_slices(gpus))}
    clusters: dict[str, str] = {}
    for gpu in gpus:
        cluster, dot, _ = gpu.fabric_clique.rpartition(".")
        if dot:
            clusters.setdefault(cluster, f"00000000-0000-0000-0000-{len(clusters) + 1:012x}")
    return tuple(
        replace(
            gpu,
            uuid=uuids[gpu.uuid],
            nvlinks=tuple(sorted((uuids.get(peer, peer), links) for peer, links in gpu.nvlinks)),
            fabric_clique=_renamed(gpu.fabric_clique, clusters),
            mig_devices=tuple(replace(m, uuid=slices[m.uuid]) for m in gpu.mig_devices),
        )
        for gpu in gpus
    )


def _slices(gpus: Iterable[Gpu]) -> Iterator[MigDevice]:
    return (mig for gpu in gpus for mig in gpu.mig_devices)


def _renamed(clique: str, clusters: dict[str, str]) -> str:
    cluster, dot, number = clique.rpartition(".")
    return f"{clusters[cluster]}.{number}" if dot else clique
