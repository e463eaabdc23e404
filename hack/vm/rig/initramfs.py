"""The guest's first file system: busybox, the modules to load, and the two guest scripts."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from rig.errors import RigError
from rig.kernel import Kernel, module_order, read_module
from rig.progress import say

GUEST_SCRIPTS = Path(__file__).resolve().parent.parent
_FOLDERS = ("bin", "dev", "lower", "mod", "new", "proc", "run", "sys", "tmp", "upper")
_FOLDER_MODE, _PROGRAM_MODE = 0o040755, 0o100755


def build(cache: Path, kernel: Kernel, modules: list[str]) -> Path:
    """Return the initramfs that loads these modules, built unless the cache has it."""
    order, absent = module_order((kernel.modules / "modules.dep").read_text(), modules)
    for name in absent:
        say(f"kernel {kernel.version} has no module {name} (or has it built in)")
    init, runner = ((GUEST_SCRIPTS / name).read_bytes() for name in ("guest-init", "guest-run"))
    identity = "\0".join([str(kernel.modules), *order]).encode()
    key = hashlib.sha256(identity + b"\0" + init + runner).hexdigest()[:12]
    image = cache / f"initramfs-{kernel.version}-{key}.cpio"
    if image.exists():
        return image
    busybox = shutil.which("busybox")
    if busybox is None:
        raise RigError("busybox is missing: install the package busybox-static")
    programs = [("bin/busybox", Path(busybox).read_bytes()), ("init", init), ("guest-run", runner)]
    loaded = []
    for path in order:
        name = Path(path).name.removesuffix(".xz").removesuffix(".zst")
        programs.append((f"mod/{name}", read_module(kernel.modules / path)))
        loaded.append(f"{name}\n")
    programs.append(("mod/list", "".join(loaded).encode()))
    new = image.with_suffix(".new")
    with new.open("wb") as out:
        out.writelines(archive(_FOLDERS, programs))
    os.replace(new, image)
    return image


def archive(folders: Iterable[str], files: Iterable[tuple[str, bytes]]) -> Iterable[bytes]:
    """Yield a cpio archive in the kernel's `newc` form: folders, then executable files, all root's."""
    entries = [(name, _FOLDER_MODE, b"") for name in folders]
    entries += [(name, _PROGRAM_MODE, data) for name, data in files]
    entries.append(("TRAILER!!!", 0, b""))
    for inode, (name, mode, data) in enumerate(entries, 1):
        path = name.encode() + b"\0"
        # inode, mode, uid, gid, links, mtime, size, four device numbers, length of the name, checksum
        fields = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + path
        yield head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)
