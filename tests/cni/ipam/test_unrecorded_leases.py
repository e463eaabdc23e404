"""Addresses of pods that are in no books: their DEL gives them back."""

from __future__ import annotations

from typing import Any

import pytest

from agent.errors import AgentError, LedgerError
from cni.call import GrantedDevice
from cni.detach import MAX_CALLERS, InFlight
from tests.cni.desk import NOTES, said
from tests.cni.networks import network
from tests.cni.tiny_node import Rig, stub_answer, vf

OLD = {"type": "ipoib", "master": "ib0"}
"""Of a plugin that left no note of its attachments."""


@pytest.mark.parametrize(
    "conf",
    [
        OLD,
        {"type": "sriov", "deviceID": vf(0)},
        {"mode": "macvlan", "master": "ens1f0"},
        {"mode": "nic", "deviceID": "0000:3b:00.0"},
    ],
    ids=lambda conf: conf.get("mode") or conf["type"],
)
def test_del_of_a_pod_in_no_books_gives_its_addresses_back_once(rig: Rig, conf: dict[str, Any]) -> None:
    stub = rig.stub_ipam(NOTES)
    for pod in (rig.pod(), None, None):  # as kubelet does it
        rig.delete("old", pod, ipam=stub, **conf)
        rig.attachments.leases.settle()
    assert said(rig.folder) == ["DEL old"]


def test_a_plugin_that_fails_leaves_the_addresses_owed_and_the_del_a_success(rig: Rig) -> None:
    stub = rig.stub_ipam(NOTES + 'echo \'{"code": 11, "msg": "no API server"}\'; exit 1')
    rig.delete("old", None, ipam=stub, **OLD)
    assert rig.attachments.leases.settle() == (0, 0)
    (owed,) = rig.ledger.owed_leases()
    assert (owed.container_id, owed.ifname) == ("old", "net1")
    assert owed.problem == "IPAM plugin stub: DEL failed: no API server"
    rig.stub_ipam(NOTES)
    assert rig.settle_later() == (1, 0)
    assert said(rig.folder) == ["DEL old"] * 2


def test_a_del_that_cannot_be_promised_fails_and_is_no_stranger_to_the_next(rig: Rig) -> None:
    stub = rig.stub_ipam(NOTES)
    rig.ledger.close()
    with pytest.raises(LedgerError):
        rig.delete("old", None, ipam=stub, **OLD)
    rig.restart()
    rig.delete("old", None, ipam=stub, **OLD)
    assert rig.attachments.leases.settle() == (1, 0)


def test_repeated_dels_of_a_pod_in_the_books_ask_the_plugin_no_more(rig: Rig) -> None:
    stub = rig.stub_ipam(NOTES + stub_answer("10.0.0.2/24"))
    conf: dict[str, Any] = {"deviceID": vf(0), "ipam": stub}
    pod = rig.pod()
    rig.add("c1", pod, **conf)
    rig.delete("c1", pod, **conf)
    rig.await_back(0)
    rig.delete("c1", None, **conf)
    rig.delete("c1", None, **conf)
    assert not rig.ledger.owed_leases()
    assert said(rig.folder) == ["ADD c1", "DEL c1"]


def test_the_del_of_an_add_that_failed_asks_no_plugin(rig: Rig) -> None:
    """The runtime starts the sandbox over and over, and each time there was no address yet."""
    stub = rig.stub_ipam(NOTES)
    pod = rig.pod()
    with pytest.raises(AgentError):
        rig.add("c1", pod, deviceID="0000:7f:00.0", ipam=stub)
    rig.delete("c1", pod, deviceID="0000:7f:00.0", ipam=stub)
    assert not rig.ledger.owed_leases()
    assert said(rig.folder) == []


def test_a_chained_call_gives_back_nothing_in_the_name_of_the_clusters_interface(rig: Rig) -> None:
    """The cluster's own plugin may have leased under this very network, container and interface."""
    rig.delete("old", rig.pod(), "eth0", ipam=rig.stub_ipam(NOTES), prevResult={"cniVersion": "1.1.0"})
    assert not rig.ledger.owed_leases()
    assert said(rig.folder) == []


def test_what_a_row_stands_for_is_given_back_by_its_own_del_alone(rig: Rig) -> None:
    """A chained call has made net1, which a strange call names."""
    stub = rig.stub_ipam(NOTES + stub_answer("10.0.0.2/24"))
    rig.granted.append(GrantedDevice(vf(0), "rdma/vf", network({"name": "rails", "ipam": stub})))
    pod = rig.pod()
    rig.add("c1", pod, "eth0", prevResult={"cniVersion": "1.1.0"})
    rig.delete("c1", pod, "net1", ipam=stub, deviceID=vf(1))
    assert not rig.ledger.owed_leases()
    assert said(rig.folder) == ["ADD c1"]


def test_the_number_of_callers_that_are_remembered_is_bounded() -> None:
    in_flight = InFlight()
    for number in range(MAX_CALLERS + 1):
        in_flight.remember(f"c{number}", "net1")
        in_flight.remember("c1", "net1")
    assert not in_flight.has_called("c0", "net1")
    assert in_flight.has_called("c1", "net1")
    assert len(in_flight._callers) == MAX_CALLERS
