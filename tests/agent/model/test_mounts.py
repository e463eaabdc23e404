"""Which paths of the host a container may get, and where."""

from __future__ import annotations

import re

import pytest

from agent.model.mounts import Mount, parse_mount

LIBRARY = "/usr/lib64/libibverbs/libionic-rdmav59.so"


@pytest.mark.parametrize(
    ("text", "host_path", "path"),
    [
        (LIBRARY, LIBRARY, LIBRARY),
        ("/etc/libibverbs.d", "/etc/libibverbs.d", "/etc/libibverbs.d"),
        ("/etc/libibverbs.d/ionic.driver", "/etc/libibverbs.d/ionic.driver", "/etc/libibverbs.d/ionic.driver"),
        ("/opt/amazon:/opt/aws", "/opt/amazon", "/opt/aws"),
        ("/opt/cray/libfabric/1.22.0", "/opt/cray/libfabric/1.22.0", "/opt/cray/libfabric/1.22.0"),
        ("/usr/lib/x86_64-linux-gnu:/opt/host/lib", "/usr/lib/x86_64-linux-gnu", "/opt/host/lib"),
        ("/usr/lib64/libc.so.6:/opt/host/libc.so.6", "/usr/lib64/libc.so.6", "/opt/host/libc.so.6"),
        ("/usr/lib64/libcxi.so.1", "/usr/lib64/libcxi.so.1", "/usr/lib64/libcxi.so.1"),
        (f"{LIBRARY}:/usr/local/lib/libionic-rdmav59.so", LIBRARY, "/usr/local/lib/libionic-rdmav59.so"),
    ],
)
def test_libraries_of_the_host_may_be_mounted(text: str, host_path: str, path: str) -> None:
    assert parse_mount(text) == Mount(host_path, path)


@pytest.mark.parametrize(
    "text",
    [
        *("", "/", ":", f"{LIBRARY}:", f":{LIBRARY}", f"{LIBRARY}:/opt/a:ro", "usr/lib/a.so", f"/{LIBRARY}"),
        *("/usr/lib64/../../etc/shadow", "/usr/lib64/./a.so", "/usr/lib64//a.so", "/usr/lib64/a.so/", "/usr/lib64/a b"),
        *("/usr/lib64/a\nb", "/usr/lib64", "/usr/lib", "/usr/local/lib", "/usr/libexec/a", "/usr/lib64evil/a.so"),
        *("/etc", "/etc/shadow", "/etc/libibverbs.d.old/a", "/opt", "/opt/other/a", "/root/.ssh", "/var/lib/kubelet"),
        *("/proc/1/root", "/sys/bus", "/dev/mem", "/run/containerd/containerd.sock"),
        *(f"{LIBRARY}:{path}" for path in ("/", "/etc", "/etc/passwd", "/etc/ld.so.preload", "/proc/a", "/sys/a")),
        *(f"{LIBRARY}:{path}" for path in ("/dev/a", "/usr", "/usr/lib", "/usr/bin/sh", "/opt", "/run/a", "/tmp/a")),
        *(f"{LIBRARY}:{path}" for path in ("/opt/../etc/passwd", "/usr/lib/x86_64-linux-gnu", "/usr/lib/libc.so.6")),
        "/usr/lib/x86_64-linux-gnu",
        *(f"/usr/lib/x86_64-linux-gnu/{name}" for name in ("libc.so.6", "ld-linux-x86-64.so.2", "libpthread.so.0")),
        *(f"{LIBRARY}:/usr/local/lib/{name}" for name in ("libc.so.6", "a/libm.so.6", "ld64.so.2")),
        *("/usr/lib/ssl", "/usr/lib/ssl:/opt/ssl", "/usr/lib/ssl/private:/opt/keys", "/usr/lib64/ssl/private"),
    ],
)
def test_other_paths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be|not allowed|name a file or|leave out|would hide"):
        parse_mount(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("/etc/passwd", "this folder of the host is not allowed; allowed are /usr/lib, /usr/lib64, /usr/local/lib, "),
        ("/usr/lib64", "name a file or folder below it"),
        ("/usr/lib/ssl", "it leads to the host's private keys on Debian, so it is not allowed"),
        ("usr/lib/a.so", "the host's path must be absolute"),
        (f"{LIBRARY}:/etc/x", "the container's path must be below /usr/lib, /usr/lib64, "),
        (f"{LIBRARY}:opt/x", "the container's path must be absolute"),
        (f"{LIBRARY}:/usr/lib/libc.so.6", "/usr/lib/libc.so.6 would hide the image's own libraries; name another path"),
        (f"{LIBRARY}:/opt/a:ro", "mounts are always read-only; leave out :ro"),
        (f"{LIBRARY}:ro", "mounts are always read-only; leave out :ro"),
    ],
)
def test_the_reason_names_the_part_that_is_wrong(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(why)}"):
        parse_mount(text)
