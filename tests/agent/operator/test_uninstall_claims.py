"""`nodefabric uninstall` of what serves DRA claims: claims on file, slices of the node, the driver's sockets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hack.sim.cluster.apiserver import ApiServerStandIn
from hack.sim.dra.claims import CHECKPOINT, ClaimCache, ClaimInfo
from tests.agent.operator.uninstalling import CLAIM, Host
from tests.agent.operator.uninstalling import clean as clean  # the fixture
from tests.agent.operator.uninstalling import host as host  # the fixture
from tests.node import open_books
from tests.sim.cluster.dra_documents import SLICES, resource_slice
from tests.sim.cluster.test_apiserver import call


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
