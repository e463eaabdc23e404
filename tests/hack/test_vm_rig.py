"""The virtual machine's rig, as far as it can be tested without booting anything."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from rig import initramfs, programs, release, session, suite
from rig.errors import Impossible, RigError, TimedOut
from rig.kernel import Kernel, elf_of, module_order
from rig.machine import Shape, arguments
from rig.progress import Deadline

MODULES_DEP = """\
kernel/drivers/net/igb/igb.ko.xz: kernel/drivers/dca/dca.ko.xz kernel/drivers/i2c/i2c-algo-bit.ko.xz
kernel/drivers/dca/dca.ko.xz:
kernel/drivers/i2c/i2c-algo-bit.ko.xz: kernel/drivers/dca/dca.ko.xz
kernel/drivers/vfio/vfio-pci.ko.xz:
"""


def test_modules_are_loaded_after_all_they_need_and_once() -> None:
    order, absent = module_order(MODULES_DEP, ["igb", "vfio_pci", "igb", "no-such"])
    assert [path.rsplit("/", 1)[-1] for path in order] == [
        "dca.ko.xz",
        "i2c-algo-bit.ko.xz",
        "igb.ko.xz",
        "vfio-pci.ko.xz",
    ]
    assert absent == ["no-such"]


def test_the_initramfs_is_a_cpio_archive_as_the_kernel_wants_it() -> None:
    """Documentation/driver-api/early-userspace/buffer-format.rst: hexadecimal fields, all parts padded to 4 bytes."""
    data = b"".join(initramfs.archive(["bin"], [("init", b"#!/bin/sh\n"), ("mod/odd.ko", b"12345")]))
    found, at = {}, 0
    while at < len(data):
        assert data[at : at + 6] == b"070701"
        fields = [int(data[i : i + 8], 16) for i in range(at + 6, at + 110, 8)]
        mode, size, name_size = fields[1], fields[6], fields[11]
        body = (at + 110 + name_size + 3) & ~3
        found[data[at + 110 : at + 109 + name_size].decode()] = (mode, data[body : body + size])
        at = (body + size + 3) & ~3
    assert found == {
        "bin": (0o040755, b""),
        "init": (0o100755, b"#!/bin/sh\n"),
        "mod/odd.ko": (0o100755, b"12345"),
        "TRAILER!!!": (0, b""),
    }


def test_the_kernel_proper_is_taken_out_of_a_zstd_image() -> None:
    packed = b"\x28\xb5\x2f\xfd packed"
    assert elf_of(b"MZ boot code" + packed, {packed: b"\x7fELF"}.__getitem__) == b"\x7fELF"
    assert elf_of(b"MZ boot code" + packed, lambda _: b"") == b"MZ boot code" + packed
    assert elf_of(b"MZ no kernel", lambda _: b"\x7fELF") == b"MZ no kernel"


def test_each_adapter_has_its_own_root_port_and_numa_node() -> None:
    words = arguments(Shape(pfs=2, numa_nodes=2), Kernel(Path("/k")), Path("/i"), "/run/x", [])
    text = " ".join(words)
    for i in (0, 1):
        assert f"pxb-pcie,id=pxb{i},bus=pcie.0,bus_nr={224 - 16 * i},numa_node={i}" in text
        assert f"pcie-root-port,id=rp{i},bus=pxb{i}" in text
        assert f"igb,id=pf{i},bus=rp{i}" in text
    # The firmware numbers the last host bridge first.
    assert text.index("id=pf1") < text.index("id=pf0")


@pytest.mark.parametrize(
    ("os_release", "kernel"),
    [
        ('ID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\n', "bookworm-backports"),
        ('ID=debian\nVERSION_ID="13"\nVERSION_CODENAME=trixie\n', "trixie"),
        ("ID=debian\nVERSION_CODENAME=forky\n", "trixie"),
        ('ID=ubuntu\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\n', "trixie"),
    ],
)
def test_a_known_distribution_names_the_suite_of_its_kernel(os_release: str, kernel: str) -> None:
    assert release.parse(os_release).kernel_suite == kernel


@pytest.mark.parametrize(
    ("os_release", "words"),
    [
        ('PRETTY_NAME="Fedora 44"\nID=fedora\nVERSION_ID=44\n', "Fedora 44 is not supported: Debian 12"),
        ('PRETTY_NAME="Ubuntu 22.04"\nID=ubuntu\nVERSION_ID="22.04"\n', "Ubuntu 22.04 is too old"),
    ],
)
def test_an_unknown_distribution_is_impossible_and_says_what_is_needed(os_release: str, words: str) -> None:
    with pytest.raises(Impossible, match=words):
        release.parse(os_release)


def test_another_run_that_holds_the_cache_is_named(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        lock.write("4711")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RigError, match=f"process 4711 still holds {tmp_path}/lock"):
            session.prepare(session.Order(cache=tmp_path), Deadline.after(0.5))


def test_a_program_that_fails_is_quoted_and_one_that_hangs_is_ended() -> None:
    with pytest.raises(programs.ProgramFailed, match="status 3:\nsays why"):
        programs.run(["sh", "-c", "echo says why >&2; exit 3"], Deadline.after(10))
    with pytest.raises(TimedOut):
        programs.run(["sleep", "10"], Deadline.after(0.1))
    with pytest.raises(RigError, match="no-such-program is missing"):
        programs.run(["no-such-program"], Deadline.after(10))


def test_what_cannot_run_is_skipped_loudly_but_fails_in_ci(capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.skip("there is no root", {}) == 0
    assert "SKIPPED" in capsys.readouterr().err
    assert suite.skip("there is no root", {"CI": "true"}) != 0
    assert "FAILED" in capsys.readouterr().err


def test_drivers_are_built_for_the_guest_and_told_to_it(tmp_path: Path) -> None:
    program = _script(
        tmp_path, 'mkdir -p "$1" && touch "$1/rdma_rxe.ko" && [ "$NODEFABRIC_VM_CACHE" = "${1%/extra-*}" ]'
    )
    told = suite.extra_modules(tmp_path / "cache", {}, Deadline.after(30), program)
    folder = Path(told["NODEFABRIC_EXTRA_MODULES"])
    assert folder.parent == tmp_path / "cache"
    assert (folder / "rdma_rxe.ko").exists()


def test_drivers_that_cannot_be_built_leave_tests_out_loudly_but_not_in_ci(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = _script(tmp_path, "echo no compiler >&2; exit 1")
    assert suite.extra_modules(tmp_path, {}, Deadline.after(30), program) == {}
    assert "NOT run" in (said := capsys.readouterr().err)
    assert "no compiler" in said
    with pytest.raises(RigError, match="no compiler"):
        suite.extra_modules(tmp_path, {"CI": "true"}, Deadline.after(30), program)


def _script(folder: Path, text: str) -> Path:
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
