"""The file of pods that may have something that comes into their network, with the books that it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.config import Config, Resource
from agent.ledger import Ledger
from agent.model.allocation import PodRef
from agent.state import Latest
from cni import pods_file
from cni.pods_file import PodsFile
from tests.agent.books import open_books

BOOT = "6b3c2f1e-0000-4000-8000-000000000001"
VF, OTHER = "0000:3b:00.2", "0000:3b:00.3"
HCA = "0000:18:00.0"
VFS, GPUS, SHARES = Resource("rdma/vf", "vf"), Resource("nvidia.com/gpu", "gpu"), Resource("rdma/hca", "hca")
RESOURCES = (VFS, GPUS, SHARES)
TRAINER, WEB = PodRef("default", "trainer"), PodRef("shop", "web")


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Ledger]:
    with open_books(tmp_path) as books:
        yield books


@pytest.fixture
def path(short_folder: Path) -> Path:
    return short_folder / "run/cni.sock.pods"


def open_holders(path: Path, books: Ledger, *, config: Latest[Config] | None = None, is_new: bool = False) -> PodsFile:
    """Open the file of a ledger that agrees with kubelet."""
    made = PodsFile(path, BOOT, books, config or Latest(Config(resources=RESOURCES, kubelet_dir=path.parent.parent)))
    made.look()
    if not is_new:
        made.complete()
    return made


def named(path: Path) -> list[str]:
    """List what the file says of pods; it must be whole."""
    content = path.read_bytes()
    assert pods_file.is_of_boot(content, BOOT)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    first, second, unknown, *names, last = content.decode().splitlines()
    assert (first, second, last) == ("nodefabric-pods 2", f"boot {BOOT}", "end")
    return [*(["?"] if unknown == "unknown 1" else []), *names]
