"""What install-cni and remove-cni do to the configuration, as a real runtime reads it."""

from __future__ import annotations

import json

from hack.sim.machine import SimulatedMachine
from hack.sim.stage import wait
from tests.containerd.node import Node

OURS = "the nodefabric agent"
"""STATUS of our plugin says so while no agent is there: it shows that the runtime runs the plugin."""


def test_a_single_configuration_is_chained_by_one_before_it_and_comes_back(
    bare: tuple[Node, SimulatedMachine],
) -> None:
    node, _ = bare
    net_d = node.runtime.net_d

    def network() -> tuple[bool, str]:
        return node.runtime.cri.conditions()["NetworkReady"]

    wait("our plugin in the list", lambda: OURS in network()[1] or None)
    (name,) = [path.name for path in net_d.iterdir()]
    node.command("remove-cni")
    wait("the list without us", lambda: network()[0] or None)

    document = json.loads((net_d / name).read_text())
    single = net_d / "10-cluster.conf"
    version = {"cniVersion": document["cniVersion"], "name": document["name"]}
    content = json.dumps({**version, **document["plugins"][0]})
    single.write_text(content)
    (net_d / name).unlink()
    node.command("install-cni", "--relay", str(node.stage.relay), "--chain")
    wait("our plugin before the single one", lambda: OURS in network()[1] or None)
    node.command("remove-cni")
    wait("the single one alone", lambda: network()[0] or None)
    assert [(path.name, path.read_text()) for path in net_d.iterdir()] == [(single.name, content)]
