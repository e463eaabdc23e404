"""Somebody gives addresses in a claim: the agent sets them by itself, and only where they may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.config import Config, Dra, Resource, Select
from agent.errors import ClaimInvalid, IpamFailed
from tests.cni.claiming import Scene, of_vf
from tests.cni.claiming import scene as scene  # the fixture
from tests.cni.conftest import rig as rig  # the fixture
from tests.cni.networks import network
from tests.cni.tiny_node import Rig, vf
from tests.deviceplugin.dra.test_parameters import of_claim, of_class, settle

GIVEN = ["192.0.2.10/24", "fd00::10/64"]
STATIC = {"type": "static", "addresses": [{"address": address} for address in GIVEN]}
PLAIN = Resource("rdma/vf", "vf", Select(), offer="dra", network="plain")
LEASING = Resource("rdma/leasing", "vf", Select(), offer="dra", network="leasing")
CONFIG = Config(
    resources=(PLAIN, LEASING),
    networks=(
        network({"name": "plain"}),
        network(
            {
                "name": "leasing",
                "ipam": {"type": "host-local", "ranges": [[{"subnet": "192.0.2.0/24"}], [{"subnet": "fd00::/64"}]]},
            }
        ),
        network({"name": "abouts", "ipam": {"type": "whereabouts", "range": "192.0.2.8-192.0.2.99/24"}}),
    ),
)
LISTED = Config(CONFIG.resources, CONFIG.networks, dra=Dra(claim_may=("ifName", "addresses")))
"""As an operator may write it."""


def test_addresses_of_a_claim_are_set_where_there_is_no_plugin(scene: Scene) -> None:
    rig = scene.rig
    (rig.folder / "static").write_text("#!/bin/sh\ntouch $(dirname $0)/asked; exit 1\n")
    (rig.folder / "static").chmod(0o755)
    scene.claim("nics", of_vf(0, ifname="rail0", network={"ipam": STATIC}))
    pod = rig.pod()
    answer = scene.start("c1", pod)
    assert [ip["address"] for ip in answer["ips"] if ip["interface"] == 2] == GIVEN
    shown = rig.run_in(pod, "ip", "-brief", "address", "show", "rail0")
    assert all(address in shown for address in GIVEN)
    rig.check("c1", pod, ifname="eth0")
    rig.collect(("c1", "eth0"))
    rig.delete("c1", pod, ifname="eth0")
    rig.await_back(0)
    assert rig.ledger.owed_leases() == ()
    assert not (rig.folder / "asked").exists()


def test_a_plugin_that_is_not_there_is_owed_nothing(rig: Rig) -> None:
    before = rig.found()
    with pytest.raises(IpamFailed, match="is not in CNI_PATH"):
        rig.add("c1", rig.pod(), ipam={"type": "missing"})
    assert (rig.found(), rig.ledger.attachments(), rig.ledger.owed_leases()) == (before, (), ())


def test_a_script_whose_interpreter_is_not_there_is_named_and_owed_nothing(rig: Rig) -> None:
    (rig.folder / "script").write_text("#!/opt/none/bash -e\nexit 0\n")
    (rig.folder / "script").chmod(0o755)
    with pytest.raises(IpamFailed, match="/script cannot be run: its interpreter, loader or libraries are not in the"):
        rig.add("c1", rig.pod(), ipam={"type": "script"})
    assert rig.ledger.owed_leases() == ()


def test_a_lease_that_was_taken_stays_owed_when_its_plugin_is_gone(rig: Rig) -> None:
    pod, stub = rig.pod(), rig.stub_ipam("""echo '{"ips": [{"address": "10.0.0.2/24"}]}'""")
    rig.add("c1", pod, ipam=stub)
    Path(rig.folder / "stub").unlink()
    rig.delete("c1", pod, ipam=stub, deviceID=vf(0))
    rig.await_back()
    assert [lease.container_id for lease in rig.ledger.owed_leases()] == ["c1"]


def test_what_a_former_version_owes_for_addresses_of_a_claim_ends(rig: Rig) -> None:
    request = {"network": {"cniVersion": "1.0.0", "name": "", "type": "nodefabric", "ipam": STATIC}, "cni_args": ""}
    rig.ledger.owe_lease("c1", "rail0", "/gone", {**request, "cni_path": str(rig.folder)})
    assert rig.attachments.leases.settle() == (1, 0)
    assert rig.ledger.owed_leases() == ()


@pytest.mark.parametrize(
    "address", ["127.0.0.1/8", "::1/128", "224.0.0.1/4", "ff02::1/64", "0.0.0.0/0", "::/0", "255.255.255.255/32"]
)
def test_an_address_that_no_interface_can_have_is_refused(address: str) -> None:
    for entry in (of_claim, of_class):
        with pytest.raises(ClaimInvalid, match="addresses must be those of an interface"):
            settle(entry(addresses=[address]), resource=PLAIN, config=CONFIG)


@pytest.mark.parametrize("address", ["10.0.0.1/24", "192.0.2.10/8", "fd01::10/64", "192.0.3.1/24"])
@pytest.mark.parametrize("named", ["leasing", "abouts"])
def test_an_address_outside_of_the_networks_subnets_is_refused(address: str, named: str) -> None:
    with pytest.raises(ClaimInvalid, match=f"addresses: {address} is not in a subnet of the network"):
        settle(of_class(network=named, addresses=[address]), resource=PLAIN, config=CONFIG)


@pytest.mark.parametrize("config", [CONFIG, LISTED])
def test_a_claim_gives_no_addresses_where_the_network_leases_them_whatever_claims_may_say(config: Config) -> None:
    with pytest.raises(ClaimInvalid, match=r"the network leases its addresses \(ipam\), so only a DeviceClass may set"):
        settle(of_claim(addresses=GIVEN), resource=LEASING, config=config)
    for entry, resource in ((of_class, LEASING), (of_claim, PLAIN)):
        assert settle(entry(addresses=GIVEN), resource=resource, config=config).network["ipam"] == STATIC
