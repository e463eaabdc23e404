"""Rates that a resource gives to its VFs: in force where the network says nothing, put back, held against the PF."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.errors import AttachmentError, RequestInvalid
from agent.model.allocation import VfSettings
from cni.call import GrantedDevice
from tests.cni import tiny_node
from tests.cni.networks import PREVIOUS, network
from tests.cni.stand_ins import FixedDevices
from tests.cni.tiny_node import PF_NETDEV, Rig, vf


@pytest.fixture
def rig(own_network: None, tmp_path: Path) -> Iterator[Rig]:
    held = FixedDevices(rates=VfSettings(min_tx_rate=10, max_tx_rate=1000))
    with tiny_node.open_rig(tmp_path, held=held) as rig:
        yield rig


def rates(rig: Rig) -> tuple[int | None, int | None]:
    found = rig.settings()
    return found.min_tx_rate, found.max_tx_rate


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, (10, 1000)),
        ({"vlan": 7}, (10, 1000)),
        ({"max_tx_rate": 50}, (0, 50)),
        ({"min_tx_rate": 0, "max_tx_rate": 0}, (0, 0)),
    ],
)
@pytest.mark.parametrize("chained", [True, False])
def test_a_vf_has_the_rates_of_its_resource_unless_its_network_says_any(
    rig: Rig, keys: dict[str, Any], expected: tuple[int, int], chained: bool
) -> None:
    pod, before = rig.pod(), rig.found()
    rig.granted[:] = [GrantedDevice(vf(0), "rdma/vf", network(keys))]
    conf: dict[str, Any] = {"prevResult": PREVIOUS} if chained else keys
    rig.add("c1", pod, ifname="eth0", **conf)
    assert rates(rig) == expected
    rig.check("c1", pod, ifname="eth0")
    rig.machine.vf_control.apply(PF_NETDEV, 0, VfSettings(max_tx_rate=77))
    with pytest.raises(AttachmentError, match="has max_tx_rate 77, not"):
        rig.check("c1", pod, ifname="eth0")
    rig.detach("c1", pod, ifname="eth0")
    assert rig.found() == before


@pytest.mark.parametrize(("speed", "refused"), [("100", True), ("1000", False), ("-1", False), ("", False)])
def test_a_rate_above_the_speed_of_the_pf_is_refused(rig: Rig, speed: str, refused: bool) -> None:
    folder = rig.machine.root / "sys/class/net" / PF_NETDEV
    (folder / "speed").write_text(f"{speed}\n")
    pod = rig.pod()
    if refused:
        with pytest.raises(RequestInvalid, match=f"max_tx_rate 1000 is above the speed of {PF_NETDEV}, 100 Mbit/s"):
            rig.add("c1", pod)
        assert rig.ledger.attachments() == ()
    else:
        rig.add("c1", pod)
