"""A node whose devices have other numbers when the agent starts again, while kubelet replays what it was answered."""

from __future__ import annotations

from agent.hardware import recorded
from hack.sim.stage import CONFIG, Stage
from tests.renumbered import lay_out, permuted
from tests.waiting import until

NODE = "h100-8gpu"
DOCUMENT = {"resources": [{"name": "rdma/hca", "kind": "hca", "shares": 4}, *CONFIG["resources"][2:]]}


def reboot(stage: Stage) -> None:
    """Start the agent anew where all devices have each other's numbers. Specs are on a tmpfs, and gone."""
    stage.end("agent")
    for spec in (stage.folder / "cdi-specs").glob("*"):
        spec.unlink()
    place = lay_out(stage.folder, "node-2", permuted(recorded.find(NODE).read_text()), with_links=False)
    stage.host = ("--simulate", str(place))
    stage.start_agent()
    stage.await_ready()


def test_units_whose_pod_was_told_paths_are_withheld_when_these_are_anothers(stage: Stage) -> None:
    stage.play(NODE, {**DOCUMENT, "cdiNames": False}, with_links=False)
    told = stage.run_pod("a", {"rdma/hca": 1})["containers"][0]
    (unit,) = told["devices"]["rdma/hca"]
    assert told["cdi_devices"] == []
    assert any("uverbs" in node["host"] for node in told["device_nodes"])
    assert not list((stage.folder / "cdi-specs").glob("nodefabric-unit-*"))
    stage.write_config(DOCUMENT)  # an update, say
    reboot(stage)
    until(lambda: "renumbered" in stage.status()["obstacles"])
    text = stage.status()["obstacles"]["renumbered"]
    assert f"container worker of pod default/a has {unit} of rdma/hca" in text
    assert "recreate the pod" in text
    assert stage.status()["ready"]
    (resource,) = [found for found in stage.status()["resources"] if found["name"] == "rdma/hca"]
    assert {(ill["unit"], ill["reason"]) for ill in resource["unhealthy"] if ill["reason"] == "Renumbered"} == {
        (unit, "Renumbered")
    }
    assert stage.run_pod("b", {"rdma/hca": 1})["containers"][0]["cdi_devices"]
    assert "Renumbered" in stage.fetch("/metrics")
