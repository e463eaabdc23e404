"""InfiniBand VFs and RDMA devices that the replaced plugins moved, adopted on a simulated node.

Our own ADD brings the hardware where the old plugins would; then the books forget it, and their files remain.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.state import Latest
from cni.call import Node
from cni.migrate.adoption import Adopted, Adopter
from tests.cni import tiny_node
from tests.cni.modes import rdma_node
from tests.cni.modes.guids import state
from tests.cni.old_plugins import CONTAINER, OldSriov
from tests.cni.tiny_node import PF_NETDEV, Rig, mac_of, netdev, vf

GUID = "02:00:00:00:00:00:00:01"


@pytest.fixture
def infiniband(own_network: None, tmp_path: Path) -> Iterator[Rig]:
    rdma_node.create(tmp_path, ib=True)
    with tiny_node.open_rig(tmp_path) as rig:
        yield rig


@pytest.fixture
def ethernet(own_network: None, tmp_path: Path) -> Iterator[Rig]:
    rdma_node.create(tmp_path)
    with tiny_node.open_rig(tmp_path) as rig:
        yield rig


def forget(rig: Rig) -> None:
    """Leave the hardware as it is, and no row of it."""
    for row in rig.ledger.attachments():
        rig.ledger.finish_detach(row)


def adopt(rig: Rig, old: OldSriov) -> Adopted:
    """Adopt, searching the pods' namespaces: ib-sriov never wrote where they are."""
    folders = (rig.folder,)
    snapshot = rig.machine.scan()
    node = Node(rig.machine, rig.ledger, Latest(snapshot))
    adopter = Adopter(node, state=old.state, run=old.run, netns_folders=folders)
    return adopter.adopt()


def rdma_state(container: str) -> dict[str, Any]:
    names = {"sandboxRdmaDevName": rdma_node.rdma_name(0), "containerRdmaDevName": container}
    return {"version": "1.0", "deviceID": vf(0), **names}


@pytest.mark.parametrize("moved", [True, False])
def test_an_infiniband_vf_is_brought_back_with_its_former_guid(infiniband: Rig, moved: bool) -> None:
    rig, old = infiniband, OldSriov(infiniband)
    before = state(rig)
    pod = rig.pod()
    rig.add(CONTAINER, pod, guid=GUID, link_state="enable", rdma=None if moved else False)
    forget(rig)
    document = {
        "cniVersion": "0.3.1",
        "name": "ib",
        "type": "ib-sriov",
        "deviceID": vf(0),
        "link_state": "enable",
        "Master": PF_NETDEV,
        "VFID": 0,
        "HostIFNames": netdev(0),
        "ContIFNames": "net1",
        "HostIFGUID": "00:00:00:00:00:00:00:00",
        "rdmaIsolation": moved,
        "pkey": "0x1",
        "ipam": {},
        "runtimeConfig": {"infinibandGUID": GUID},
        "RdmaNetState": rdma_state(rdma_node.rdma_name(0)) if moved else {},
    }
    file = old.write(CONTAINER, "net1", document, kind="ib-sriov")
    assert adopt(rig, old) == Adopted(devices=(vf(0),))
    assert (old.run / "ib-sriov/cni.lock").exists()
    (row,) = rig.ledger.attachments()
    assert (row.undo.mode, row.undo.rdma, row.netns_path) == (
        "infiniband",
        rdma_node.rdma_name(0) if moved else None,
        str(pod),
    )
    assert rig.attachments.heal(vf(0)) is None
    rig.delete(CONTAINER, pod)
    rig.await_back()
    assert _but_up(state(rig)) == _but_up(before)
    assert rig.ledger.quarantines() == ()
    assert not file.exists()


def test_the_state_of_the_chained_rdma_plugin_is_joined(ethernet: Rig) -> None:
    rig, old = ethernet, OldSriov(ethernet)
    pod = rig.pod()
    rig.add(CONTAINER, pod)
    forget(rig)
    document = {
        "cniVersion": "0.3.1",
        "name": "rails",
        "type": "sriov",
        "deviceID": vf(0),
        "Master": PF_NETDEV,
        "VFID": 0,
        "OrigVfState": {"HostIFName": netdev(0), "EffectiveMAC": mac_of(0), "MTU": 1500},
    }
    old.write(CONTAINER, "net1", document)
    old.write_path(0, str(pod))
    file = old.write(f"rails-{CONTAINER}", "net1", rdma_state(rdma_node.rdma_name(0)), kind="rdma")
    assert adopt(rig, old) == Adopted(devices=(vf(0),))
    (row,) = rig.ledger.attachments()
    assert row.undo.rdma == rdma_node.rdma_name(0)
    rig.delete(CONTAINER, pod)
    rig.await_back()
    found = rig.machine.find_rdma(vf(0))
    assert found is not None
    assert found.name == rdma_node.rdma_name(0)
    assert not file.exists()


def _but_up(found: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*found[:2], *found[3:])
