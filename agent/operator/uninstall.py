"""Take everything off a node that the agent and its plugin have put there.

Only what is known to be the agent's goes: files by their names, in its own folders too, which may be other programs'
as well (`stateDir: /data`); networks and plugins as `cni.install` tells them. Its folders, and those that kubelet makes
for the DaemonSet's mounts, go if they are empty. Repeatable, after a crash at any line too.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from agent.cluster import slices
from agent.cluster.apiserver import ApiServer
from agent.cluster.slices import Pool
from agent.config.sections import DRIVER
from agent.edits import device_info
from agent.errors import InstallFailed, InUse, LedgerError, Unavailable
from agent.kubelet import checkpoint
from agent.ledger.database import LOCK, NEXT_LOCK, is_locked, read_books
from agent.model.printable import some
from agent.report.facts import held as holders
from cni import spool
from cni.install import chain
from cni.install import installation as install

LEDGER, SPOOL = "ledger.db", "spool"
SHOWN = 8
WAY_OUT = "Delete these pods while an agent runs (start it again if it is gone; chart: remove=false), then remove again"
MOST_LINKS = 40
"""As the kernel has it; one in a ring is left as it is."""
BOOKS = re.compile(rf"{re.escape(LEDGER)}.*|{re.escape(LOCK)}|{re.escape(NEXT_LOCK)}|ipam-[0-9a-f]{{8}}\.lock")
"""With what SQLite keeps beside them, damaged ones that were set aside, and locks of earlier versions."""
OWN_SOCKETS = re.compile(
    r"(cni|admin)\.sock|cni\.sock\.(ready|pods)|\.cni\.sock\.pods\.(new|[0-9]+)|\.(cni|admin)\.sock\.[0-9]+"
    r"|\.adapter-ids\.json\.new|adapter-ids\.json"
)
"""With the relay's note that the agent was ready, what it reads of pods, what adapters' functions belong together,
and what was not yet in place."""
SOCKET = re.compile(r"nodefabric-.+\.sock")
DRA_SOCKET = re.compile(r"dra-[0-9a-f]{8}\.sock")
_SPEC = r"nodefabric-((slot|unit|pool|claim)-.+\.json|slot-.+\.slot|claim-.+\.(claim|metadata))"
CDI_SPEC = re.compile(rf"{_SPEC}|\.{_SPEC}\.[0-9]+")
"""With the copies of slots and claims that are kept beside their specs, and what tells containers of their devices."""
DEVICE_INFO = device_info.FOLDER / "dp"
LIBCNI = Path("/var/lib/cni")
FEATURES = Path("/etc/kubernetes/node-feature-discovery/features.d")
"""Where earlier versions could write labels, for node-feature-discovery."""
MADE_FOR_MOUNTS = (
    *(DEVICE_INFO, *list(DEVICE_INFO.parents)[:2]),
    *(Path("/var/run/cdi"), Path("/etc/cdi"), Path("/var/run/cni"), LIBCNI, Path("/var/run/netns")),
)


@dataclass(frozen=True, slots=True)
class Folders:
    """Where things are on the host; `root` is where the host's own / is seen."""

    root: Path
    plugins: Path
    networks: Path
    kubelet: Path
    state: Path
    run_dir: Path
    cdi: Path
    dra_driver: str = DRIVER
    """Name of the driver that hands out claims, which is that of its folder in kubelet's."""
    boot_id: str = ""
    """Of the running kernel; empty if it is not known."""

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


@dataclass(frozen=True, slots=True)
class Published:
    """What is published of a node, and where."""

    api: ApiServer
    node_name: str


def uninstall(
    folders: Folders, *, instance: str, force: bool = False, published: Published | None = None
) -> tuple[str, ...]:
    """Remove plugin, networks' entries, sockets and state. Returns what was removed, as paths of the host.

    What is `published` goes first: no pod is sent here then. Without that kubelet does it, half a minute after the
    driver's end.

    Raises InUse while an agent runs, and, without `force`, while a pod has a device or kubelet has a claim, or while
    that is not known: without agent and plugin nobody could take the device back, and kubelet would not let the claim's
    pod end. Raises InstallFailed if another instance's plugin is there, or something cannot be removed, and Unavailable
    or Refused if the API server does not do what it is asked for.
    """
    state = folders.inside(folders.state)
    if is_locked(state):
        raise InUse(f"an agent works with {folders.state}: delete its DaemonSet first")
    resource_names: set[str] = set()
    try:
        books = read_books(state / LEDGER)
        resource_names = {hold.resource_name for hold in books.holds}
        # A reboot has taken every device back from its pod, but kubelet still asks for its claims to be unprepared.
        rows = [row for row in books.attachments if folders.boot_id in ("", row.boot_id)]
        every = holders(books.holds, books.claims, rows)
        held = [f"{each.device} is {each.how}" for each in every if each.row is not None]
        claims = [str(claim.ref) for claim in books.claims]
        # One that could not be prepared is in no books, and its pod ends no sooner.
        if not force:
            claims += checkpoint.claims_of(folders.inside(folders.kubelet), folders.dra_driver)
        held += [f"claim {claim}" for claim in dict.fromkeys(claims)]
    except LedgerError as error:
        if not force:
            raise InUse(
                f"which pods have devices is not known: {error}; with --force everything is removed all the same"
            ) from error
        held = []
    except Unavailable as error:
        raise InUse(
            f"{error}; a pod that has a claim of {folders.dra_driver} could not end without the agent. {WAY_OUT}"
            " (kubectl get resourceclaims --all-namespaces shows them), then use --force"
        ) from error
    if held and not force:
        raise InUse(
            f"pods have devices of this node: {some(held, SHOWN)}. {WAY_OUT}, or use --force to leave the"
            " devices as they are"
        )
    withdrawn: tuple[str, ...] = ()
    if published is not None and (
        count := slices.remove_all(published.api, Pool(folders.dra_driver, published.node_name))
    ):
        withdrawn = (f"{count} ResourceSlices of {published.node_name}",)
    return (*withdrawn, *_remove_plugin(folders, instance, force=force), *_remove_files(folders, resource_names))


def _remove_plugin(folders: Folders, instance: str, *, force: bool) -> Iterator[str]:
    plugins, networks = folders.inside(folders.plugins), folders.inside(folders.networks)
    install.see_owner(plugins, instance=instance, force=force)  # the networks are that one's too
    if networks.is_dir():
        yield from (f"the plugin in {folders.networks / name}" for name in chain.unchain(networks))
    remembered = chain.unchain_remembered(folders.inside(LIBCNI))
    yield from (f"the plugin in {LIBCNI / 'results' / name}" for name in remembered)
    yield from (str(folders.plugins / name) for name in install.remove(plugins, instance=instance, force=force))


def _remove_files(folders: Folders, resource_names: Iterable[str]) -> Iterator[str]:
    granted = "|".join(re.escape(name.replace("/", "-")) for name in resource_names)
    for folder, pattern in (
        (folders.kubelet / "device-plugins", SOCKET),
        (folders.kubelet / "plugins_registry", re.compile(rf"{re.escape(folders.dra_driver)}-[0-9a-f]{{8}}-reg\.sock")),
        (folders.kubelet / "plugins" / folders.dra_driver, DRA_SOCKET),
        (folders.cdi, CDI_SPEC),
        (FEATURES, re.compile(r"nodefabric|\.nodefabric\.new")),
        (DEVICE_INFO, re.compile(rf"({granted})-.+-device\.json")),
        (folders.run_dir, OWN_SOCKETS),
        (folders.state / SPOOL, spool.OWN),
        # Last: whoever is interrupted before it finds the books again.
        (folders.state, BOOKS),
    ):
        yield from _remove_matching(folders, folder, pattern)
    own = (folders.run_dir, folders.state / SPOOL, folders.state, folders.kubelet / "plugins" / folders.dra_driver)
    for folder in (*own, FEATURES, *MADE_FOR_MOUNTS):
        # Is not there, not empty, or a link: then what it leads to is the host's own, and would be missed.
        with contextlib.suppress(OSError):
            (folders.inside(folder.parent) / folder.name).rmdir()
            yield str(folder)


def _remove_matching(folders: Folders, folder: Path, pattern: re.Pattern[str]) -> Iterator[str]:
    inside = folders.inside(folder)
    for found in sorted(inside.iterdir()) if inside.is_dir() else ():
        if not pattern.fullmatch(found.name):
            continue
        path = folder / found.name
        try:
            found.unlink(missing_ok=True)
        except OSError as error:
            text = f"{path} cannot be removed: {error.strerror}: run this as root, with the host's /"
            raise InstallFailed(text) from error
        yield str(path)
