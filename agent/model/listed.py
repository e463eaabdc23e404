"""Names and devices in short, as people read them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from agent.model.device import PciDevice, Snapshot, cpu_list

MOST_NAMED = 4


def some(names: Sequence[str], most: int = MOST_NAMED) -> str:
    """Name the first ones and count the rest; empty for none."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def grouped(devices: Iterable[str], snapshot: Snapshot, most: int = MOST_NAMED) -> str:
    """Name devices: VFs by PF and range (`ens1f0np0: VFs 0–7, 9`), GPUs by number, others as they are; empty for none.

    A device is called by its PCI address, with anything behind it, or by its UUID.
    """
    others: list[str] = []
    indices: dict[str, list[int]] = {}
    gpus: list[int] = []
    for device in devices:
        found = snapshot.by_address.get(device.partition(" ")[0])
        if found is not None and found.physfn is not None and found.vf_index is not None:
            indices.setdefault(found.physfn, []).append(found.vf_index)
        elif found is None and device in snapshot.gpu_by_uuid:
            gpus.append(snapshot.gpu_by_uuid[device].index)
        else:
            others.append(device)
    alike: dict[str, list[str]] = {}
    for pf, numbers in indices.items():
        alike.setdefault(numbered("VF", numbers), []).append(adapter_name(snapshot.by_address.get(pf)) or pf)
    parts = [
        *([numbered("GPU", gpus)] if gpus else []),
        *([some(others, most)] if others else []),
        *_of_pfs(alike, most),
    ]
    rest = len(parts) - most
    return "; ".join([*parts[:most], *([f"and VFs of {rest} more ranges"] if rest > 0 else [])])


def _of_pfs(alike: Mapping[str, Sequence[str]], most: int) -> Iterator[str]:
    for vfs, pfs in alike.items():
        yield f"{some(pfs, most)}: {vfs}" + (" each" if len(pfs) > 1 else "")


def adapter_name(device: PciDevice | None) -> str:
    """Name an adapter by its interface in the host, else by its PCI address; empty for none."""
    if device is None:
        return ""
    return device.netdev.name if device.netdev is not None else device.address


def numbered(what: str, numbers: Sequence[int]) -> str:
    """Name things by their numbers: `VF 3`, `GPUs 0–3, 7`."""
    ranges = cpu_list(numbers).replace("-", "–").replace(",", ", ")
    return f"{what} {ranges}" if len(numbers) == 1 else f"{what}s {ranges}"
