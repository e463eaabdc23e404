"""Which NIC belongs to which GPU on a modelled node, as public documents say: `tests/nodes/NAME.pairs.yaml`.

    pairs:                            # or: unknown, or: none
      "0009:06:00.0": ["0000:03:00.0"]
    sources:
      - {title: …, url: https://…}
    says: >-
      what the documents tell, and what of the model they do not

`pairs` maps each GPU's PCI address to those of its NICs, PFs where it has such. `unknown`: there are such hosts, but no
document tells; the agent must say that nearness is not known. `none`: the node has no GPUs or RDMA devices, or is made
up to try one structure, so there is no document to compare with. These files are written by hand, not by make-nodes:
the benchmark judges the agent by them, and they must not repeat the model's own idea of what is near.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agent.errors import ConfigError
from agent.model.device import Snapshot, is_pci_address

SUFFIX = ".pairs.yaml"
UNKNOWN, NONE = "unknown", "none"


@dataclass(frozen=True, slots=True)
class Pairs:
    """What documents say of one node."""

    nics: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """GPU → its NICs, by PCI address; empty if no document tells."""
    unknown: bool = False
    """There are such hosts, and no document tells which NIC belongs to which GPU."""
    sources: tuple[tuple[str, str], ...] = ()
    """Title and URL."""
    says: str = ""


def beside(node_file: Path) -> Path:
    """Name the pairs file of a node file."""
    return node_file.with_name(node_file.name.removesuffix(".json") + SUFFIX)


def load(path: Path) -> Pairs:
    """Read a pairs file. Raises ConfigError with all that is wrong in it."""
    try:
        document = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}: write it, see hack/node_pairs.py"]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [f"is not YAML: {error}"]) from error
    return parse(document, str(path))


def parse(document: Any, source: str) -> Pairs:
    """Check a pairs document. Raises ConfigError with all that is wrong in it."""
    if not isinstance(document, dict):
        raise ConfigError(source, ["must be a mapping with pairs, sources and says"])
    problems = [f"{key}: is not a known key" for key in document if key not in ("pairs", "sources", "says")]
    pairs, says = document.get("pairs"), document.get("says")
    nics: dict[str, tuple[str, ...]] = {}
    if isinstance(pairs, dict) and pairs:
        for gpu, own in pairs.items():
            if isinstance(own, list) and own and all(isinstance(a, str) and is_pci_address(a) for a in (gpu, *own)):
                nics[gpu] = tuple(own)
            else:
                problems.append(f"pairs.{gpu}: must be a PCI address with a list of those of its NICs, is {own!r}")
    elif pairs not in (UNKNOWN, NONE):
        problems.append(f"pairs: must be {UNKNOWN}, {NONE}, or NICs by GPU, is {pairs!r}")
    if not isinstance(says, str) or not says.strip():
        problems.append("says: must say what the documents tell")
    sources = [_source(entry) for entry in document.get("sources") or []]
    if None in sources or (not sources and pairs != NONE):
        problems.append("sources: must be a list of a title and a URL (https://…) each")
    if problems:
        raise ConfigError(source, problems)
    return Pairs(nics, pairs == UNKNOWN, tuple(s for s in sources if s is not None), str(says).strip())


def misfits(pairs: Pairs, snapshot: Snapshot) -> list[str]:
    """List what of the pairs the node does not have, and its GPUs that they leave out."""
    gpus = {gpu.pci_address for gpu in snapshot.all_gpus}
    there = {device.address for device in snapshot.devices if device.rdma_devices and not device.is_vf}
    there |= {device.address for device in snapshot.devices if device.rdma_devices and device.physfn is None}
    found = [f"{gpu} is no GPU of the node" for gpu in pairs.nics if gpu not in gpus]
    found += [f"{nic} is no RDMA adapter of the node" for own in pairs.nics.values() for nic in own if nic not in there]
    return found + [f"{gpu} has no NICs" for gpu in sorted(gpus - set(pairs.nics)) if pairs.nics]


def _source(entry: Any) -> tuple[str, str] | None:
    match entry:
        case {"title": str(title), "url": str(url), **rest} if not rest and title and url.startswith("https://"):
            return title, url
    return None
