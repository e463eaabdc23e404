"""VFs that programs drive, on a machine with an IOMMU: hack/vm/vmrun --iommu, see the README there."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.config import parse
from agent.edits.build import edits_by_device
from agent.errors import DeviceBusy
from agent.offer.units import plain_offer
from tests.vm.adapters import PCI_DEVICES, MakePod, MakeVfs, Pf, ip, link, netdevs, run, wait_until
from tests.vm.containers import Container, ended
from tests.vm.direct import Direct, look, opened

EXAMPLES = Path(__file__).parents[2] / "daemonset/examples"
DPDK = (EXAMPLES / "config-dpdk.yaml").read_text()
NAMED_CPUS = '-l "$(cat /sys/fs/cgroup/cpuset.cpus.effective)"'
HUGE_PAGES = 32
ENOUGH = 1000
ASKED: dict[str, Any] = {"vlan": 100, "vlanQoS": 3, "mac": "02:00:00:00:00:77", "trust": "on", "max_tx_rate": 200}


def bind(address: str, driver: str) -> None:
    """Bind a function to a driver, from whichever it has."""
    folder = PCI_DEVICES / address
    if (folder / "driver").exists():
        (folder / "driver/unbind").write_text(address)
    (folder / "driver_override").write_text(driver)
    Path("/sys/bus/pci/drivers_probe").write_text(address)
    assert (folder / "driver").resolve().name == driver


@pytest.fixture(scope="module")
def bound(pfs: tuple[Pf, ...], vfs: MakeVfs) -> Iterator[tuple[Pf, str]]:
    if not any(Path("/sys/kernel/iommu_groups").glob("*")):
        pytest.skip("this machine has no IOMMU: hack/vm/vmrun --iommu")
    run("modprobe", "vfio_iommu_type1")
    run("modprobe", "vfio-pci")
    address = vfs(pfs[0], 2)[1]
    bind(address, "vfio-pci")
    yield pfs[0], address
    bind(address, "igbvf")
    (PCI_DEVICES / address / "driver_override").write_text("\n")


@pytest.fixture
def direct(bound: tuple[Pf, str], tmp_path: Path) -> Iterator[Direct]:
    before = look(bound[0])
    with opened(tmp_path) as parts:
        yield parts
        wait_until("everything back as it was", lambda: look(bound[0]) == before)
        assert (parts.ledger.attachments(), parts.ledger.quarantines()) == ((), ())


def test_the_pf_enforces_what_was_asked_and_the_function_is_reset(
    bound: tuple[Pf, str], direct: Direct, netns: MakePod
) -> None:
    pf, address = bound
    pod = netns()
    answer = direct.add("c1", pod, address, functionReset=True, **ASKED)
    assert answer["interfaces"] == [
        {"name": "net1", "mac": ASKED["mac"], "sandbox": f"/run/netns/{pod}", "pciID": address}
    ]
    on_pf = pf.settings(1)
    assert (on_pf["address"], on_pf["trust"], on_pf["rate"]["max_tx"]) == (ASKED["mac"], True, 200)
    assert on_pf["vlan_list"] == [{"vlan": 100, "qos": 3}]
    direct.check("c1", pod)
    with pytest.raises(DeviceBusy):
        direct.add("c2", netns(), address, vlan=7)
    direct.delete("c1", pod)


def test_a_program_that_has_the_group_open_does_not_keep_its_settings(
    bound: tuple[Pf, str], direct: Direct, netns: MakePod
) -> None:
    pod, address = netns(), bound[1]
    direct.add("c1", pod, address, **ASKED)
    group = os.path.basename(os.readlink(PCI_DEVICES / address / "iommu_group"))
    held = os.open(f"/dev/vfio/{group}", os.O_RDWR)
    try:
        with pytest.raises(OSError, match="busy"):
            os.close(os.open(f"/dev/vfio/{group}", os.O_RDWR))
        ip("netns", "delete", pod)
        assert direct.heal(address) == "owner-gone"
    finally:
        os.close(held)


def test_a_vf_that_was_bound_to_the_kernel_meanwhile_heals(
    bound: tuple[Pf, str], direct: Direct, netns: MakePod
) -> None:
    pod, address = netns(), bound[1]
    direct.add("c1", pod, address, **ASKED)
    bind(address, "igbvf")
    wait_until("its interface", lambda: netdevs(address))
    try:
        direct.delete("c1", pod)
    finally:
        bind(address, "vfio-pci")


def test_a_kernel_vf_that_was_bound_to_vfio_meanwhile_heals(
    bound: tuple[Pf, str], direct: Direct, netns: MakePod, tmp_path: Path
) -> None:
    address = bound[1]
    bind(address, "igbvf")
    wait_until("its interface", lambda: netdevs(address))
    with opened(tmp_path / "..") as later:  # has scanned anew
        pod = netns()
        later.add("c1", pod, address, **ASKED)
        bind(address, "vfio-pci")
        ip("netns", "delete", pod)
        assert later.heal(address) == "owner-gone"
        assert (later.ledger.attachments(), later.ledger.quarantines()) == ((), ())


@pytest.fixture
def huge_pages() -> Iterator[None]:
    count = Path("/proc/sys/vm/nr_hugepages")
    count.write_text(str(HUGE_PAGES))
    assert int(count.read_text()) == HUGE_PAGES
    yield
    count.write_text("0")


@pytest.fixture
def tagged(bound: tuple[Pf, str]) -> Iterator[Path]:
    """What an interface of the PF counts that takes the packets with the tag of the example's network."""
    run("modprobe", "8021q")
    (network,) = yaml.safe_load(DPDK)["networks"]
    ip("link", "add", "link", bound[0].netdev, "name", "tagged", "type", "vlan", "id", str(network["vlan"]))
    ip("link", "set", "tagged", "up")
    yield Path("/sys/class/net/tagged/statistics")
    ip("link", "delete", "tagged")


def sender(more: str, stop: Path) -> str:
    """Spell the example's command, with huge pages, no right but that to pin memory, and an end once a file is there.

    Of its two threads the one that sends needs a processor by name, and the machine has only one.
    """
    (container,) = yaml.safe_load((EXAMPLES / "pod-dpdk.yaml").read_text())["spec"]["containers"]
    (command,) = container["args"]
    assert NAMED_CPUS in command
    command = command.replace(NAMED_CPUS, "--lcores '(0,1)@0'")
    mounted = "mkdir /dev/hugepages && mount -t hugetlbfs none /dev/hugepages && ulimit -l 64"
    allowed = "setpriv --bounding-set=-all,+ipc_lock --inh-caps=-all"
    ends = f"while kill -0 $! && ! [ -e {stop} ]; do sleep 0.2; done; kill -TERM $!; wait $!"
    return f"{mounted} && {{ {allowed} sh -c {shlex.quote(f'{command} {more}')} & {ends}; }}"


def test_testpmd_sends_by_what_its_pod_was_told_and_the_pf_tags_and_counts_it(
    bound: tuple[Pf, str], direct: Direct, netns: MakePod, huge_pages: None, tagged: Path, tmp_path: Path
) -> None:
    pf, address = bound
    (resource,), snapshot = parse(DPDK, "config-dpdk.yaml").resources, direct.machine.scan()
    (unit,) = plain_offer((resource,), snapshot).offered[resource.name]
    pod, edits = netns(), edits_by_device(resource, [unit], snapshot)[address]
    (network,) = yaml.safe_load(DPDK)["networks"]
    keys = {key: value for key, value in network.items() if key != "name"}
    direct.add("c1", pod, address, mac=ASKED["mac"], **keys)  # without one, igb forgets the VF's at each reset

    stop = tmp_path / "stop"
    to_the_pf = f"--eth-peer=0,{link(pf.netdev)['address']}"
    program = Container(pod, edits).start(
        sender(f"--forward-mode=txonly {to_the_pf} --total-num-mbufs=2048 --stats-period 1", stop)
    )
    try:
        wait_until(
            "packets of testpmd",
            lambda: program.poll() is not None or int((tagged / "rx_packets").read_text()) > ENOUGH,
            90,
        )
    finally:
        stop.touch()
        said = ended(program, 60)
    assert f"Probe PCI driver: net_e1000_igb_vf (8086:10ca) device: {address}" in said
    assert f"Port 0: {ASKED['mac']}" in said
    assert max(int(count) for count in re.findall(r"TX-packets: (\d+)", said)) > ENOUGH, said
    assert int((tagged / "rx_packets").read_text()) > ENOUGH, said
    direct.check("c1", pod)
    direct.delete("c1", pod)
