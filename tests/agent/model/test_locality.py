from __future__ import annotations

import pytest

from agent.model.device import NO_NUMA_NODE, PciDevice
from agent.model.locality import Locality, locality
from tests.node import pci

ROOT = ("pci0000:3a", "0000:3a:00.0")
SWITCH = (*ROOT, "0000:3b:00.0")


def device(*path: str, numa_node: int = 0) -> PciDevice:
    return pci(path[-1], path[:-1], numa_node)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        pytest.param(device(*SWITCH), device(*ROOT, "0000:3b:00.1"), Locality.PIX, id="two functions"),
        pytest.param(
            device(*SWITCH, "0000:3c:00.0", "0000:3d:00.0"),
            device(*SWITCH, "0000:3c:01.0", "0000:3e:00.0"),
            Locality.PIX,
            id="one switch",
        ),
        pytest.param(
            device(*SWITCH, "0000:3c:00.0", "0000:3d:00.0"),
            device(*SWITCH, "0000:3c:01.0", "0000:3e:00.0", "0000:3f:00.0", "0000:40:00.0"),
            Locality.PXB,
            id="a switch below a switch",
        ),
        pytest.param(
            device(*ROOT, "0000:3b:00.0"),
            device("pci0000:3a", "0000:3a:01.0", "0000:41:00.0"),
            Locality.PHB,
            id="two root ports",
        ),
        pytest.param(
            device("pci0000:10", "0000:10:1b.0"),
            device("pci0000:10", "0000:10:1c.0"),
            Locality.PHB,
            id="on the root complex itself",
        ),
        pytest.param(device(*ROOT), device("pci0000:57", "0000:57:00.0"), Locality.NODE, id="two host bridges"),
        pytest.param(
            device(*ROOT),
            device("pci0000:97", "0000:97:00.0", numa_node=1),
            Locality.SYS,
            id="two sockets",
        ),
        pytest.param(
            device(*ROOT, numa_node=NO_NUMA_NODE),
            device("pci0000:57", "0000:57:00.0", numa_node=NO_NUMA_NODE),
            Locality.SYS,
            id="firmware that says nothing",
        ),
    ],
)
def test_each_word_has_its_case(a: PciDevice, b: PciDevice, expected: Locality) -> None:
    assert locality(a, b) is expected
    assert locality(b, a) is expected
