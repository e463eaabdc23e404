"""One containerd with folders of its own: written down, started, killed, started again, cleared away."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hack.sim.stage import wait
from tests.containerd import image, machine
from tests.containerd.cgroups import Cgroups
from tests.containerd.cri import Cri, RuntimeRefused

START_SECONDS = 60.0
CONFIG = """\
version = 2
root = "{folder}/root"
state = "{folder}/state"
disabled_plugins = ["io.containerd.internal.v1.tracing"]

[grpc]
  address = "{socket}"

[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"
[plugins."io.containerd.nri.v1.nri"]
  disable = true

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  enable_cdi = true
  cdi_spec_dirs = ["/var/run/cdi"]
  # runc may lower a container's oom_score_adj with CAP_SYS_RESOURCE only.
  restrict_oom_score_adj = {restrict}
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{folder}/cni/bin"
    conf_dir = "{folder}/cni/net.d"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "{programs}/runc"
        Root = "{folder}/runc"
        SystemdCgroup = false
"""


def unpacked(suite: str) -> Path:
    """Name the folder in which hack/fetch-containerd puts what it takes from a Debian suite: bin and cni."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "nodefabric/containerd" / suite


def may_lower_oom_score() -> bool:
    """Tell whether this process has CAP_SYS_RESOURCE."""
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> 24 & 1)


class Containerd:
    """A containerd below a folder. Its pods' processes end with `close`, whatever became of it."""

    snapshotter = "native"
    """Copies the few files of our image: works on every file system."""

    def __init__(self, folder: Path, unpacked: Path, cgroups: Cgroups, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.programs = unpacked / "bin"
        self.cgroups = cgroups
        self.log = folder / "containerd.log"
        self.socket = folder / "containerd.sock"
        self.net_d = folder / "cni/net.d"
        self.plugins = folder / "cni/bin"
        self.netns_folder = Path("/var/run/netns")
        self.cri = Cri(self.socket)
        self._environment = {
            **os.environ,
            **environment,
            "PATH": f"{self.programs}:{os.environ['PATH']}:/usr/sbin:/sbin",
        }
        self._process: subprocess.Popen[bytes] | None = None
        for path in (self.net_d, self.plugins, folder / "opt", folder / "logs"):
            path.mkdir(parents=True, exist_ok=True)
        for plugin in (unpacked / "cni").iterdir():
            (self.plugins / plugin.name).symlink_to(plugin)

    def write_config(self) -> None:
        """Write the runtime's configuration, of a version that both 1.7 and 2.x read."""
        text = CONFIG.format(
            folder=self.folder,
            socket=self.socket,
            programs=self.programs,
            pause=image.PAUSE,
            snapshotter=self.snapshotter,
            restrict="false" if may_lower_oom_score() else "true",
        )
        (self.folder / "config.toml").write_text(text)

    def start(self) -> None:
        """Start the runtime and wait until it answers."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [self.programs / "containerd", "--config", self.folder / "config.toml"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait("containerd to answer", self._answers, START_SECONDS)

    def _answers(self) -> bool | None:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeRefused(f"containerd ended with status {self._process.returncode}: {self.log_end()}")
        try:
            return self.cri.conditions()["RuntimeReady"][0] or None
        except RuntimeRefused:
            return None

    def netns(self, sandbox: str) -> Path:
        """Tell where the runtime keeps a sandbox's network namespace."""
        namespaces = self.cri.sandbox_info(sandbox)["runtimeSpec"]["linux"]["namespaces"]
        return Path(next(n["path"] for n in namespaces if n["type"] == "network"))

    def import_images(self) -> None:
        """Make the images and hand them over. They are there when the runtime says so."""
        archive = self.folder / "images.tar"
        image.write(archive, self.programs / "busybox")
        self.take_images(archive, image.POD, image.PAUSE)

    def take_images(self, archive: Path, *names: str) -> None:
        """Import an archive in which images have these names."""
        where = ("--address", str(self.socket), "--namespace", "k8s.io")
        how = ("images", "import", "--local", "--snapshotter", self.snapshotter, str(archive))
        subprocess.run([f"{self.programs}/ctr", *where, *how], check=True, capture_output=True)
        for name in names:
            wait(f"image {name}", lambda name=name: self.cri.has_image(name) or None)  # type: ignore[misc]

    def end(self, number: int) -> None:
        """Send the runtime a signal and wait for its end. Its pods live on."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            process.wait(timeout=30)

    def kill_pods(self) -> None:
        """Kill all that runs in pods, and the shims that watch over them, without a word to the runtime."""
        for pid in self._shims():
            _kill(pid)
        self.cgroups.kill()
        wait("the shims to end", lambda: not self._shims() or None)

    def close(self) -> None:
        """End the runtime, its shims and all that ran in pods; remove their mounts and control groups."""
        self.cri.close()
        self.end(signal.SIGKILL)
        self.kill_pods()
        self.cgroups.remove()
        machine.unmount_below(self.folder)

    def _shims(self) -> list[int]:
        return [pid for pid in machine.processes() if _program(pid).startswith("containerd-shim")]

    def log_end(self, lines: int = 40) -> str:
        """Return the last lines of the runtime's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def _program(pid: int) -> str:
    try:
        words: Sequence[str] = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return ""
    return Path(words[0]).name


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
