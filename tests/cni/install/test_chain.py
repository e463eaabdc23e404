"""Our plugin in the cluster network: which file the runtime takes, our entry in its text, put there whole and kept."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from agent.errors import InstallFailed
from agent.model.fields import MAX_BYTES
from cni.install import chain
from cni.install.chain import ConflistInvalid, Keeper
from tests.cni.killed import kill_at_each_step

CALICO = b"""{
  "name": "k8s-pod-network",
  "cniVersion": "0.3.1",
  "plugins": [
    {"type": "calico", "mtu": 0, "big": 123456789012345678901234567890, "float": 1e3, "\\u00e4": "\\ud83d\\ude00"},
    {
      "type": "bandwidth",
      "capabilities": {"bandwidth": true}
    }
  ],
  "plugins-": ["]"]
}
"""
BRIDGE = b'{"cniVersion": "1.0.0", "name": "b", "type": "bridge", "ipam": {"type": "host-local"}}\n'


def test_an_entry_in_another_place_or_twice_is_taken_out_too() -> None:
    other = {"type": "a"}
    for listed in ([OURS, other], [other, OURS, other], [OURS, OURS, other], [OURS, other, OURS]):
        found = chain.unchained(json.dumps({"cniVersion": "1.0.0", "plugins": listed}).encode())
        assert json.loads(found or b"")["plugins"] == [other] * listed.count(other)


def test_what_an_earlier_version_has_joined_is_taken_out_though_a_key_is_there_twice(tmp_path: Path) -> None:
    plugin = '{"type": "bridge", "mtu": 1400, "mtu": 1500}'
    head = '"cniVersion": "1.0.0", "name": "b"'
    (tmp_path / "10-a.conflist").write_text(f'{{{head}, "plugins": [{plugin}, {{"type": "nodefabric"}}]}}')
    wraps = f'{{{head}, "nodefabric-wraps": "20-b.conf", "plugins": [{plugin}, {{"type": "nodefabric"}}]}}'
    (tmp_path / "20-b-nodefabric.conflist").write_text(wraps)
    assert chain.unchain(tmp_path) == ("10-a.conflist", "20-b-nodefabric.conflist")
    assert names(tmp_path) == ["10-a.conflist"]
    assert plugins(tmp_path / "10-a.conflist") == [{"type": "bridge", "mtu": 1500}]  # as libcni understands it


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (CALICO[:-40], "is it being written"),
        (b"[]", "no JSON object"),
        (b'{"plugins": [{"type": "x"}], "plugins": [{"type": "y"}]}', "twice"),
        (b"{}", "no list 'plugins'"),
        (b'{"plugins": {}}', "no list 'plugins'"),
        (b'{"plugins": []}', "no list 'plugins' with any in it"),
        (b'{"plugins": [1]}', r"plugins\[0\] has no 'type'"),
        (b'{"plugins": [{"type": "a"}, {"type": 1}]}', r"plugins\[1\] has no 'type'"),
        (b'{"plugins": [{"type": "a"}]}', "cniVersion is '0.1.0'"),
        (b'{"cniVersion": "0.2.0", "plugins": [{"type": "a"}]}', "cniVersion is '0.2.0'"),
        (b'{"cniVersion": ["1.0.0"], "plugins": [{"type": "a"}]}', "cniVersion is"),
    ],
)
def test_what_cannot_be_joined_is_refused_with_its_reason(content: bytes, problem: str) -> None:
    with pytest.raises(ConflistInvalid, match=problem):
        chain.chained(content)
    with pytest.raises(ConflistInvalid, match=f"10-a.conflist: .*{problem}"):
        chain.plan_for({"10-a.conflist": content})


def test_the_runtime_takes_the_first_by_bytes_of_what_libcni_reads() -> None:
    names = ["20-b.conflist", "10-a.conf.bak", "B.json", "a.conf", "10-a.conflist~", ".nodefabric-install-1", "conf"]
    assert chain.candidates(names) == ["20-b.conflist", "B.json", "a.conf"]
    assert chain.candidates(["é.conf", "z.conf", ".hidden.conf"]) == [".hidden.conf", "z.conf", "é.conf"]


def test_a_wrapper_follows_what_it_wraps() -> None:
    name = "10-b-nodefabric.conflist"
    old = chain.wrapped("10-b.conf", BRIDGE)
    changed = BRIDGE.replace(b"bridge", b"ptp")
    assert chain.plan_for({"10-b.conf": changed, name: old}).write == (name, chain.wrapped("10-b.conf", changed))
    assert chain.plan_for({name: old}).remove == (name,)
    assert chain.plan_for({"05-c.conf": BRIDGE, "10-b.conf": BRIDGE, name: old}).remove == (name,)
    assert chain.plan_for({name: old, "10-b.conflist": CALICO}).remove == (name,)
    assert chain.plan_for({}) == chain.Plan(None)


def test_a_file_that_only_looks_like_a_wrapper_is_a_network() -> None:
    assert chain.plan_for({"10-b-nodefabric.conflist": CALICO}).network == "10-b-nodefabric.conflist"


@pytest.mark.parametrize("missing", ["type", "name", "cniVersion"])
def test_a_single_configuration_that_lacks_something_is_refused(missing: str) -> None:
    document = json.loads(BRIDGE)
    del document[missing]
    with pytest.raises(ConflistInvalid, match=missing):
        chain.wrapped("10-b.conf", json.dumps(document).encode())


OURS = {"type": "nodefabric"}


def plugins(file: Path) -> list[dict[str, object]]:
    return list(json.loads(file.read_bytes())["plugins"])


def state(file: Path) -> tuple[int, ...]:
    """All that a write changes of a file. Reading it may give it another time of access."""
    found = file.stat()
    return found.st_ino, found.st_mode, found.st_uid, found.st_gid, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_plugin_joins_the_first_network_once_and_leaves_as_it_came(tmp_path: Path) -> None:
    first, second = tmp_path / "10-calico.conflist", tmp_path / "20-other.conflist"
    for file in (first, second):
        file.write_bytes(CALICO)
    first.chmod(0o600)
    os.chown(first, 12, 34)
    assert not chain.chain(tmp_path).is_done
    before = json.loads(CALICO)
    assert json.loads(first.read_bytes()) == {**before, "plugins": [*before["plugins"], OURS]}
    assert list(json.loads(first.read_bytes())) == list(before)
    found = first.stat()
    assert (found.st_mode & 0o7777, found.st_uid, found.st_gid) == (0o600, 12, 34)
    chained = state(first)
    assert chain.chain(tmp_path).is_done
    assert state(first) == chained
    assert second.read_bytes() == CALICO
    assert chain.unchain(tmp_path) == ("10-calico.conflist",)
    assert chain.unchain(tmp_path) == ()
    assert json.loads(first.read_bytes()) == before
    assert (first.stat().st_mode & 0o7777, first.stat().st_uid) == (0o600, 12)
    assert names(tmp_path) == [first.name, second.name]


def test_a_single_configuration_is_wrapped_and_never_touched(tmp_path: Path) -> None:
    file = tmp_path / "10-bridge.conf"
    file.write_bytes(BRIDGE)
    file.chmod(0o640)
    before = state(file)
    chain.chain(tmp_path)
    wrapper = tmp_path / "10-bridge-nodefabric.conflist"
    assert names(tmp_path) == [wrapper.name, "10-bridge.conf"]
    assert (json.loads(wrapper.read_bytes())["cniVersion"], plugins(wrapper)) == ("1.0.0", [json.loads(BRIDGE), OURS])
    assert chain.chain(tmp_path).is_done
    assert (tmp_path / "10-bridge-nodefabric.conflist").stat().st_mode & 0o7777 == 0o640
    assert state(file) == before
    assert chain.unchain(tmp_path) == ("10-bridge-nodefabric.conflist",)
    assert state(file) == before
    assert names(tmp_path) == ["10-bridge.conf"]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_is_not_followed_nor_waited_for(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "net.d"
    folder.mkdir()
    victim = tmp_path / "victim"
    victim.write_bytes(CALICO)
    if kind == "link":
        (folder / "10-a.conflist").symlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(folder / "10-a.conflist")
    else:
        (folder / "10-a.conflist").mkdir()
    (folder / "20-b.conflist").write_bytes(CALICO)
    if kind == "folder":  # libcni passes folders over
        chain.chain(folder)
        assert plugins(folder / "20-b.conflist")[-1] == OURS
    else:
        with pytest.raises(InstallFailed, match="is no plain file"):
            chain.chain(folder)
        assert (folder / "20-b.conflist").read_bytes() == CALICO
    assert victim.read_bytes() == CALICO
    assert (folder / "10-a.conflist").exists() or kind == "pipe"


def test_what_cannot_be_joined_is_named_and_left(tmp_path: Path) -> None:
    (tmp_path / "10-a.conflist").write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(InstallFailed, match=r"10-a\.conflist: File too large"):
        chain.chain(tmp_path)


@pytest.mark.parametrize("plugins", [[{"type": "a"}, {**OURS, "vlan": 5}], [OURS]], ids=["settings", "alone"])
def test_an_entry_of_somebody_else_keeps_the_plugin_named(tmp_path: Path, plugins: list[dict[str, Any]]) -> None:
    content = json.dumps({"cniVersion": "1.0.0", "plugins": plugins}).encode()
    (tmp_path / "10-a.conflist").write_bytes(content)
    assert chain.chain(tmp_path).is_done
    with pytest.raises(InstallFailed, match=r"10-a\.conflist still names the plugin"):
        chain.unchain(tmp_path)
    assert (tmp_path / "10-a.conflist").read_bytes() == content


def test_a_network_that_changes_while_we_join_it_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "10-a.conflist"
    file.write_bytes(CALICO)
    newer = CALICO.replace(b"calico", b"cilium")

    monkeypatch.setattr(os, "fsync", lambda fd: file.write_bytes(newer))
    with pytest.raises(InstallFailed, match="was changed by somebody else just now"):
        chain.chain(tmp_path)
    assert file.read_bytes() == newer
    assert names(tmp_path) == [file.name]


@pytest.mark.parametrize(("name", "content"), [("10-a.conflist", CALICO), ("10-b.conf", BRIDGE)])
@pytest.mark.parametrize("direction", ["chain", "unchain"])
def test_a_killed_installer_never_leaves_a_half_written_network(
    tmp_path: Path, name: str, content: bytes, direction: str
) -> None:
    work = chain.chain if direction == "chain" else chain.unchain

    def prepare(place: Path) -> None:
        (place / "net.d").mkdir()
        (place / "net.d" / name).write_bytes(content)
        if direction == "unchain":
            chain.chain(place / "net.d")

    for place in kill_at_each_step(tmp_path, lambda: work(Path("net.d")), prepare):
        folder = place / "net.d"
        taken = folder / chain.candidates(names(folder))[0]
        assert json.loads(taken.read_bytes())["cniVersion"]  # what the runtime takes at this moment is whole
        chain.chain(folder)
        assert chain.look(folder).is_done
        chain.unchain(folder)
        left = {path.name: json.loads(path.read_bytes()) for path in folder.iterdir()}
        assert left == {name: json.loads(content)}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_first_loss_to_the_main_plugin_is_made_good_at_once_and_the_next_ones_later_and_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "10-a.conflist"
    clock = Clock()
    keeper = Keeper(tmp_path, clock=clock)
    keeper.look_after()
    file.write_bytes(CALICO)
    back, seconds = [], 0.0
    for _ in range(400):
        seconds = keeper.look_after()
        if chain.look(tmp_path).is_done:
            back.append(clock.now)
            keeper.look_after()
            file.write_bytes(CALICO)  # and again, at once
        clock.now += min(seconds, 10) or 0.5
    gaps = [int(after - before) for before, after in itertools.pairwise(back)]
    assert gaps[:10] == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert {*gaps[10:]} == {300}
    assert "another program has taken nodefabric out 2 times" in caplog.text
    clock.now += chain.PEACE_SECONDS
    keeper.look_after()
    keeper.look_after()
    file.write_bytes(CALICO)
    assert keeper.look_after() == 0
    assert chain.look(tmp_path).is_done


def test_a_network_that_comes_later_is_joined_and_what_is_wrong_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = Keeper(tmp_path)
    assert keeper.look_after() == chain.POLL_SECONDS
    (tmp_path / "10-a.conflist").write_bytes(CALICO[:100])
    assert [keeper.look_after() for _ in range(5)] == [chain.POLL_SECONDS] * 5
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    (tmp_path / "10-a.conflist").write_bytes(CALICO)
    assert keeper.look_after() == 0
    assert plugins(tmp_path / "10-a.conflist")[-1] == OURS


def test_whatever_changes_in_a_folder_shows(tmp_path: Path) -> None:
    folder = tmp_path / "net.d"
    file = folder / "10-a.conflist"
    found = [chain.versions(folder)]
    for change in (folder.mkdir, lambda: file.write_bytes(CALICO), lambda: file.write_bytes(BRIDGE), file.unlink):
        change()
        found.append(chain.versions(folder))
    assert all(before != after for before, after in itertools.pairwise(found))
