"""The command line of `vmrun`."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rig import session
from rig.errors import RigError
from rig.machine import MAX_VFS, Shape
from rig.progress import Deadline, say

_DESCRIPTION = """Run a command as root in a QEMU guest that has SR-IOV network adapters.

The guest is a Debian kernel on this computer's own root file system, read-only with a tmpfs laid over it: what is
installed here (this Python, a virtual environment, the checkout) is there at the same paths, and what the command
writes is gone with the guest, save in the folders named with --share.

Statuses of its own: 123 this computer cannot run it, 124 timed out, 125 the guest ended without a status,
1 something to put right. Each comes with a line on stderr that says what and why."""


def main(argv: Sequence[str] | None = None, env: Mapping[str, str] = os.environ) -> int:
    """Run `vmrun` and return its exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = _parser()
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command and not options.prepare:
        parser.error("no command: end with -- COMMAND ARGUMENTS, or give --prepare")
    deadline = Deadline.after(options.timeout)
    try:
        prepared = session.prepare(_order(options, env), deadline)
        if options.prepare:
            return 0
        # Fetching and saving have the same time again as the command: a cold cache must not fail a run.
        passed = {name: env[name] for name in (*session.PASSED_VARIABLES, *options.env) if name in env}
        return prepared.run(session.Command(command, Path.cwd(), passed), Deadline.after(options.timeout))
    except RigError as error:
        say(str(error))
        return error.status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vmrun", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cache", type=Path, help=f"folder kept between runs (default: {session.CACHE_VARIABLE}, or below ~/.cache)")
    add("--suite", help="Debian suite of the kernel, say trixie-backports (default: one with Linux 6.12)")
    add("--accel", default="tcg", choices=["tcg", "kvm"], help="emulation (default tcg; kvm is seldom tried)")
    add("--timeout", type=float, default=300, help="seconds for the command, and again for preparing (default 300)")
    add("--smp", type=int, default=1, help="processors (default 1, the fastest under emulation)")
    add("--memory", type=_mebibytes, default=2048, help="size such as 2048M or 3G (default 2048M)")
    add("--pf", type=int, default=2, help="igb adapters (default 2)")
    add("--vfs", type=int, default=0, choices=range(MAX_VFS + 1), help="VFs made on each before the command")
    add("--numa", type=int, default=0, metavar="N", help="NUMA nodes; adapter i is on node i modulo N")
    add("--iommu", action="store_true", help="an emulated VT-d, for vfio-pci")
    add("--modules", default=",".join(session.DEFAULT_MODULES), help="modules loaded before the command")
    add("--share", type=_folder, action="append", default=[], metavar="DIR", help="folder the guest may write to")
    add("--env", action="append", default=[], metavar="NAME", help="environment variable to pass on")
    add("--snapshot", action="store_true", help="start from a saved boot, made on the first use")
    add("--prepare", action="store_true", help="fetch, build (and save a snapshot) only")
    add("--append", action="append", default=[], metavar="WORD", help="kernel parameter to add")
    add("--qemu", action="append", default=[], metavar="ARG", help="QEMU argument to add")
    add("-v", "--verbose", action="store_true", help="show QEMU's command line and the guest's console")
    add("command", nargs=argparse.REMAINDER, help="-- command and its arguments")
    return parser


def _order(options: argparse.Namespace, env: Mapping[str, str]) -> session.Order:
    shape = Shape(
        accel=options.accel,
        cpus=options.smp,
        memory_mib=options.memory,
        pfs=options.pf,
        vfs=options.vfs,
        numa_nodes=options.numa,
        iommu=options.iommu,
        verbose=options.verbose,
        kernel_parameters=tuple(options.append),
        qemu_arguments=tuple(options.qemu),
    )
    return session.Order(
        cache=options.cache or session.default_cache(env),
        shape=shape,
        suite=options.suite,
        modules=tuple(name for name in options.modules.split(",") if name),
        snapshot=options.snapshot,
        shares=tuple(options.share),
    )


def _mebibytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)([MG])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 2048M or 3G")
    return int(found[1]) * (1024 if found[2] == "G" else 1)


def _folder(text: str) -> Path:
    folder = Path(text).resolve()
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder")
    return folder
