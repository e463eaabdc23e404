"""Take everything off a node that the agent and its plugin have put there.

Only what is known to be the agent's goes: its folders are told by the files that every agent makes in them, files
in other programs' folders by their names, networks and plugins as `cni.install` and `cni.chain` tell them. Folders
that kubelet makes for the DaemonSet's mounts go if they are empty. Repeatable, after a crash at any line too.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from agent import device_info
from agent.errors import InstallFailed, InUse, LedgerError
from agent.ledger import lock, reading
from cni import chain, install

LEDGER = "ledger.db"
SHOWN = 8
SOCKET = re.compile(r"nodefabric-.+\.sock")
CDI_SPEC = re.compile(r"nodefabric-(slot|pool)-.+\.json|\.nodefabric-(slot|pool)-.+\.json\.[0-9]+")
FEATURES = re.compile(r"nodefabric|\.nodefabric\.new")
"""The file for node-feature-discovery, and a half-written one."""
DEVICE_INFO = device_info.FOLDER / "dp"
NFD_FEATURES = Path("/etc/kubernetes/node-feature-discovery/features.d")
MADE_FOR_MOUNTS = (
    NFD_FEATURES,
    *(DEVICE_INFO, *list(DEVICE_INFO.parents)[:2]),
    *(Path("/var/run/cdi"), Path("/etc/cdi"), Path("/var/run/cni"), Path("/var/lib/cni"), Path("/var/run/netns")),
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

    def inside(self, path: Path) -> Path:
        """Return where a path of the host is found here.

        /var/run is a link to /run on today's hosts, and an absolute one on some: followed, it would leave `root`.
        """
        inner = path.relative_to("/")
        if inner.parts[:2] == ("var", "run") and (self.root / "var/run").is_symlink():
            inner = inner.relative_to("var")
        return self.root / inner


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
        held = [f"{attachment.device} in {attachment.owner.pod}" for attachment in books.attachments]
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
    yield from (str(places.plugins / name) for name in install.remove(plugins, instance=instance, force=force))


def _remove_files(places: Places, resource_names: Iterable[str]) -> Iterator[str]:
    granted = "|".join(re.escape(name.replace("/", "-")) for name in resource_names)
    for folder, pattern in (
        (places.kubelet / "device-plugins", SOCKET),
        (places.cdi, CDI_SPEC),
        (NFD_FEATURES, FEATURES),
        (DEVICE_INFO, re.compile(rf"({granted})-.+-device\.json")),
    ):
        yield from _remove_matching(places, folder, pattern)
    # The state last: whoever is interrupted before it finds the books again.
    for folder, marker in ((places.run, "*.sock"), (places.state, lock.NAME)):
        inside = places.inside(folder)
        if inside.is_dir() and any(inside.glob(marker)):
            with _told(folder):
                shutil.rmtree(inside)
            yield str(folder)
    for folder in (places.run, places.state, *MADE_FOR_MOUNTS):
        with contextlib.suppress(OSError):  # is not there, or not empty
            places.inside(folder).rmdir()
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
