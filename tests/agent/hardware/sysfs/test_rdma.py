"""The GID of an interface's address in a port's table."""

from __future__ import annotations

from pathlib import Path

from agent.hardware.sysfs.rdma import Gid, find_gids, roce_ports
from tests import gids

EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"


def found(device: Path, *addresses: str, ifname: str = "net1") -> list[tuple[int, str]]:
    return [(gid.index, gid.address) for gid in find_gids(roce_ports(device), addresses, ifname)]


def test_it_is_roce_v2_and_ipv4_before_ipv6(tmp_path: Path) -> None:
    gids.enter(tmp_path, 0, "fe80::1/64", "net1", kind="IB/RoCE v1")
    gids.enter(tmp_path, 1, "fe80::1/64", "net1")
    gids.enter(tmp_path, 2, "10.0.0.1/24", "net1", kind="IB/RoCE v1")
    gids.enter(tmp_path, 11, "10.0.0.1/24", "net1")
    gids.enter(tmp_path, 5, "fd00::1/64", "net1")
    (tmp_path / "ports/1/gids/6").write_text(EMPTY)  # of which attributes cannot be read
    assert found(tmp_path, "fd00::1/64", "10.0.0.1/24") == [(11, "10.0.0.1")]
    assert found(tmp_path, "fd00::1/64") == [(5, "fd00::1")]
    assert found(tmp_path, "10.0.0.7/24", "fd00::1/64") == [(5, "fd00::1")]
    assert found(tmp_path, "10.0.0.7/24") == []


def test_the_interfaces_own_goes_before_anothers_with_that_address(tmp_path: Path) -> None:
    gids.enter(tmp_path, 3, "10.0.0.1/24", "bond0")
    assert found(tmp_path, "10.0.0.1/24") == [(3, "10.0.0.1")]
    gids.enter(tmp_path, 4, "10.0.0.1/24", "net1")
    assert found(tmp_path, "10.0.0.1/24") == [(4, "10.0.0.1")]
    gids.enter(tmp_path, 9, "10.0.0.1/24", "net1")  # of another pod, in another network
    assert found(tmp_path, "10.0.0.1/24") == [(4, "10.0.0.1"), (9, "10.0.0.1")]


def test_it_may_be_on_the_second_port(tmp_path: Path) -> None:
    gids.enter(tmp_path, 1, "10.0.0.1/24", "net1")
    gids.enter(tmp_path, 1, "10.0.0.2/24", "net2", port=2)
    assert find_gids(roce_ports(tmp_path), ["10.0.0.2/24"], "net2") == (Gid(2, 1, "10.0.0.2"),)


def test_infiniband_needs_none(tmp_path: Path) -> None:
    gids.enter(tmp_path, 0, "fe80::1/64", "net1")
    (tmp_path / "ports/1/link_layer").write_text("InfiniBand\n")
    assert roce_ports(tmp_path) == ()
    assert roce_ports(tmp_path / "gone") == ()
