"""Files that tell containers of the devices of their claims (KEP-5304), from Prepare to Unprepare."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent.config import Config, Dra, Resource
from agent.edits.claim_metadata import metadata_path
from agent.edits.specs import file_of_claim
from agent.errors import Unavailable
from agent.model.allocation import ClaimState
from deviceplugin.dra.devices import devices_of
from tests.deviceplugin.dra.claim_documents import DRIVER, NODE, POD, REF, claim, result
from tests.deviceplugin.dra.preparing import LATE, VF, Desk, Desks

WELL_KNOWN = "/var/run/kubernetes.io/dra-device-attributes"


def telling(desks: Desks, resource: Resource = VF, *, metadata: bool = True) -> Desk:
    """A node with the catalog that its slices are made of."""
    config = Config(resources=(resource,), dra=Dra(metadata=metadata))
    desk = desks(config=config)
    desk.catalog.set(devices_of(config, desk.offer, desk.facts.value))
    return desk


@pytest.fixture
def desk(desks: Desks) -> Desk:
    return telling(desks)


def names(desk: Desk) -> list[str]:
    return [device.name for device in desk.catalog.value]


def prepare(desk: Desk, *results: Any, annotations: dict[str, str] | None = None, **more: Any) -> None:
    document = claim(*results, **more)
    document["metadata"]["annotations"] = annotations or {}
    desk.preparer.prepare(desk.claimed(REF, document))


def mounts(desk: Desk) -> dict[str, str]:
    """Path in containers → file on the host, as the runtime finds them in the claim's spec."""
    spec = json.loads((desk.folder / f"nodefabric-claim-{REF.uid}.json").read_text())
    found = [mount for device in spec["devices"] for mount in device["containerEdits"].get("mounts", ())]
    assert all({"ro", "bind"} <= {*mount["options"]} for mount in found)
    return {mount["containerPath"]: mount["hostPath"] for mount in found}


def told(desk: Desk, request: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(metadata_path(desk.folder, REF.uid, request).read_text())
    return found


def test_each_request_has_a_file_that_says_what_the_slice_does(desk: Desk) -> None:
    first, second, third, *_ = names(desk)
    prepare(desk, result("nic", first), result("nic", second), result("other/near", third))

    assert mounts(desk) == {
        f"{WELL_KNOWN}/resourceclaims/two-rails/{request}/{DRIVER}-metadata.json": str(
            desk.folder / f"nodefabric-claim-{REF.uid}.{request}.metadata"
        )
        for request in ("nic", "other")
    }
    document = told(desk, "nic")
    assert {key: document[key] for key in ("kind", "apiVersion", "metadata")} == {
        "kind": "DeviceMetadata",
        "apiVersion": "metadata.resource.k8s.io/v1alpha1",
        "metadata": {"name": "two-rails", "namespace": "team", "uid": REF.uid, "generation": 1},
    }
    assert "podClaimName" not in document
    (request,) = document["requests"]
    attributes = {device.name: device.attributes for device in desk.catalog.value}
    assert request == {
        "name": "nic",
        "devices": [
            {"driver": DRIVER, "pool": NODE, "name": name, "attributes": attributes[name]} for name in (first, second)
        ],
    }
    assert told(desk, "other")["requests"][0]["name"] == "other/near"


@pytest.mark.parametrize(
    ("name", "where"), [("rails", "claimtemplates/rails"), ("../../../../etc", "claims/two-rails")]
)
def test_a_claim_of_a_template_is_found_by_its_pods_name_for_it_if_that_leads_nowhere_else(
    desk: Desk, name: str, where: str
) -> None:
    """Who may annotate a claim chooses no paths in others' containers."""
    annotations = {"resource.kubernetes.io/pod-claim-name": name}
    prepare(desk, result("nic", names(desk)[0]), annotations=annotations, owner=POD)

    assert list(mounts(desk)) == [f"{WELL_KNOWN}/resource{where}/nic/{DRIVER}-metadata.json"]
    assert told(desk, "nic").get("podClaimName") == ("rails" if name == "rails" else None)


def test_of_a_device_that_was_chosen_late_it_says_what_this_one_is(desks: Desks) -> None:
    desk = telling(desks, LATE)
    place = desk.catalog.value[0]
    assert "resource.kubernetes.io/pciBusID" not in place.attributes
    prepare(desk, result("nic", place.name, shareID="s-1"))
    (row,) = desk.ledger.claims()[0].devices

    (device,) = told(desk, "nic")["requests"][0]["devices"]
    assert device["name"] == place.name
    assert device["attributes"]["resource.kubernetes.io/pciBusID"] == {"string": row.device}
    assert device["attributes"]["kind"] == {"string": "vf"}


def test_they_stay_as_the_pod_has_them_when_the_claim_is_prepared_again_and_come_back_if_lost(desk: Desk) -> None:
    device = names(desk)[0]
    prepare(desk, result("nic", device))
    desk.specs.metadata.add_networks(REF.uid, {"nic": {device: {"interfaceName": "net1"}}})
    desk.preparer.prepare(REF)
    assert told(desk, "nic")["requests"][0]["devices"][0]["networkData"] == {"interfaceName": "net1"}

    metadata_path(desk.folder, REF.uid, "nic").unlink()
    desk.others.is_away = True
    with pytest.raises(Unavailable, match="team/two-rails are gone, and the API server is away"):
        desk.preparer.prepare(REF)
    desk.others.is_away = False
    desk.preparer.prepare(REF)
    assert told(desk, "nic")["metadata"]["generation"] == 1


def test_killed_before_they_were_written_the_next_prepare_writes_them(desk: Desk) -> None:
    prepare(desk, result("nic", names(desk)[0]))
    desk.ledger.set_claim_state(REF.uid, ClaimState.PREPARING)
    desk.specs.remove(file_of_claim(REF.uid))
    desk.preparer.prepare(REF)

    assert told(desk, "nic")
    assert desk.ledger.claims()[0].state is ClaimState.PREPARED


def test_they_are_gone_when_the_claim_is_unprepared(desk: Desk) -> None:
    prepare(desk, result("nic", names(desk)[0]))
    desk.preparer.unprepare(REF)

    assert list(desk.folder.iterdir()) == []


def test_nobody_gets_them_who_was_not_told_to(desks: Desks) -> None:
    desk = telling(desks, metadata=False)
    prepare(desk, result("nic", names(desk)[0]))

    assert mounts(desk) == {}
    assert list(desk.folder.glob("*.metadata")) == []
