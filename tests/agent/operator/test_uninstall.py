"""`nodefabric uninstall`: the host's files are what they were, and nothing is taken from under a pod."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest

from agent.__main__ import main
from agent.ledger.database import lock_folder
from agent.operator.uninstall import CDI_SPEC
from tests.agent.operator.uninstalling import CONFLIST, Host
from tests.agent.operator.uninstalling import clean as clean  # the fixture
from tests.agent.operator.uninstalling import host as host  # the fixture
from tests.node import VF, attach, open_books, owner


def test_the_hosts_files_are_what_they_were_and_a_second_run_finds_nothing(
    host: Host, clean: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    host.install()
    assert host.files() != clean
    for name in ("cni.sock.ready", "cni.sock.pods", ".cni.sock.pods.new"):
        (host.run / name).touch()
    (host.run / "cni.sock").unlink()  # as an agent does that ends by itself
    for name in ("ledger.db-wal", "ipam-0123abcd.lock"):  # of one that was killed
        (host.state / name).touch()
    assert host.uninstall("--output", "json") == 0
    assert host.files() == clean
    removed = json.loads(capsys.readouterr().out)["removed"]
    assert {"/opt/cni/bin/nodefabric", "/opt/cni/bin/sriov", "/var/lib/nodefabric", "/run/nodefabric"} <= {*removed}
    assert "the plugin in /etc/cni/net.d/10-cluster.conflist" in removed
    assert host.uninstall() == 0
    assert capsys.readouterr().out == "there was nothing\n"


def test_folders_that_others_use_stay(host: Host, clean: dict[str, str]) -> None:
    host.install()
    others = {
        "etc/cdi": "folder",
        "etc/cdi/nvidia.yaml": "100644 kind: nvidia.com/gpu",
        "run/cdi": "folder",
        "run/cdi/other.json": "100644 {}",
    }
    for name, text in others.items():
        if text != "folder":
            (host.root / name).write_text(text.partition(" ")[2])
    assert host.uninstall() == 0
    assert host.files() == clean | others


def test_a_node_whose_pods_have_devices_is_left_alone(
    host: Host, clean: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    host.install()
    with open_books(host.state) as books:
        attach(books, VF, owner())
    installed = host.files()
    assert host.uninstall() == 4
    said = capsys.readouterr().err
    assert f"{VF} is granted to default/trainer" in said
    assert "Delete these pods while an agent runs" in said
    assert {n: t for n, t in host.files().items() if "ledger" not in n} == {
        n: t for n, t in installed.items() if "ledger" not in n
    }
    assert host.uninstall("--force") == 0
    assert host.files() == clean


def test_a_node_whose_agent_runs_is_left_alone(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.install()
    lock = lock_folder(host.state)
    try:
        assert host.uninstall("--force") == 4
    finally:
        os.close(lock)
    assert "delete its DaemonSet first" in capsys.readouterr().err
    assert (host.root / "opt/cni/bin/nodefabric").exists()


def test_another_instances_plugin_is_left_alone(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.install()
    assert host.uninstall("--instance", "other") == 1
    assert "installed by instance 'nodefabric'" in capsys.readouterr().err
    assert (host.state / "ledger.db").exists()


def test_damaged_books_need_force(host: Host, clean: dict[str, str]) -> None:
    host.install()
    (host.state / "ledger.db").write_bytes(b"no database" * 1000)
    assert host.uninstall() == 4
    assert host.uninstall("--force") == 0
    left = {name for name in host.files() if name not in clean}
    assert all("devinfo" in name or name == "run/k8s.cni.cncf.io" for name in left), left


def test_what_others_keep_in_the_agents_folders_stays(host: Host, clean: dict[str, str]) -> None:
    (host.root / "srv/spool").mkdir(parents=True)
    host.state, host.run = host.root / "srv", host.root / "run/shared"
    others = [host.root / name for name in ("srv/data", "srv/spool/mail", "run/shared/docker.sock")]
    host.state.joinpath("spool").rmdir()
    host.install()
    (host.state / "spool/00001770000000000000-0000000042-0123456789abcdef.del").touch()
    for other in others:
        other.write_text("theirs")
    assert host.uninstall("--state-dir", "/srv", "--run-dir", "/run/shared") == 0
    folders = dict.fromkeys(("srv", "srv/spool", "run/shared"), "folder")
    assert host.files() == clean | folders | {str(o.relative_to(host.root)): "100644 theirs" for o in others}


def test_books_behind_a_link_of_the_hosts_count(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    (host.root / "data/agents").mkdir(parents=True)
    (host.root / "var/lib/nodefabric").symlink_to("/data/../data/agents/nodefabric")
    host.state = host.root / "data/agents/nodefabric"
    host.install()
    with open_books(host.state) as books:
        attach(books, VF, owner())
    assert host.uninstall() == 4
    assert f"{VF} is granted to default/trainer" in capsys.readouterr().err
    assert host.uninstall("--force") == 0
    assert list(host.state.iterdir()) == []


def test_an_empty_folder_behind_a_link_of_the_hosts_stays(host: Host) -> None:
    """Nobody could make the folder again at the end of a link that leads nowhere."""
    (host.root / "data/cni").mkdir(parents=True)
    host.install()
    (host.root / "var/lib/cni").rmdir()
    (host.root / "var/lib/cni").symlink_to("/data/cni")
    assert host.uninstall() == 0
    assert (host.root / "data/cni").is_dir()


def test_a_reboot_has_taken_devices_back(host: Host) -> None:
    host.install()
    with open_books(host.state) as books:
        attach(books, VF, owner())
    random = host.root / "proc/sys/kernel/random"
    random.mkdir(parents=True)
    (random / "boot_id").write_text(f"{books.boot_id}\n")
    assert host.uninstall() == 4
    (random / "boot_id").write_text("the next one\n")
    assert host.uninstall() == 0


def test_running_pods_can_be_ended_by_what_their_runtime_remembers(host: Host) -> None:
    """CRI-O calls the plugins of the configuration that a pod began with."""
    host.install()
    results = host.root / "var/lib/cni/results"
    results.mkdir()
    chained = (host.root / "etc/cni/net.d/10-cluster.conflist").read_bytes()
    assert b"nodefabric" in chained
    remembered = {"kind": "cniCacheV1", "containerId": "c1", "config": base64.b64encode(chained).decode(), "result": {}}
    (results / "cluster-c1-eth0").write_text(json.dumps(remembered))
    authors = base64.b64encode(chained.replace(b'"nodefabric"', b'"nodefabric", "mtu": 9000')).decode()
    (results / "cluster-c3-eth0").write_text(json.dumps({**remembered, "config": authors}))
    others = {"cluster-c2-eth0": json.dumps({**remembered, "config": "?"}), "junk": "{"}
    for name, text in others.items():
        (results / name).write_text(text)
    assert host.uninstall() == 0
    for name in ("cluster-c1-eth0", "cluster-c3-eth0"):
        found = json.loads((results / name).read_text())
        assert found == {**remembered, "config": base64.b64encode(CONFLIST.encode()).decode()}
    assert {path.name: path.read_text() for path in results.iterdir() if path.name in others} == others
    assert len(list(results.iterdir())) == 4


@pytest.mark.parametrize("path", ["var/lib/nodefabric", "/var/lib/../../etc"])
def test_a_path_that_leads_elsewhere_is_refused(host: Host, path: str) -> None:
    with pytest.raises(SystemExit) as ended:
        host.uninstall("--state-dir", path)
    assert ended.value.code == 2


def test_a_host_that_is_not_there_is_not_called_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "hots"
    assert main(["uninstall", "--root", str(missing)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"{missing}: is no folder")


def test_only_the_agents_own_specs_are_removed() -> None:
    for own in (
        *("nodefabric-slot-rdma:vf-0-3.json", "nodefabric-pool-a.json", ".nodefabric-slot-rdma:vf-0-3.json.17"),
        *("nodefabric-claim-c1.json", ".nodefabric-claim-c1.json.17", "nodefabric-claim-c1.claim"),
        "nodefabric-slot-rdma:vf-0-3.slot",
    ):
        assert CDI_SPEC.fullmatch(own)
    for other in ("nvidia.json", "nodefabric.json", "x-nodefabric-slot-1.json", "nodefabric-slot-1.json.bak"):
        assert not CDI_SPEC.fullmatch(other)
