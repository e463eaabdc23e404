"""ADD tells containers of their devices once these are in the pod: the GID index of its address, and its rails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.edits.add_facts import NOTED, Nic
from agent.edits.specs import Specs
from agent.model.allocation import NetworkData, PodRef, Spec
from agent.offer.offer import Offer
from agent.offer.rails import rails_of
from agent.placement import Distances
from agent.state import Latest
from cni.add_facts import FactsWriter, RailFiles
from cni.call import Node, Observer
from tests import gids
from tests.cni import tiny_node
from tests.cni.claiming import Scene as ClaimScene
from tests.cni.claiming import of_share, of_vf
from tests.cni.modes import rdma_node
from tests.cni.modes.rdma_node import rdma_name
from tests.cni.stand_ins import FixedDevices, attachments_of
from tests.cni.tiny_node import Rig, vf
from tests.node import bound_slot, granted, node

SLOT = "slot-rdma:vf-0-0"
ASKED = ("NCCL_IB_HCA==mlx5_1", "NODEFABRIC_RAILS=/run/nodefabric/rails.json")


class Notes(Observer):
    """Keeps what is not told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def not_told(self, pod: Any, what: str) -> None:
        self.heard.append(f"{pod}: {what}")


class Scene:
    """A node with RDMA devices, pods whose slots are bound as a test says, and who tells their containers."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.notes = Notes()
        self.folder = rig.folder / "cdi"
        self.specs = Specs(rig.ledger, self.folder)
        node = Node(rig.machine, rig.ledger, Latest(rig.machine.scan()), self.notes)
        tells = cast(Any, Latest(SimpleNamespace(tells=True)))
        offer = Latest(Offer(node.scans.value))
        files = RailFiles(self.folder, offer, cast(Any, SimpleNamespace()), Latest({}))
        self.facts = FactsWriter(tells, node, self.specs, files, {})
        held = FixedDevices(rig.granted)
        rig.attachments.close()
        rig.attachments = attachments_of(node, held, facts=self.facts)

    def bind(self, container_id: str, slot: str = SLOT, index: int = 0, env: tuple[str, ...] = ASKED) -> None:
        """Have a slot of a sandbox's container bound."""
        pod = PodRef("default", f"pod-of-{container_id}")
        edits = {"env": list(env)}
        self.specs.bind([bound_slot(slot, "rdma/vf", "vf", vf(index), "main", container_id, "eth0", pod, edits)])

    def enter(self, index: int, address: str, ifname: str = "net1", of: int = 0) -> None:
        """Have the kernel enter an address into the table of a VF's RDMA device."""
        gids.enter(self.rig.machine.root / "sys/class/infiniband" / rdma_name(of), index, address, ifname)

    def edits(self, slot: str = SLOT) -> dict[str, Any]:
        (device,) = json.loads((self.folder / f"nodefabric-{slot}.json").read_text())["devices"]
        return dict(device["containerEdits"])

    def env(self, slot: str = SLOT) -> dict[str, str]:
        return dict(entry.split("=", 1) for entry in self.edits(slot)["env"])

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*sandbox*"))


@pytest.fixture
def open_scene(own_network: None, tmp_path: Path) -> Iterator[Callable[[str], Scene]]:
    """Make the node in a mode of RDMA devices."""
    opened: list[Any] = []

    def make(mode: str) -> Scene:
        rdma_node.create(tmp_path, mode=mode)
        context = tiny_node.open_rig(tmp_path)
        opened.append(context)
        return Scene(context.__enter__())

    yield make
    for context in opened:
        context.__exit__(None, None, None)


@pytest.fixture
def scene(open_scene: Callable[[str], Scene]) -> Scene:
    return open_scene("shared")


def add(scene: Scene, container_id: str = "c1", **conf: Any) -> Mapping[str, Any]:
    rig = scene.rig
    ipam = rig.stub_ipam(tiny_node.stub_answer("10.9.0.2/24", "fd09::2/64"))
    return rig.add(container_id, rig.pod(container_id), ipam=ipam, **conf)


def test_a_slots_container_is_told_the_index_of_the_pods_address_and_its_rails(scene: Scene) -> None:
    scene.bind("c1")
    scene.enter(3, "10.9.0.9/24")
    scene.enter(5, "10.9.0.2/24")
    scene.enter(7, "fd09::2/64")
    add(scene)
    assert scene.env()["NCCL_IB_GID_INDEX"] == "5"
    assert scene.notes.heard == []
    (mount,) = scene.edits()["mounts"]
    assert (mount["containerPath"], "ro" in mount["options"]) == ("/run/nodefabric/rails.json", True)
    document = json.loads(Path(mount["hostPath"]).read_text())
    (rail,) = document["rails"]
    assert document["version"] == 1
    assert rail["nic"] == {
        "pciAddress": vf(0),
        "pfPciAddress": tiny_node.PF,
        "resource": "rdma/vf",
        "interface": "net1",
        "mac": tiny_node.mac_of(0),
        "addresses": ["10.9.0.2/24", "fd09::2/64"],
        "rdmaDevice": "mlx5_1",
        "rdmaPort": 1,
        "gidIndex": 5,
    }
    (row,) = scene.rig.ledger.attachments()
    assert row.request[NOTED]["gid_index"] == 5

    before = scene.edits()
    add_again = scene.rig.add("c1", scene.rig.folder / "c1.netns", deviceID=vf(0))
    assert add_again == row.result
    assert scene.edits() == before


def test_containers_that_asked_for_nothing_get_nothing_and_nobody_waits(scene: Scene) -> None:
    scene.bind("c1", env=("PCIDEVICE_RDMA_VF=x",))
    scene.enter(3, "10.9.0.99/24")
    add(scene)
    assert scene.edits() == {"env": ["PCIDEVICE_RDMA_VF=x"]}
    assert (scene.files(), scene.notes.heard) == ([], [])
    assert NOTED not in scene.rig.ledger.attachments()[0].request


def test_a_second_interface_of_another_call_joins_what_is_told(scene: Scene) -> None:
    both = ("NCCL_IB_HCA==mlx5_1,mlx5_2", "NODEFABRIC_RAILS=/run/nodefabric/rails.json")
    scene.bind("c1", env=both)
    scene.bind("c1", "slot-rdma:vf-0-1", 1, both)
    scene.enter(5, "10.9.0.2/24")
    scene.enter(5, "10.9.0.3/24", "net2", of=1)
    add(scene)
    assert "NCCL_IB_GID_INDEX" not in scene.env()
    why = "mlx5_2 has no RoCE v2 GID that is known to be the pod's"
    told = f"default/pod-of-c1: NCCL_IB_GID_INDEX is left out, for the library to choose: {why}"
    assert scene.notes.heard == [told]
    rig = scene.rig
    ipam = rig.stub_ipam(tiny_node.stub_answer("10.9.0.3/24"))
    rig.add("c1", rig.folder / "c1.netns", "net2", deviceID=vf(1), ipam=ipam)
    assert [scene.env(slot)["NCCL_IB_GID_INDEX"] for slot in (SLOT, "slot-rdma:vf-0-1")] == ["5", "5"]
    document = json.loads((scene.folder / "nodefabric-sandbox-c1.rails").read_text())
    assert [rail["nic"]["interface"] for rail in document["rails"]] == ["net1", "net2"]


def test_an_address_that_the_kernel_does_not_enter_is_waited_for_a_short_time(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.bind("c1")
    scene.enter(5, "10.9.0.77/24")
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            scene.enter(6, "10.9.0.2/24")

    monkeypatch.setattr("cni.add_facts.time.sleep", sleep)
    add(scene)
    assert (scene.env()["NCCL_IB_GID_INDEX"], len(slept)) == ("6", 3)


def test_what_was_written_comes_back_and_what_is_nobodys_goes(scene: Scene) -> None:
    scene.bind("c1")
    scene.enter(5, "10.9.0.2/24")
    add(scene)
    written = scene.folder / "nodefabric-sandbox-c1.rails"
    before = written.read_text()
    written.unlink()
    (scene.folder / "nodefabric-sandbox-gone.rails").write_text("{}")
    assert scene.facts.rewrite() == ["c1"]
    assert written.read_text() == before
    assert scene.files() == [written.name]
    assert scene.facts.rewrite() == []


def test_a_device_that_is_kept_apart_has_an_index_that_nobody_sees_here(open_scene: Callable[[str], Scene]) -> None:
    scene = open_scene("exclusive")
    scene.bind("c1")
    scene.enter(5, "10.9.0.2/24")
    add(scene)
    assert "NCCL_IB_GID_INDEX" not in scene.env()
    assert "mlx5_1 has no RoCE v2 GID that is known" in scene.notes.heard[0]
    assert json.loads((scene.folder / "nodefabric-sandbox-c1.rails").read_text())["rails"][0]["nic"]["rdmaDevice"]


def test_a_unit_that_was_granted_early_is_told_of_as_long_as_its_pod_has_it(scene: Scene) -> None:
    spec = Spec("vf", {"env": list(ASKED), "deviceNodes": [{"path": "/dev/infiniband/uverbs0"}]}, beside=(vf(0),))
    scene.specs.grant(granted("rdma/vf", {vf(0): vf(0)}, {vf(0): spec}))
    scene.rig.ledger.bind([vf(0)], PodRef("default", "pod-of-c1"))
    scene.enter(5, "10.9.0.2/24")
    add(scene)
    unit = f"unit-{vf(0)}"
    assert scene.env(unit)["NCCL_IB_GID_INDEX"] == "5"
    assert scene.edits(unit)["deviceNodes"] == spec.edits["deviceNodes"]
    assert Path(scene.edits(unit)["mounts"][0]["hostPath"]).exists()
    scene.rig.detach("c1", scene.rig.folder / "c1.netns")
    assert scene.edits(unit) == spec.edits


def test_nics_that_came_with_one_gpu_have_one_number_in_the_file(tmp_path: Path) -> None:
    snapshot = node(rails=4, vfs=1)
    vfs = [device.address for device in snapshot.devices if device.is_vf]
    offer = Offer(snapshot, rails=rails_of(snapshot, Distances(snapshot)))
    files = RailFiles(tmp_path, Latest(offer), cast(Any, SimpleNamespace(pod=lambda _: None)), Latest({}))
    nics = [Nic(vf, "rdma/rail", NetworkData("net1", "", ())) for vf in vfs]
    sets = ((vfs[3], vfs[1]),)
    (path,) = files.write("c1", PodRef("default", "p"), ["NODEFABRIC_RAILS"], nics, sets).values()
    told = json.loads(Path(path).read_text())["rails"]
    assert {rail["nic"]["pciAddress"]: rail["rail"] for rail in told} == dict(zip(vfs, (0, 1, 2, 1), strict=True))


# -------------------------------------------------------------------------------- devices that claims bring


OF_CLAIM = {"env": ["UCX_NET_DEVICES=mlx5_1:1", "NODEFABRIC_RAILS=/run/nodefabric/rails.json"]}


@pytest.fixture
def claimed(own_network: None, tmp_path: Path) -> Iterator[ClaimScene]:
    """A node with RDMA devices, whose resources tell."""
    with rdma_node.opened(tmp_path, mode="shared") as rig:
        made = ClaimScene(rig)
        config = made.config.value
        made.config.set(replace(config, resources=tuple(replace(r, environment=("ucx",)) for r in config.resources)))
        yield made


def claim_edits(claimed: ClaimScene, claim: str) -> dict[str, Any]:
    text = (claimed.rig.folder / f"cdi/nodefabric-claim-uid-{claim}.json").read_text()
    (device,) = json.loads(text)["devices"]
    return dict(device["containerEdits"])


def rail_files(claimed: ClaimScene) -> list[str]:
    return sorted(path.name for path in (claimed.rig.folder / "cdi").glob("*.rails"))


def test_a_claims_containers_are_told_the_index_of_the_pods_address_and_the_next_pods_anew(claimed: ClaimScene) -> None:
    rig = claimed.rig
    network = {"name": "rails", "ipam": rig.stub_ipam(tiny_node.stub_answer("10.9.0.2/24"))}
    claimed.claim("nics", of_vf(0, network=network, edits=OF_CLAIM), pods=("c1", "c2"))
    table = rig.machine.root / "sys/class/infiniband" / rdma_name(0)
    pod = rig.pod()
    gids.enter(table, 4, "10.9.0.2/24", "net1")
    claimed.start("c1", pod)
    told = claim_edits(claimed, "nics")
    assert told["env"] == [*OF_CLAIM["env"], "UCX_IB_GID_INDEX=4"]
    (nic,) = json.loads(Path(told["mounts"][0]["hostPath"]).read_text())["rails"]
    assert (nic["nic"]["interface"], nic["nic"]["addresses"]) == ("net1", ["10.9.0.2/24"])
    assert not claimed.specs.rewrite()  # the books say so, too: a spec that somebody removes comes back

    rig.detach("c1", pod, ifname="eth0")
    assert rail_files(claimed) == []
    (table / "ports/1/gids/4").rename(table / "ports/1/gids/6")
    gids.enter(table, 6, "10.9.0.2/24", "net1")
    claimed.start("c2")
    assert "UCX_IB_GID_INDEX=6" in claim_edits(claimed, "nics")["env"]
    assert rail_files(claimed) == ["nodefabric-sandbox-c2.rails"]


def test_a_claim_of_several_pods_tells_of_none(claimed: ClaimScene) -> None:
    claimed.claim("shared", of_share(network={"mode": "macvlan"}, edits=OF_CLAIM), pods=("c1", "c2"), owned=False)
    claimed.start("c1")
    assert claim_edits(claimed, "shared")["mounts"]
    claimed.start("c2")
    assert claim_edits(claimed, "shared") == OF_CLAIM
