"""Facts that only selectors ask for."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from agent.hardware import recorded
from agent.hardware.machine import Machine
from agent.hardware.netlink.default_routes import Ways
from agent.hardware.sysfs.scan import rescan, scan
from agent.model.change import of_function, of_netdev
from agent.model.device import VdpaDevice
from tests.agent.hardware.frames import run

PF, VF = "0000:18:00.0", "0000:18:00.1"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    recorded.unpack(recorded.load(recorded.find("h100-8gpu")), tmp_path)
    return tmp_path


def function(root: Path, address: str) -> Path:
    return (root / "sys/bus/pci/devices" / address).resolve()


def bind(root: Path, address: str, driver: str) -> Path:
    """Bind a function to another driver."""
    folder = function(root, address)
    (folder / "driver").unlink()
    (root / "sys/bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
    (folder / "driver").symlink_to(os.path.relpath(root / "sys/bus/pci/drivers" / driver, folder))
    return folder


def test_an_acpi_index_is_read_of_functions_that_are_no_vfs(root: Path) -> None:
    for address in (PF, VF):
        (function(root, address) / "acpi_index").write_text("7\n")
    devices = scan(root).by_address
    assert (devices[PF].acpi_index, devices[VF].acpi_index) == ("7", "")
    assert devices["0000:3a:00.0"].acpi_index == ""


def test_a_uio_device_is_found_below_its_function(root: Path) -> None:
    folder = bind(root, VF, "uio_pci_generic")
    (folder / "uio/uio3").mkdir(parents=True)
    assert scan(root).by_address[VF].uio == "uio3"


def test_a_cxi_device_is_found_below_a_slingshot_adapter_alone(root: Path) -> None:
    for address, vendor in ((PF, "0x17db"), (VF, "0x15b3")):
        (function(root, address) / "vendor").write_text(vendor)
        (function(root, address) / "cxi/cxi3").mkdir(parents=True)
    found = scan(root)
    assert [found.by_address[address].cxi for address in (PF, VF)] == ["cxi3", ""]
    (function(root, PF) / "cxi/cxi3").rename(function(root, PF) / "cxi/cxi1")
    assert rescan(root, found, of_function(PF)).by_address[PF].cxi == "cxi1"


@pytest.mark.parametrize(
    ("gone", "known"),
    [
        ((), True),
        (("net",), True),
        (("net", "infiniband"), True),  # in a pod, where RDMA devices belong to namespaces
        (("net", "infiniband", "infiniband_verbs", "infiniband_mad"), False),
    ],
)
def test_a_function_without_a_class_is_an_adapter_while_an_rdma_device_or_interface_is_its(
    root: Path, gone: tuple[str, ...], known: bool
) -> None:
    (function(root, PF) / "class").write_text("0x00ff00")
    (function(root, PF) / "sriov_totalvfs").unlink()
    for family in gone:
        for link in (root / "sys/class" / family).iterdir():
            if f"/{PF}/" in str(link.resolve()):
                link.unlink()
    assert [d.is_network for d in scan(root).devices if d.address == PF] == [True] * known


def test_a_vfio_group_without_an_iommu_is_told_from_others(root: Path) -> None:
    for address in (VF, "0000:18:00.2"):
        folder = bind(root, address, "vfio-pci")
        group = (folder / "iommu_group").resolve()
        group.mkdir(parents=True, exist_ok=True)
        (group / "name").write_text("vfio-noiommu\n" if address == VF else "")
    devices = scan(root).by_address
    assert (devices[VF].noiommu, devices["0000:18:00.2"].noiommu) == (True, False)


def test_vdpa_devices_belong_to_their_function(root: Path) -> None:
    bus = root / "sys/bus/vdpa"
    for name, address, driver in (("vdpa0", VF, "vhost_vdpa"), ("vdpa1", "0000:18:00.2", "virtio_vdpa")):
        folder = function(root, address) / name
        (bus / "drivers" / driver).mkdir(parents=True)
        folder.mkdir()
        (folder / "driver").symlink_to(os.path.relpath(bus / "drivers" / driver, folder))
        (bus / "devices").mkdir(parents=True, exist_ok=True)
        (bus / "devices" / name).symlink_to(os.path.relpath(folder, bus / "devices"))
    (function(root, VF) / "vdpa0/vhost-vdpa-4").mkdir()
    devices = scan(root).by_address
    assert devices[VF].vdpa == VdpaDevice("vdpa0", "vhost_vdpa", "/dev/vhost-vdpa-4")
    assert devices["0000:18:00.2"].vdpa == VdpaDevice("vdpa1", "virtio_vdpa", "")
    assert [d.vdpa.vdpa_type for d in devices.values() if d.vdpa] == ["vhost", "virtio"]
    assert devices["0000:18:00.3"].vdpa is None


@pytest.mark.parametrize(
    ("gid", "prefix"),
    [
        ("fe80:0000:0000:0000:f452:1403:007b:cba1\n", "fe80000000000000"),
        ("fec0:0000:0000:00a1:f452:1403:007b:cba1\n", "fec00000000000a1"),
        ("fe80::1\n", ""),
        ("", ""),
    ],
)
def test_partition_key_and_subnet_are_those_of_infiniband_ports(tmp_path: Path, gid: str, prefix: str) -> None:
    recorded.unpack(recorded.load(recorded.find("ib-dual-port")), tmp_path)
    ports = (tmp_path / "sys/class/infiniband/mlx4_0").resolve() / "ports"
    for number, key in (("1", "0x8001\n"), ("2", "0x0000\n")):  # the second one has no cable
        for folder, text in (("pkeys", key), ("gids", gid)):
            (ports / number / folder).mkdir(exist_ok=True)
            (ports / number / folder / "0").write_text(text)
    (rdma,) = scan(tmp_path).by_address["0000:03:00.0"].rdma_devices
    assert [(port.pkey, port.subnet_prefix) for port in rdma.ports] == [(0x8001, prefix), (None, "")]


@pytest.mark.parametrize(("files", "expected"), [(("vhost-net", "net/tun"), True), (("vhost-net",), False)])
def test_vhost_net_needs_both_of_its_files(tmp_path: Path, files: tuple[str, ...], expected: bool) -> None:
    for name in files:
        path = tmp_path / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert scan(tmp_path).vhost_net is expected


def test_vhost_net_is_known_to_an_agent_that_has_no_dev_of_the_host(tmp_path: Path) -> None:
    for name, expected in (("vhost-net", False), ("tun", True)):
        (tmp_path / "sys/class/misc" / name).mkdir(parents=True)
        assert scan(tmp_path).vhost_net is expected


FOUR_COLUMNS = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
FOUR = "{}\t00000000\t0100A8C0\t0003\t0\t0\t{}\t00000000\t0\t0\t0\n"
SIX = f"{'0' * 32} 00 {'0' * 32} 00 20010db8{'0' * 24} {{:08x}} 00000001 00000000 {{}} {{:>8}}\n"
OTHERS = f"{'20010db8':0<32} 40 {'0' * 32} 00 {'0' * 32} 00000400 00000001 00000000 00000001 eno1\n"
ROUTES = yaml.safe_load(Path(__file__).with_name("default_routes.yaml").read_text())


def with_metric(text: str, usual: int) -> tuple[str, int]:
    name, _, metric = text.partition(" ")
    return name, int(metric or usual)


@pytest.mark.parametrize("row", ROUTES["shown"])
def test_what_alone_carries_the_default_route_is_known(tmp_path: Path, row: dict[str, list[str]]) -> None:
    (tmp_path / "proc/net").mkdir(parents=True, exist_ok=True)
    (tmp_path / "proc/net/route").write_text(
        FOUR_COLUMNS + "".join(FOUR.format(*with_metric(each, 100)) for each in row["four"])
    )
    rows = [OTHERS]
    for flags, kind in (("00000003", "six"), ("00450003", "advertised")):  # net/ipv6/route.c, rt6_add_dflt_router
        rows += [SIX.format(metric, flags, name) for name, metric in (with_metric(each, 1024) for each in row[kind])]
    (tmp_path / "proc/net/ipv6_route").write_text("".join(rows))
    for upper, lower in (("eno1.7", "eno1"), ("br0", "bond0"), ("bond0", "eno1"), ("bond0", "eno2"), ("bond0", "br0")):
        folder = tmp_path / "sys/class/net" / upper
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"lower_{lower}").symlink_to(f"../{lower}")
    found = scan(tmp_path)
    assert found.only_ways == set(row["only"])
    assert rescan(tmp_path, replace(found, only_ways=frozenset(), default_routes=()), of_netdev("eno1")) == found


@pytest.fixture
def nics(own_network: None) -> Iterator[Machine]:
    """A machine with three interfaces that are up."""
    for number in range(3):
        run("ip", "link", "add", f"nic{number}", "type", "veth", "peer", "name", f"port{number}")
        for name in (f"nic{number}", f"port{number}"):
            run("ip", "link", "set", name, "up")
        run("ip", "address", "add", f"10.0.{number}.2/24", "dev", f"nic{number}")
        run("ip", "-6", "address", "add", f"2001:db8:{number}::2/64", "dev", f"nic{number}", "nodad")
    machine = replace(Machine.open(), api_server="10.0.1.77")
    yield machine
    machine.close()


def test_a_default_route_of_ipv6_is_known_behind_many_others(nics: Machine) -> None:
    run("ip", "-6", "route", "add", "default", "via", "2001:db8::1", "dev", "nic0")
    for number in range(60):  # of pods, say
        run("ip", "-6", "route", "add", f"2001:db8:1::{number:x}/128", "dev", "port0")
    assert [route.netdev for route in scan(Path("/")).default_routes] == ["nic0"]


@pytest.mark.parametrize("row", ROUTES["real"])
def test_the_offer_and_add_keep_the_same_interfaces_of_real_routes_back(
    nics: Machine, row: dict[str, list[str]]
) -> None:
    only = set(row["only"])
    for route in row["routes"]:
        six = route.startswith("-6 ")
        run("ip", *["-6"][:six], "route", "add", *route.removeprefix("-6 ").split())
    snapshot = nics.scan()
    assert snapshot.only_ways == only
    assert nics.rescan(snapshot, of_netdev("nic1")) == snapshot
    assert nics.lifelines().keys() == only


def test_what_the_kernel_said_last_holds_while_it_does_not_answer(
    nics: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("ip", "route", "add", "default", "via", "10.0.0.1")
    before = nics.scan()
    assert before.only_ways == {"nic0", "nic1"}

    def refuse(_: str | None) -> Ways:
        raise OSError(errno.ENOBUFS, "no room")

    monkeypatch.setattr("agent.hardware.machine.read_ways", refuse)
    assert nics.scan() == before
    run("ip", "-6", "route", "add", "default", "dev", "nic0")
    new = replace(nics, _ways=[None])  # as after a start
    assert {route.family for route in new.scan().default_routes} == {4, 6}


def test_an_interface_of_a_bond_is_enslaved(root: Path) -> None:
    (root / "sys/devices/virtual/net/bond0").mkdir(parents=True)
    folder = (root / "sys/class/net/ens1f0np0").resolve()
    (folder / "master").symlink_to(os.path.relpath(root / "sys/devices/virtual/net/bond0", folder))
    devices = scan(root).by_address
    assert [n.is_enslaved for n in devices[PF].netdevs] == [True]
    assert [n.is_enslaved for n in devices["0000:3a:00.0"].netdevs] == [False]
