"""What ADD tells containers of devices that claims bring."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import gids
from tests.cni import tiny_node
from tests.cni.claiming import Scene, of_share, of_vf
from tests.cni.modes import rdma_node
from tests.cni.modes.rdma_node import rdma_name

ASKED = {"env": ["UCX_NET_DEVICES=mlx5_1:1", "NODEFABRIC_RAILS=/run/nodefabric/rails.json"]}


@pytest.fixture
def scene(own_network: None, tmp_path: Path) -> Iterator[Scene]:
    """A node with RDMA devices, whose resources tell."""
    rdma_node.create(tmp_path, mode="shared")
    with tiny_node.open_rig(tmp_path) as rig:
        made = Scene(rig)
        config = made.config.value
        made.config.set(replace(config, resources=tuple(replace(r, environment=("ucx",)) for r in config.resources)))
        yield made


def edits(scene: Scene, claim: str) -> dict[str, Any]:
    text = (scene.rig.folder / f"cdi/nodefabric-claim-uid-{claim}.json").read_text()
    (device,) = json.loads(text)["devices"]
    return dict(device["containerEdits"])


def rails(scene: Scene) -> list[str]:
    return sorted(path.name for path in (scene.rig.folder / "cdi").glob("*.rails"))


def test_a_claims_containers_are_told_the_index_of_the_pods_address_and_the_next_pods_anew(scene: Scene) -> None:
    rig = scene.rig
    network = {"name": "rails", "ipam": rig.stub_ipam(tiny_node.stub_answer("10.9.0.2/24"))}
    scene.claim("nics", of_vf(0, network=network, edits=ASKED), pods=("c1", "c2"))
    table = rig.machine.root / "sys/class/infiniband" / rdma_name(0)
    pod = rig.pod()
    gids.enter(table, 4, "10.9.0.2/24", "net1")
    scene.start("c1", pod)
    told = edits(scene, "nics")
    assert told["env"] == [*ASKED["env"], "UCX_IB_GID_INDEX=4"]
    (nic,) = json.loads(Path(told["mounts"][0]["hostPath"]).read_text())["rails"]
    assert (nic["nic"]["interface"], nic["nic"]["addresses"]) == ("net1", ["10.9.0.2/24"])
    claim = rig.ledger.claim("uid-nics")
    assert claim is not None
    assert claim.devices[0].edits == told  # so a spec that somebody removes comes back

    rig.delete("c1", pod, ifname="eth0")
    rig.await_back(0)
    assert rails(scene) == []
    (table / "ports/1/gids/4").rename(table / "ports/1/gids/6")
    gids.enter(table, 6, "10.9.0.2/24", "net1")
    scene.start("c2")
    assert "UCX_IB_GID_INDEX=6" in edits(scene, "nics")["env"]
    assert rails(scene) == ["nodefabric-sandbox-c2.rails"]


def test_a_claim_of_several_pods_tells_of_none(scene: Scene) -> None:
    scene.claim("shared", of_share(network={"mode": "macvlan"}, edits=ASKED), pods=("c1", "c2"), owned=False)
    scene.start("c1")
    assert edits(scene, "shared")["mounts"]
    scene.start("c2")
    assert edits(scene, "shared") == ASKED
