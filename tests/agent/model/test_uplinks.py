"""Which of a function's interfaces is its own."""

from __future__ import annotations

import random

from agent.model.device import LinkLayer, Netdev, PciDevice, drives_for_programs


def netdev(name: str, phys_port_name: str = "", dev_port: int = 0) -> Netdev:
    return Netdev(name, 7, "02:00:00:00:00:01", 1500, "up", True, LinkLayer.ETHERNET, 100_000, phys_port_name, dev_port)


def own(*netdevs: Netdev) -> str | None:
    """Ask in every order that sysfs may list them in."""
    answers = set()
    for _ in range(20):
        shuffled = random.sample(netdevs, len(netdevs))
        device = PciDevice("0000:3b:00.0", (), 0x020000, 0, 0, None, 0, None, netdevs=tuple(shuffled))
        answers.add(device.netdev.name if device.netdev is not None else None)
    [answer] = answers
    return answer


OF_OTHERS = ("pf0vf3", "pf1vf127", "pf0sf88", "c1pf0vf3", "c1pf0", "pf0", "pf0hpf", "vf3", "c2pf1sf4")


def test_ports_of_other_functions_are_representors_and_own_ports_are_not() -> None:
    own_ports = ("", "p0", "p1", "p0s1", "n0")
    assert [name for name in (*OF_OTHERS, *own_ports) if own(netdev("eth0", name)) == "eth0"] == list(own_ports)


def test_the_uplink_is_found_among_representors() -> None:
    assert own(netdev("eth0", "pf0vf0"), netdev("eth1", "pf0vf1"), netdev("ens1f0np0", "p0")) == "ens1f0np0"
    assert own(netdev("a0", "pf0vf0"), netdev("ens1f0")) == "ens1f0"
    assert own(netdev("a0", "0"), netdev("a1", "1"), netdev("ens1f0")) == "ens1f0"  # as older kernels name them


def test_the_first_port_is_meant_of_a_function_with_two() -> None:
    assert own(netdev("a", dev_port=1), netdev("b", dev_port=0)) == "b"


FOR_PROGRAMS = ["vfio-pci", "mlx5_vfio_pci", "hisi-acc-vfio-pci", "uio_pci_generic", "igb_uio"]


def test_drivers_for_programs_are_known() -> None:
    others = [None, "mlx5_core", "igbvf", "virtio-pci"]
    assert [driver for driver in (*FOR_PROGRAMS, *others) if drives_for_programs(driver)] == FOR_PROGRAMS
