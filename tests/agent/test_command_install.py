"""install-cni and remove-cni as somebody runs them: what they say, and with which status they end."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from agent.__main__ import main
from cni.install import commands
from cni.install.installation import MARKER
from tests.waiting import until

CONFLIST = json.dumps({"cniVersion": "1.0.0", "name": "cluster", "plugins": [{"type": "ptp"}]}, indent=2) + "\n"


class Host:
    """A host's two folders, and a relay to put there."""

    def __init__(self, folder: Path) -> None:
        self.relay, self.bin, self.net_d, self.log = (folder / name for name in ("relay", "bin", "net.d", "log"))
        self.relay.write_bytes(b"\x7fELF")
        self.bin.mkdir()
        self.net_d.mkdir()
        self.network = self.net_d / "10-a.conflist"

    def arguments(self, command: str, *more: str) -> list[str]:
        places = [command, "--target", str(self.bin), "--conf-dir", str(self.net_d)]
        return [*places, *(["--relay", str(self.relay)] if command == "install-cni" else []), *more]

    @property
    def types(self) -> list[str]:
        return [plugin["type"] for plugin in json.loads(self.network.read_text())["plugins"]]

    def write(self, content: str) -> None:
        """Write the network in one step, as its author does."""
        fresh = self.network.with_suffix(".tmp")
        fresh.write_text(content)
        fresh.rename(self.network)

    @contextmanager
    def watching(self, *more: str, status: int = 0) -> Iterator[subprocess.Popen[bytes]]:
        """Have a process watch, which logs into `log`. It is ended at last, unless it ends by itself."""
        command = [sys.executable, "-m", "agent", *self.arguments("install-cni", "--chain", "--watch", *more)]
        with self.log.open("ab") as stderr, subprocess.Popen(command, stdout=stderr, stderr=stderr) as process:
            try:
                yield process
            finally:
                process.send_signal(signal.SIGTERM)
                ended = process.wait(60)
        assert ended == status


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("nodefabric ")


def test_everything_is_put_there_and_taken_away_again(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.network.write_text(CONFLIST)
    for said in ("installed nodefabric, sriov", "this relay is there already"):
        assert main(host.arguments("install-cni", "--chain", "--replace", "sriov")) == 0
        assert said in capsys.readouterr().out
    assert host.types == ["ptp", "nodefabric"]
    for said in ("nodefabric is taken out", "there was no relay"):
        assert main(host.arguments("remove-cni")) == 0
        assert said in capsys.readouterr().out
    assert host.network.read_text() == CONFLIST
    assert list(host.bin.iterdir()) == []


def test_a_network_of_the_plugins_own_keeps_it_until_its_file_is_removed(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an earlier version's --conflist put it there."""
    own = host.net_d / "50-rails.conflist"
    own.write_text(CONFLIST.replace("ptp", "nodefabric"))
    assert main(host.arguments("install-cni")) == 0
    assert main(host.arguments("remove-cni")) == 1
    assert (
        "50-rails.conflist still names the plugin, as its author wrote it: take it out there, or remove the file"
        in (capsys.readouterr().err)
    )
    assert (host.bin / "nodefabric").exists()
    own.unlink()
    assert main(host.arguments("remove-cni")) == 0
    assert list(host.bin.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--target", "/nowhere/bin"], 2, "/nowhere/bin: is no folder"),
        (["--chain", "--conf-dir", "/nowhere"], 2, "/nowhere: is no folder"),
        (["--replace", "sriov,bridge"], 2, "'bridge' is none of"),
        (["--relay", "/nowhere"], 1, "build the relay first"),
        (["--chain"], 1, "holds no network to join yet"),
        (["--instance", "other"], 1, "installed by instance 'nodefabric'"),
    ],
)
def test_what_goes_wrong_has_a_status_and_a_reason(
    host: Host, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, said: str
) -> None:
    (host.bin / MARKER).write_text('{"instance": "nodefabric", "replaced": []}')
    assert main(host.arguments("install-cni", *arguments)) == status
    assert said in capsys.readouterr().err
    assert (host.bin / "nodefabric").exists() is ("no network to join" in said)


def test_the_removal_by_another_instance_touches_nothing(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.network.write_text(CONFLIST)
    assert main(host.arguments("install-cni", "--chain")) == 0
    assert main(host.arguments("remove-cni", "--instance", "other")) == 1
    assert "installed by instance 'nodefabric'" in capsys.readouterr().err
    assert host.types == ["ptp", "nodefabric"]
    assert (host.bin / "nodefabric").exists()


def test_without_an_agent_the_plugin_is_not_chained_in(
    host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "WAIT_SECONDS", 0.3)
    host.network.write_text(CONFLIST)
    arguments = host.arguments("install-cni", "--chain", "--wait-for", str(tmp_path / "s"))
    assert main(arguments) == 3
    assert "no agent listens" in capsys.readouterr().err
    assert host.types == ["ptp"]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        assert main(arguments) == 0
    assert host.types == ["ptp", "nodefabric"]


def test_the_watch_puts_back_what_others_take_away_until_it_is_ended(host: Host, tmp_path: Path) -> None:
    path, plugin = tmp_path / "s", host.bin / "nodefabric"
    with host.watching("--wait-for", str(path)), socket.socket(socket.AF_UNIX) as listener:
        until(plugin.exists)
        host.network.write_text(CONFLIST)
        listener.bind(str(path))
        listener.listen()
        until(lambda: len(host.types) == 2)
        plugin.unlink()
        host.write(CONFLIST.replace("ptp", "flannel"))
        until(lambda: host.types == ["flannel", "nodefabric"])
        until(plugin.exists)
        assert main(host.arguments("install-cni", "--chain")) == 0  # the watch holds no lock between


def test_the_watches_of_two_versions_do_not_undo_each_others_work(host: Host, tmp_path: Path) -> None:
    """In an update the next pod installs its relay while the watch of the last one still runs."""
    host.network.write_text(CONFLIST)
    plugin, newer = host.bin / "nodefabric", tmp_path / "newer"
    newer.write_bytes(b"\x7fELF newer")

    def looked() -> None:
        """Have both watches look twice, by a network that was written anew."""
        for _ in range(2):
            host.write(CONFLIST)
            until(lambda: host.types == ["ptp", "nodefabric"])

    with ExitStack() as second:
        with host.watching():
            until(lambda: host.types == ["ptp", "nodefabric"])
            second.enter_context(host.watching("--relay", str(newer)))
            until(lambda: plugin.read_bytes() == newer.read_bytes())
            looked()
        assert (plugin.read_bytes(), host.types) == (newer.read_bytes(), ["ptp", "nodefabric"])
        plugin.unlink()
        looked()
        until(plugin.exists)
        assert plugin.read_bytes() == newer.read_bytes()
        assert host.log.read_text().count("put back: nodefabric") == 1


def test_a_watch_puts_its_relay_back_where_a_newer_one_is_lost_whose_pod_is_gone(host: Host, tmp_path: Path) -> None:
    """An update that is taken back leaves the newer relay there, and nobody else to keep one."""
    host.network.write_text(CONFLIST)
    plugin, newer = host.bin / "nodefabric", tmp_path / "newer"
    newer.write_bytes(b"\x7fELF newer")
    with host.watching():
        until(lambda: host.types == ["ptp", "nodefabric"])
        assert main(host.arguments("install-cni", "--chain", "--relay", str(newer))) == 0
        assert plugin.read_bytes() == newer.read_bytes()
        plugin.unlink()
        until(plugin.exists)
        assert plugin.read_bytes() == host.relay.read_bytes()


def test_the_watch_outlasts_a_plugin_folder_that_is_away_for_a_while(host: Host, tmp_path: Path) -> None:
    host.network.write_text(CONFLIST)
    with host.watching():
        until(lambda: len(host.types) == 2)
        host.bin.rename(tmp_path / "away")  # in one step: the watch may be writing there just now
        for _ in range(2):
            host.network.write_text(CONFLIST)  # and so it looks
            until(lambda: len(host.types) == 2)
        until(lambda: f"{host.bin}: is no folder" in host.log.read_text())
        assert host.log.read_text().count("is no folder") == 1
        host.bin.mkdir()
        until(lambda: (host.bin / "nodefabric").exists())


def test_the_watch_ends_where_its_folder_was_deleted_beneath_it(own_network: None, host: Host, tmp_path: Path) -> None:
    """A container that begins again sees the folder that has come in its place."""
    seen = tmp_path / "seen"
    seen.mkdir()
    subprocess.run(["mount", "--bind", host.net_d, seen], check=True)
    try:
        host.network.write_text(CONFLIST)
        with host.watching("--conf-dir", str(seen), status=1) as process:
            until(lambda: len(host.types) == 2)
            shutil.rmtree(host.net_d)
            host.net_d.mkdir()
            process.wait(60)
        said = "deleted on the host, where this container does not see what has come instead"
        assert f"{said}: {seen}" in host.log.read_text()
    finally:
        subprocess.run(["umount", seen], check=True)


def test_the_default_instance_can_come_from_the_environment(host: Host) -> None:
    environment = {"NODEFABRIC_INSTANCE": "kube-system", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "agent", *host.arguments("install-cni")]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert json.loads((host.bin / MARKER).read_text())["instance"] == "kube-system"
    assert Path("/opt/cni/bin") == commands.DEFAULT_TARGET
