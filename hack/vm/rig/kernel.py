"""A Debian kernel: fetched, unpacked into the cache, never installed."""

from __future__ import annotations

import lzma
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rig import programs
from rig.apt import Apt
from rig.errors import RigError
from rig.progress import Deadline, step

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_META_PACKAGE = "linux-image-amd64"


@dataclass(frozen=True)
class Kernel:
    """An unpacked kernel: its folder holds vmlinux, version, and mod/lib/modules/VERSION."""

    folder: Path

    @property
    def version(self) -> str:
        return (self.folder / "version").read_text()

    @property
    def vmlinux(self) -> Path:
        return self.folder / "vmlinux"

    @property
    def modules(self) -> Path:
        return self.folder / "mod" / "lib" / "modules" / self.version


def unpacked(cache: Path, suite: str, deadline: Deadline) -> Kernel:
    """Return the suite's kernel from the cache; fetch its newest one if the cache has none."""
    known = cache / f"kernel-{suite}"
    if known.exists() and (cache / known.read_text() / "version").exists():
        return Kernel(cache / known.read_text())
    with step(f"looking for the kernel of {suite}"):
        apt = Apt(cache / f"apt-{suite}", (suite,), deadline)
        image = _image(apt, suite)
        size = int(apt.field(image, "Size", suite)) >> 20
    new = cache / f"{image}.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    with step(f"fetching {image} ({size} MB)"):
        _download(apt, image, suite, new)
    with step(f"unpacking {image}"):
        _unpack(new, deadline)
    shutil.rmtree(cache / image, ignore_errors=True)
    new.rename(cache / image)
    known.write_text(image)
    return Kernel(cache / image)


def _image(apt: Apt, suite: str) -> str:
    found = re.search(r"linux-image-[\w.+~-]+", apt.field(_META_PACKAGE, "Depends", suite))
    if found is None:
        raise RigError(f"{_META_PACKAGE} of {suite} names no kernel image")
    return found[0]


def _download(apt: Apt, image: str, suite: str, folder: Path) -> None:
    """From 7.x on Debian splits the kernel: linux-image depends on binary, modules and base."""
    try:
        parts = re.findall(r"linux-(?:binary|modules|base)-\d[\w.+~-]+", apt.field(image, "Depends", suite))
        apt.download([image, *parts], folder)
    except RigError:
        # The lists may be older than the mirror, which keeps the newest package only.
        apt.refresh()
        parts = re.findall(r"linux-(?:binary|modules|base)-\d[\w.+~-]+", apt.field(image, "Depends", suite))
        apt.download([image, *parts], folder)


def _unpack(folder: Path, deadline: Deadline) -> None:
    root = folder / "root"
    for deb in folder.glob("*.deb"):
        programs.run(["dpkg-deb", "-x", deb, root], deadline)
        deb.unlink()
    modules = next(root.glob("**/modules/*/kernel")).parent
    tree = folder / "mod" / "lib" / "modules" / modules.name
    tree.parent.mkdir(parents=True)
    modules.rename(tree)
    programs.run(["depmod", "-b", folder / "mod", modules.name], deadline)
    vmlinuz = next(p for p in [*root.glob("boot/vmlinuz-*"), tree / "vmlinuz"] if p.exists())
    (folder / "vmlinux").write_bytes(elf_of(vmlinuz.read_bytes(), unzstd))
    shutil.rmtree(root)
    (folder / "version").write_text(modules.name)


def elf_of(image: bytes, decompress: Callable[[bytes], bytes]) -> bytes:
    """Take the kernel proper out of a bzImage, or return the image if it cannot be found.

    QEMU starts the kernel proper at its PVH entry; the guest is then spared from unpacking
    it, which takes seconds under software emulation.
    """
    at = image.find(_ZSTD_MAGIC)
    proper = decompress(image[at:]) if at >= 0 else b""
    return proper if proper.startswith(b"\x7fELF") else image


def unzstd(data: bytes) -> bytes:
    """Decompress what is at the front of the data.

    What follows it, in a bzImage, makes zstd complain, after it has written all that counts.
    """
    return subprocess.run(["zstd", "-dcq"], input=data, capture_output=True, check=False).stdout


def module_order(modules_dep: str, names: list[str]) -> tuple[list[str], list[str]]:
    """Order the named modules and all they need so that each can be loaded after those before it.

    Returns their paths in the module tree, and the names that the kernel does not have as modules.
    """
    needs: dict[str, list[str]] = {}
    by_name: dict[str, str] = {}
    for line in modules_dep.splitlines():
        path, _, rest = line.partition(":")
        needs[path] = rest.split()
        by_name[_module_name(path)] = path
    order: list[str] = []

    def add(path: str) -> None:
        for other in needs[path]:
            if other not in order:
                add(other)
        if path not in order:
            order.append(path)

    absent = []
    for name in names:
        found = by_name.get(name.replace("-", "_"))
        if found is None:
            absent.append(name)
        else:
            add(found)
    return order, absent


def _module_name(path: str) -> str:
    return path.rsplit("/", 1)[-1].split(".")[0].replace("-", "_")


def read_module(path: Path) -> bytes:
    """Read a module, decompressed."""
    data = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(data)
    if path.suffix == ".zst":
        return unzstd(data)
    return data
