"""Take everything off a node that the agent and its plugin have put there.

Only what is known to be the agent's goes: files by their names, in its own folders too, which may be other programs'
as well (`stateDir: /data`); networks and plugins as `cni.install` and `cni.chain` tell them. Its folders, and those
that kubelet makes for the DaemonSet's mounts, go if they are empty. Repeatable, after a crash at any line too.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from agent import device_info
from agent.config.labels import NFD_FILE
from agent.errors import InstallFailed, InUse, LedgerError
from agent.ledger import lock, reading
from cni import chain, install, orphans, spool

LEDGER, SPOOL = "ledger.db", "spool"
SHOWN = 8
MOST_LINKS = 40
"""As the kernel has it; one in a ring is left as it is."""
BOOKS = re.compile(rf"{re.escape(LEDGER)}.*|{re.escape(lock.NAME)}|{orphans.OWN.pattern}")
"""With what SQLite keeps beside them, damaged ones that were set aside, and the marks of killed agents."""
OWN_SOCKETS = re.compile(
    r"(cni|admin)\.sock|cni\.sock\.(ready|pods)|\.cni\.sock\.pods\.new|\.(cni|admin)\.sock\.[0-9]+"
)
"""With the relay's note that the agent was ready, what it reads of pods, and what was not yet in place."""
SOCKET = re.compile(r"nodefabric-.+\.sock")
CDI_SPEC = re.compile(r"nodefabric-(slot|pool)-.+\.json|\.nodefabric-(slot|pool)-.+\.json\.[0-9]+")
DEVICE_INFO = device_info.FOLDER / "dp"
LIBCNI = Path("/var/lib/cni")
MADE_FOR_MOUNTS = (
    *(DEVICE_INFO, *list(DEVICE_INFO.parents)[:2]),
    *(Path("/var/run/cdi"), Path("/etc/cdi"), Path("/var/run/cni"), LIBCNI, Path("/var/run/netns")),
)


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are on the host; `root` is where the host's own / is seen."""

    root: Path
    plugins: Path
    networks: Path
    kubelet: Path
    state: Path
    run: Path
    cdi: Path
    nfd_file: Path = NFD_FILE
    """Labels for node-feature-discovery."""
    boot_id: str = ""
    """Of the running kernel; empty if it cannot be told."""

    def inside(self, path: Path) -> Path:
        """Return where a path of the host is found here.

        Links on the way are followed as the host follows them: an absolute one, such as /var/run, or a kubelet's
        folder that was put on another disk, would lead out of `root`.
        """
        found, left, links = self.root, list(path.parts[:0:-1]), 0
        while left:
            part = left.pop()
            if part == "..":
                found = found if found == self.root else found.parent
                continue
            found /= part
            if links < MOST_LINKS and found.is_symlink():
                links += 1
                target = found.readlink()
                found = self.root if target.is_absolute() else found.parent
                left += target.parts[: 0 if target.is_absolute() else None : -1]
        return found


def uninstall(places: Places, *, instance: str, force: bool = False) -> tuple[str, ...]:
    """Remove plugin, networks' entries, sockets and state. Returns what was removed, as paths of the host.

    Raises InUse while an agent runs or a pod has a device (not with `force`): without agent and plugin nobody could
    take the device back. Raises InstallFailed if another instance's plugin is there, or something cannot be removed.
    """
    state = places.inside(places.state)
    if lock.is_claimed(state):
        raise InUse(f"an agent works with {places.state}: delete its DaemonSet first")
    resource_names: set[str] = set()
    try:
        books = reading.read(state / LEDGER)
        resource_names = {grant.resource_name for grant in books.grants}
        # A reboot has taken every device back from its pod.
        held = [f"{a.device} in {a.owner.pod}" for a in books.attachments if places.boot_id in ("", a.boot_id)]
    except LedgerError as error:
        held = [f"whatever the books say, for {error}"]
    if held and not force:
        more = f" and {len(held) - SHOWN} more" if len(held) > SHOWN else ""
        raise InUse(
            f"pods have devices of this node: {', '.join(held[:SHOWN])}{more}: delete them while the agent still runs,"
            " or use --force to leave the devices as they are"
        )
    return (*_remove_plugin(places, instance, force=force), *_remove_files(places, resource_names))


def _remove_plugin(places: Places, instance: str, *, force: bool) -> Iterator[str]:
    plugins, networks = places.inside(places.plugins), places.inside(places.networks)
    install.see_owner(plugins, instance=instance, force=force)  # the networks are that one's too
    if networks.is_dir():
        yield from (f"the plugin in {places.networks / name}" for name in chain.unchain(networks))
    remembered = chain.unchain_remembered(places.inside(LIBCNI))
    yield from (f"the plugin in {LIBCNI / 'results' / name}" for name in remembered)
    yield from (str(places.plugins / name) for name in install.remove(plugins, instance=instance, force=force))


def _remove_files(places: Places, resource_names: Iterable[str]) -> Iterator[str]:
    granted = "|".join(re.escape(name.replace("/", "-")) for name in resource_names)
    features = re.escape(places.nfd_file.name)
    for folder, pattern in (
        (places.kubelet / "device-plugins", SOCKET),
        (places.cdi, CDI_SPEC),
        (places.nfd_file.parent, re.compile(rf"{features}|\.{features}\.new")),  # and a half-written one
        (DEVICE_INFO, re.compile(rf"({granted})-.+-device\.json")),
        (places.run, OWN_SOCKETS),
        (places.state / SPOOL, spool.OWN),
        # Last: whoever is interrupted before it finds the books again.
        (places.state, BOOKS),
    ):
        yield from _remove_matching(places, folder, pattern)
    for folder in (places.run, places.state / SPOOL, places.state, places.nfd_file.parent, *MADE_FOR_MOUNTS):
        # Is not there, not empty, or a link: then what it leads to is the host's own, and would be missed.
        with contextlib.suppress(OSError):
            (places.inside(folder.parent) / folder.name).rmdir()
            yield str(folder)


def _remove_matching(places: Places, folder: Path, pattern: re.Pattern[str]) -> Iterator[str]:
    inside = places.inside(folder)
    for found in sorted(inside.iterdir()) if inside.is_dir() else ():
        if pattern.fullmatch(found.name):
            with _told(folder / found.name):
                found.unlink(missing_ok=True)
            yield str(folder / found.name)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InstallFailed(
            f"{path} cannot be removed: {error.strerror}: run this as root, with the host's /"
        ) from error
