"""The GPUs of a node file: their JSON form, both ways, and their anonymous one.

    {"uuid": …, "index": 0, "minor": 0, "pci_address": …, "name": …, "memory_bytes": …,
     "nvlinks": [[peer UUID, links], …], "fabric_clique": …, "mig_mode": true,
     "mig_devices": [{"uuid": …, "profile": "1g.10gb", "gpu_instance": 7, "compute_instance": 0, "memory_bytes": …}],
     "ailments": [word, …]}

The keys from `nvlinks` on are left out where they say nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, asdict, fields, replace
from typing import Any

from agent.model.device import Gpu, MigDevice, is_pci_address

_WANTED = tuple(f.name for f in fields(Gpu) if f.default is MISSING)
_OPTIONAL = {
    f.name: f.default for f in fields(Gpu) if f.default is not MISSING and f.name not in ("enumeration", "names")
}
_NOTHING = object()
_MIG_KEYS = frozenset(f.name for f in fields(MigDevice) if f.default is MISSING)
_MIG_OPTIONAL = frozenset(f.name for f in fields(MigDevice) if f.default is not MISSING)
_MIG_TEXTS = frozenset({"uuid", "profile"})


def plain(gpu: Gpu) -> dict[str, Any]:
    """Spell a GPU as its JSON object."""
    document = asdict(gpu)
    return {key: document[key] for key in (*_WANTED, *_OPTIONAL) if document[key] != _OPTIONAL.get(key, _NOTHING)}


def read(items: Any, problems: list[str]) -> tuple[Gpu, ...]:
    """Read a list of GPUs; what is wrong in it is added to `problems`, path first."""
    if not isinstance(items, list):
        problems.append("gpus: must be a list")
        return ()
    gpus = []
    for i, item in enumerate(items):
        wrong = [f"gpus[{i}]{text}" for text in _problems(item)]
        problems += wrong
        if not wrong:
            gpus.append(_gpu(item))
    return tuple(gpus)


def anonymous(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
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


def _problems(item: Any) -> Iterator[str]:
    if not isinstance(item, dict) or not set(_WANTED) <= set(item) <= set(_WANTED) | set(_OPTIONAL):
        yield f": must be an object with {', '.join(_WANTED)} and, if you like, {', '.join(_OPTIONAL)}"
        return
    texts = all(isinstance(item[key], str) for key in ("uuid", "name", "pci_address"))
    numbers = all(type(item[key]) is int for key in ("index", "memory_bytes"))
    if not texts or not numbers or not (item["minor"] is None or type(item["minor"]) is int):
        yield ": uuid, name, pci_address must be texts, index, minor, memory_bytes whole numbers"
    elif not is_pci_address(item["pci_address"]):
        yield f".pci_address: {item['pci_address']!r} is not a PCI address"
    links = item.get("nvlinks", [])
    if not isinstance(links, list) or not all(_is_link(link) for link in links):
        yield ".nvlinks: must be a list of [peer's UUID, number of links]"
    if not isinstance(item.get("fabric_clique", ""), str):
        yield ".fabric_clique: must be text"
    if not isinstance(item.get("mig_mode", False), bool):
        yield ".mig_mode: must be true or false"
    slices = item.get("mig_devices", [])
    if not isinstance(slices, list) or not all(_is_slice(mig) for mig in slices):
        yield f".mig_devices: must be a list of objects with {', '.join(f.name for f in fields(MigDevice))}"
    ailments = item.get("ailments", [])
    if not isinstance(ailments, list) or not all(isinstance(word, str) for word in ailments):
        yield ".ailments: must be a list of texts"


def _is_link(link: Any) -> bool:
    return isinstance(link, list) and len(link) == 2 and isinstance(link[0], str) and type(link[1]) is int


def _is_slice(mig: Any) -> bool:
    return (
        isinstance(mig, dict)
        and _MIG_KEYS <= mig.keys() <= _MIG_KEYS | _MIG_OPTIONAL
        and all(isinstance(value, str) if key in _MIG_TEXTS else type(value) is int for key, value in mig.items())
    )


def _gpu(item: dict[str, Any]) -> Gpu:
    return Gpu(
        **{
            **item,
            "nvlinks": tuple((peer, links) for peer, links in item.get("nvlinks", ())),
            "mig_devices": tuple(MigDevice(**mig) for mig in item.get("mig_devices", ())),
            "ailments": tuple(item.get("ailments", ())),
        }
    )
