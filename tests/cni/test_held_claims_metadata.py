"""Files that tell containers of their claims' devices: what ADD has found out is in them before it answers."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from agent.edits.claim_specs import IN_CONTAINERS, mounted
from agent.errors import Unavailable
from agent.model.allocation import ClaimDevice
from tests.cni.claiming import Scene, of_share, of_vf
from tests.cni.claiming import scene as scene  # the fixture
from tests.cni.networks import PREVIOUS
from tests.cni.tiny_node import mac_of

CHILD = {"mode": "macvlan"}


def told_of(scene: Scene, claim: str, device: ClaimDevice) -> ClaimDevice:
    """Have containers get a file about the device, as Prepare writes it."""
    files, uid, request = scene.specs.metadata, f"uid-{claim}", device.request
    requests = [{"name": request, "devices": [{"name": device.device_name, "attributes": {}}]}]
    files.write(uid, request, {"metadata": {"name": claim}, "requests": requests})
    path = f"{IN_CONTAINERS}/resourceclaims/{claim}/{request}/nodefabric.io-metadata.json"
    return dataclasses.replace(device, edits=mounted({}, files.path(uid, request), path))


def told(scene: Scene, claim: str, request: str) -> tuple[int, dict[str, Any] | None]:
    """Number of a file, and what it says of the device in its pod."""
    document = json.loads(scene.specs.metadata.path(f"uid-{claim}", request).read_text())
    (device,) = document["requests"][0]["devices"]
    return document["metadata"]["generation"], device.get("networkData")


def test_interface_and_addresses_are_told_when_add_has_answered_and_after_a_new_sandbox_anew(scene: Scene) -> None:
    rig = scene.rig
    first = told_of(scene, "nics", of_vf(0, network={"name": "rails", "ipam": rig.ipam()}, ifname="rail0"))
    scene.claim("nics", first, told_of(scene, "nics", of_vf(1)), pods=("c1", "c2"))
    pod = rig.pod()
    answer = scene.start("c1", pod)

    assert [i["name"] for i in answer["interfaces"]] == ["cbr0", "eth0", "rail0", "net1"]
    network = {"interfaceName": "rail0", "hardwareAddress": mac_of(0), "ips": ["10.9.0.2/24", "fd09::2/64"]}
    assert told(scene, "nics", "nic0") == (2, network)
    assert told(scene, "nics", "nic1") == (2, {"interfaceName": "net1", "hardwareAddress": mac_of(1)})

    rig.delete("c1", pod, ifname="eth0")
    rig.await_back(0, 1)
    scene.start("c2", rig.pod("again"))
    generation, again = told(scene, "nics", "nic0")
    assert again is not None
    assert (generation, again["ips"]) == (3, ["10.9.0.3/24", "fd09::3/64"])


def test_a_share_that_several_pods_have_is_told_of_in_none(scene: Scene) -> None:
    scene.claim("shared", told_of(scene, "shared", of_share(network=CHILD)), pods=("c1", "c2"), owned=False)
    scene.start("c1")
    generation, network = told(scene, "shared", "share")
    assert network is not None
    assert (generation, network["interfaceName"]) == (2, "net1")
    scene.start("c2")
    assert told(scene, "shared", "share") == (3, None)


def test_a_pod_whose_file_is_gone_is_refused_and_its_devices_stay_on_the_host(scene: Scene) -> None:
    """The runtime could create none of its containers."""
    scene.claim("nics", told_of(scene, "nics", of_vf(0)))
    scene.specs.metadata.path("uid-nics", "nic0").unlink()
    before = scene.rig.found(0)
    with pytest.raises(Unavailable, match=r"nic0\.metadata is gone"):
        scene.start("c1")
    scene.rig.await_back(0)
    assert (scene.rig.found(0), scene.rows()) == (before, {})


def test_nothing_is_written_for_claims_without_files(scene: Scene) -> None:
    scene.claim("nics", of_vf(0))
    assert scene.start("c1") != PREVIOUS
    assert list(scene.specs.metadata.path("uid-nics", "nic0").parent.glob("*.metadata")) == []
