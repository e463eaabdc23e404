"""What doctor sees of the DRA driver: folders, sockets, and what the agent tells."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agent.__main__ import main
from agent.config import Config, Endpoints, Resource
from agent.model.allocation import ClaimState
from agent.model.device import Snapshot
from agent.report import status
from agent.report.doctor.collect import claims, collect
from agent.report.doctor.facts import ClaimFacts, ClusterFacts, HeldClaim
from agent.report.endpoints import EndpointServer
from agent.report.facts import DriverState, Facts
from agent.report.replies import Pages
from agent.report.status.document import served
from tests.agent.ledger.test_claims import claim

CONFIG = Config((Resource("rdma/vf", "vf", offer="dra"),), kubelet_dir=Path("/k"))
CLUSTER = ClusterFacts("v1.36.2", ())
STATE = DriverState("nodefabric.io", "not found", 2, frozenset({"taints"}), (("rdma/vf", "healthy", 4),))


def looked_at(root: Path, config: Config, *, ask_agent: bool) -> ClaimFacts:
    found = claims(root, config, CLUSTER, ask_agent=ask_agent)
    assert found is not None
    return found


@contextmanager
def agent(facts: Facts) -> Iterator[Endpoints]:
    """Have an agent answer, of such a node."""
    document = status.build(facts, node="n", version="1", kinds={}, conditions={})
    server = EndpointServer.open("127.0.0.1", 0, Pages(lambda _: ("", b""), lambda: served(document)))
    try:
        yield Endpoints(port=server.port)
    finally:
        server.close()


def test_the_agent_tells_how_the_driver_stands_and_which_claims_there_are() -> None:
    prepared = replace(claim(), state=ClaimState.PREPARED, since=7.0)
    with agent(Facts(Snapshot(), claims=(prepared,), driver=STATE)) as endpoints:
        found = looked_at(Path("/nowhere"), replace(CONFIG, endpoints=endpoints), ask_agent=True)
    assert found.state == STATE
    assert found.claims == (HeldClaim("default/c", "prepared", 7.0, ("default/trainer",)),)
    assert found.cluster is CLUSTER


def test_an_agent_that_is_away_or_that_has_no_driver_tells_nothing() -> None:
    with agent(Facts(Snapshot())) as endpoints:
        config = replace(CONFIG, endpoints=endpoints)
        assert looked_at(Path("/nowhere"), config, ask_agent=True).state is None
    found = looked_at(Path("/nowhere"), config, ask_agent=True)
    assert (found.state, found.claims) == (None, ())


def test_sockets_of_the_driver_are_tried_and_those_of_others_are_not(short_folder: Path) -> None:
    registry = short_folder / "k/plugins_registry"
    registry.mkdir(parents=True)
    (registry / "gpu.example-1-reg.sock").touch()
    (registry / "nodefabric.io-0-reg.sock").touch()
    living = registry / "nodefabric.io-1-reg.sock"
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(str(living))
        server.listen()
        found = looked_at(short_folder, CONFIG, ask_agent=False)
    assert found.folders == ((str(registry), None),)
    assert found.sockets == ((f"{registry}/nodefabric.io-0-reg.sock", "Connection refused"), (str(living), None))


def test_kubelets_folder_that_is_not_there_is_said(short_folder: Path) -> None:
    found = looked_at(short_folder, CONFIG, ask_agent=False)
    assert found.folders == ((f"{short_folder}/k/plugins_registry", "is not there"),)


def test_a_node_that_offers_nothing_to_claims_is_not_looked_at_for_them(tmp_path: Path) -> None:
    config = Config((Resource("rdma/vf", "vf"),))
    assert collect(tmp_path, Snapshot(), config, Path("c"), ask_agent=False).claims is None
    assert collect(tmp_path, Snapshot(), CONFIG, Path("c"), ask_agent=False).claims is not None


def test_doctor_says_what_claims_lack_without_a_cluster_to_ask(
    short_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    path = short_folder / "config.yaml"
    path.write_text(
        f"{{kubeletDir: {short_folder}/k, endpoints: {{port: 1}}, stateDir: {short_folder}/s,"
        f" runDir: {short_folder}/r, resources: [{{name: rdma/vf, kind: vf, offer: dra}}]}}"
    )
    assert main(["doctor", "--config", str(path)]) == 1
    told = capsys.readouterr().out
    assert f"error    claims       {short_folder}/k/plugins_registry, which kubelet" in told
    assert "only the agent's own container has an account" in told
