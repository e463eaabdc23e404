"""`nodefabric uninstall`: the host's files are what they were, and nothing is taken from under a pod."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent.ledger.database import lock_folder
from agent.operator.uninstall import CDI_SPEC
from hack.sim.cluster.apiserver import ApiServerStandIn
from hack.sim.dra.claims import CHECKPOINT, ClaimCache, ClaimInfo
from tests.agent.operator.uninstalling import CLAIM, CONFLIST, Host
from tests.agent.operator.uninstalling import clean as clean  # the fixture
from tests.agent.operator.uninstalling import host as host  # the fixture
from tests.node import VF, attach, open_books, owner
from tests.sim.cluster.dra_documents import SLICES, resource_slice
from tests.sim.cluster.test_apiserver import call


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


def test_only_the_agents_own_specs_are_removed() -> None:
    for own in (
        *("nodefabric-slot-rdma:vf-0-3.json", "nodefabric-pool-a.json", ".nodefabric-slot-rdma:vf-0-3.json.17"),
        *("nodefabric-claim-c1.json", ".nodefabric-claim-c1.json.17", "nodefabric-claim-c1.claim"),
        "nodefabric-slot-rdma:vf-0-3.slot",
    ):
        assert CDI_SPEC.fullmatch(own)
    for other in ("nvidia.json", "nodefabric.json", "x-nodefabric-slot-1.json", "nodefabric-slot-1.json.bak"):
        assert not CDI_SPEC.fullmatch(other)


def test_a_node_with_prepared_claims_is_left_alone(
    host: Host, clean: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also after a reboot: kubelet asks for a claim's end as long as the pod is there."""
    host.install()
    with open_books(host.state) as books:
        books.prepare_claim(replace(CLAIM, devices=()))
    boot_id = host.root / "proc/sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True)
    boot_id.write_text("another\n")
    assert host.uninstall() == 4
    assert "pods have devices of this node: claim default/rails. Delete" in capsys.readouterr().err
    assert (host.root / "run/cdi/nodefabric-claim-c1.json").exists()
    with open_books(host.state) as books:
        books.remove_claim("c1")
    assert host.uninstall() == 0
    assert not (host.root / "run/cdi/nodefabric-claim-c1.json").exists()
    assert not (host.root / "var/lib/kubelet/plugins/nodefabric.io").exists()


def test_a_node_is_left_alone_while_kubelet_has_a_claim_that_could_not_be_prepared(
    host: Host, clean: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    host.install()
    file = host.root / "var/lib/kubelet" / CHECKPOINT
    noted = ClaimCache(file)
    ours = ClaimInfo("c1", "default", "rails", {"p1"}, {"gpu.nvidia.com": [], "nodefabric.io": []})
    noted.add(ours)
    noted.add(ClaimInfo("c2", "default", "gpu", {"p2"}, {"gpu.nvidia.com": []}))
    noted.save()
    assert host.uninstall() == 4
    said = capsys.readouterr().err
    assert "claim default/rails. Delete" in said
    assert "default/gpu" not in said
    noted.remove(ours)
    noted.save()
    assert host.uninstall() == 0
    file.unlink()
    assert host.files() == clean


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[ApiServerStandIn, Path]]:
    """An API server that knows slices of this node's driver, of another's, and of another node; and a kubeconfig."""
    with ApiServerStandIn() as server:
        for name, driver, node in (
            ("own-0", "nodefabric.io", "n"),
            ("own-1", "nodefabric.io", "n"),
            ("gpu", "gpu.nvidia.com", "n"),
            ("far", "nodefabric.io", "m"),
        ):
            made = resource_slice(name, driver=driver, node=node)
            assert call(server.port, "PATCH", f"{SLICES}/{name}?fieldManager=x&force=true", made)[0] == 201
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(server.kubeconfig())
        yield server, kubeconfig


def slices(server: ApiServerStandIn) -> list[str]:
    return sorted(item["metadata"]["name"] for item in call(server.port, "GET", SLICES)[1]["items"])


def test_the_slices_of_the_node_are_taken_away_once_no_pod_has_a_device(
    host: Host, cluster: tuple[ApiServerStandIn, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    server, kubeconfig = cluster
    host.install()
    with open_books(host.state) as books:
        books.prepare_claim(replace(CLAIM, devices=()))
    arguments = ("--slices-of", "n", "--kubeconfig", str(kubeconfig))
    assert host.uninstall(*arguments) == 4
    assert slices(server) == ["far", "gpu", "own-0", "own-1"]
    with open_books(host.state) as books:
        books.remove_claim("c1")
    assert host.uninstall(*arguments) == 0
    assert slices(server) == ["far", "gpu"]
    assert "removed 2 ResourceSlices of n\n" in capsys.readouterr().out
    # Again, as a pod does that was started again.
    assert host.uninstall(*arguments) == 0
    assert capsys.readouterr().out == "there was nothing\n"


def test_books_stay_as_long_as_slices_cannot_be_taken_away(host: Host, tmp_path: Path) -> None:
    with ApiServerStandIn() as server:
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(server.kubeconfig())
    host.install()
    installed = host.files()
    assert host.uninstall("--slices-of", "n", "--kubeconfig", str(kubeconfig)) != 0
    # SQLite's own files beside the books come and go with whoever reads them.
    assert {n: t for n, t in host.files().items() if "ledger.db-" not in n} == {
        n: t for n, t in installed.items() if "ledger.db-" not in n
    }


def test_a_driver_of_another_name_is_removed_by_that_name(host: Host, clean: dict[str, str]) -> None:
    host.install()
    kubelet = host.root / "var/lib/kubelet"
    (kubelet / "plugins/nodefabric.io").rename(kubelet / "plugins/dra.example.com")
    registry = kubelet / "plugins_registry"
    (registry / "nodefabric.io-0a1b2c3d-reg.sock").rename(registry / "dra.example.com-0a1b2c3d-reg.sock")
    assert host.uninstall("--dra-driver", "dra.example.com") == 0
    assert host.files() == clean
