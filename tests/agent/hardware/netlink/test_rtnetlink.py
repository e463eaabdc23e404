"""Link requests spoken directly, to a real kernel."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from pathlib import Path

import pytest

from agent.hardware.host import LinkChange
from agent.hardware.netlink.link_messages import (
    IFF_UP,
    IFLA_ADDRESS,
    IFLA_IFALIAS,
    IFLA_MTU,
    IFLA_PROP_LIST,
    LinkMessage,
)
from agent.hardware.netlink.rtnetlink import IdleSockets, LinkSocket
from tests.agent.hardware.many_names import NAMES, give_all_names


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def test_an_attribute_that_is_absent_is_none_or_zero() -> None:
    message = LinkMessage(1, 0, {IFLA_IFALIAS: b"\0"})
    assert message.text(IFLA_IFALIAS) is None
    assert message.text(IFLA_ADDRESS) is None
    assert message.numbers(IFLA_MTU) == [0]


def test_a_link_is_found_with_its_attributes(own_network: None) -> None:
    run("ip", "link", "add", "v0", "address", "02:00:00:00:00:01", "mtu", "1400", "type", "veth", "peer", "name", "p0")
    with LinkSocket() as links:
        found = links.find("v0")
        assert found is not None
        assert found.attributes[IFLA_ADDRESS] == bytes.fromhex("020000000001")
        assert (*found.numbers(IFLA_MTU), found.flags & IFF_UP) == (1400, 0)
        assert links.find("v1") is None


def test_one_socket_takes_one_question_after_the_other(own_network: None) -> None:
    run("ip", "link", "add", "v0", "type", "veth", "peer", "name", "p0")
    with LinkSocket() as links:
        found = links.find("v0")
        assert found is not None
        links.change(found.ifindex, LinkChange(name="v1", mtu=1300, up=True))
        renamed = links.find("v1")
        assert renamed is not None
        assert (renamed.ifindex, *renamed.numbers(IFLA_MTU), renamed.flags & IFF_UP) == (found.ifindex, 1300, IFF_UP)
        links.change(found.ifindex, LinkChange(up=False))
        assert sorted(link.ifindex for link in links.all()) == sorted({1, found.ifindex, found.ifindex - 1})


def test_what_the_kernel_refuses_comes_with_its_errno(own_network: None) -> None:
    run("ip", "link", "add", "v0", "type", "veth", "peer", "name", "p0")
    with LinkSocket() as links:
        with pytest.raises(OSError, match="No such device") as caught:
            links.change(12345, LinkChange(name="v1"))
        assert caught.value.errno == errno.ENODEV
        found = links.find("v0")
        assert found is not None
        with pytest.raises(OSError, match="File exists") as caught:
            links.change(found.ifindex, LinkChange(name="p0"))
        assert caught.value.errno == errno.EEXIST


def test_a_list_of_many_links_is_whole(own_network: None) -> None:
    script = "".join(f"link add v{n} type veth peer name p{n}\n" for n in range(100))
    subprocess.run(["ip", "-batch", "-"], input=script, text=True, check=True)
    with LinkSocket() as links:
        assert len({link.ifindex for link in links.all()}) == 201


def test_a_link_with_as_many_other_names_as_it_can_have_is_read_to_its_end(own_network: None) -> None:
    """What tells the device below it comes after the names."""
    run("ip", "link", "add", "v0", "type", "veth", "peer", "name", "p0")
    with LinkSocket() as links:
        bare = links.find("v0")
        give_all_names("v0")
        found = links.find("v0")
        assert bare is not None
        assert found is not None
        assert len(found.altnames) == NAMES
        assert found.attributes.keys() - {IFLA_PROP_LIST} == bare.attributes.keys()
        (listed,) = (link for link in links.all() if link.ifindex == found.ifindex)
        assert listed.altnames == found.altnames
        assert listed.attributes.keys() == found.attributes.keys()


def test_a_socket_stays_in_the_namespace_it_was_opened_for(own_network: None, tmp_path: Path) -> None:
    run("ip", "link", "add", "v0", "type", "veth", "peer", "name", "p0")
    (tmp_path / "pod").touch()
    run("unshare", f"--net={tmp_path / 'pod'}", "true")
    pod = os.open(tmp_path / "pod", os.O_RDONLY)
    with LinkSocket(pod) as inside, LinkSocket() as outside:
        assert inside.find("v0") is None
        found = outside.find("v0")
        assert found is not None
        outside.change(found.ifindex, LinkChange(name="net1"), pod)
        assert inside.find("net1") is not None
        assert outside.find("v0") is None
    os.close(pod)


def test_a_socket_that_was_given_back_is_lent_again(own_network: None) -> None:
    sockets = IdleSockets()
    first, second = sockets.take(), sockets.take()
    assert first is not second
    sockets.give_back(second, sound=True)
    sockets.give_back(first, sound=True)
    again = sockets.take()
    assert again is first
    assert again.find("lo") is not None
    again.close()
    sockets.close()


def test_a_socket_is_not_lent_again_after_an_error(own_network: None) -> None:
    sockets = IdleSockets()
    broken = sockets.take()
    sockets.give_back(broken, sound=False)
    fresh = sockets.take()
    assert fresh is not broken
    with pytest.raises(OSError, match="Bad file descriptor"):
        broken.find("lo")
    sockets.give_back(fresh, sound=True)
    sockets.close()


def test_a_socket_given_back_after_the_end_is_closed(own_network: None) -> None:
    sockets = IdleSockets()
    late = sockets.take()
    sockets.close()
    sockets.give_back(late, sound=True)
    with pytest.raises(OSError, match="Bad file descriptor"):
        late.find("lo")


def test_what_a_process_sends_is_no_answer(own_network: None) -> None:
    with LinkSocket() as links, socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as other:
        assert links.find("lo") is not None  # from here on it has a port
        table = Path("/proc/thread-self/net/netlink").read_text().splitlines()[1:]
        ports = [int(port) for _, protocol, port, *_ in map(str.split, table) if protocol == "0" and port != "0"]
        assert ports
        for port in ports:
            other.sendto(b"short", (port, 0))
        found = links.find("lo")
        assert found is not None
        assert [link.ifindex for link in links.all()] == [found.ifindex]
