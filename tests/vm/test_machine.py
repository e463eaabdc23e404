"""The real machine as a `Host`."""

from __future__ import annotations

from agent.hardware.machine import Machine
from tests.vm.adapters import MakeVfs, Pf, ip, netdevs


def test_the_interface_of_a_vf_is_found_under_whatever_name_it_has_by_now(pfs: tuple[Pf, ...], vfs: MakeVfs) -> None:
    first, second = vfs(pfs[0], 2)
    one, two = (*netdevs(first), *netdevs(second))
    machine = Machine.open()

    def found() -> list[str | None]:
        links = [machine.find_netdev(address) for address in (first, second)]
        assert [link.device for link in links if link is not None] == [first, second][: len(links) - links.count(None)]
        return [link.name if link is not None else None for link in links]

    try:
        for _ in range(2):  # under the names that sysfs lists, then under those remembered
            assert found() == [one, two]
        for before, after in ((one, "between"), (two, one), ("between", two)):
            ip("link", "set", before, "name", after)
        for _ in range(2):
            assert found() == [two, one]
        ip("netns", "add", "away")
        try:
            ip("link", "set", one, "netns", "away")
            ip("link", "set", two, "name", one)
            assert found() == [one, None]
        finally:
            ip("netns", "del", "away")
    finally:
        machine.close()
