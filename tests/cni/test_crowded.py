"""Many calls that wait at once: nothing that has to do with another network, or with none, waits with them.

With the installed relay and real plugins, over a real socket.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cni.call import LeasingNetwork
from tests.cni import tiny_node
from tests.cni.relay import Outcome, Relay, finish
from tests.cni.tiny_node import PF_NETDEV, Rig, stub_answer, vf
from tests.waiting import until

CALLERS, MAX_ADDING = 80, 16
CLUSTER = {"cniVersion": "1.1.0", "name": "cluster", "type": "nodefabric"}
PASSED = {"cniVersion": "1.1.0", "interfaces": [{"name": "eth0", "sandbox": "/x"}]}
HANGS = f"""in=$(cat); here=$(dirname $0)
case "$in" in *hangs-*)
    echo $CNI_COMMAND $CNI_CONTAINERID >>$here/hanging
    while ! [ -e $here/go ]; do sleep 0.1; done;;
esac
{stub_answer("10.0.0.2/24")}"""


@dataclass
class Node:
    """A node that serves CNI, and a pod's namespace that all calls are about: each has an interface of its own."""

    rig: Rig
    relay: Relay
    pod: Path

    def start(
        self, command: str, number: int, conf: Mapping[str, Any], namespace: str = "default"
    ) -> subprocess.Popen[bytes]:
        """Begin a call as a runtime does, for a pod of a namespace."""
        env = {
            "CNI_CONTAINERID": f"c{number}",
            "CNI_IFNAME": f"net{number}",
            "CNI_NETNS": str(self.pod),
            "CNI_ARGS": f"K8S_POD_NAMESPACE={namespace};K8S_POD_NAME=pod",
            "CNI_PATH": str(self.rig.folder),
        }
        with tempfile.TemporaryFile() as stdin:  # and no pipe: nobody needs to attend to it
            stdin.write(json.dumps(conf).encode())
            stdin.seek(0)
            return subprocess.Popen(
                [self.relay.program],
                env=self.relay.environment(command, "200", env),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )

    def run(self, command: str, number: int, conf: Mapping[str, Any], namespace: str = "default") -> Outcome:
        """Make a call as a runtime does. It must not wait for what hangs until a test's end."""
        return finish(self.start(command, number, conf, namespace))

    def trusted(self, conf: Mapping[str, Any]) -> Mapping[str, Any]:
        """Have a network count as one that has answered: then its plugin may take its time."""
        self.rig.attachments.leases.trust.note_answer(LeasingNetwork.of(conf["name"], conf["ipam"]), "default")
        return conf

    def hanging(self) -> list[str]:
        """List what plugins were asked that hang."""
        file = self.rig.folder / "hanging"
        return file.read_text().splitlines() if file.exists() else []


def network(name: str) -> dict[str, Any]:
    """Describe a network by which each pod gets an interface of its own, and an address from a plugin."""
    return {**CLUSTER, "name": name, "mode": "macvlan", "master": PF_NETDEV, "ipam": {"type": "stub", "subnet": name}}


@pytest.fixture
def node(own_network: None, tmp_path: Path, short_folder: Path, relay_program: Callable[[str], Path]) -> Iterator[Node]:
    with tiny_node.open_rig(tmp_path, max_adding=MAX_ADDING) as rig:
        rig.stub_ipam(HANGS)
        subprocess.run(["ip", "link", "set", PF_NETDEV, "up"], check=True)
        relay = Relay(relay_program("static"), short_folder)
        server = rig.server(relay.socket)
        server.start()
        yield Node(rig, relay, rig.pod())
        server.close()


@contextmanager
def crowd(node: Node, *names: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Have many pods of networks whose plugin hangs start. Yields the calls of those that cannot wait, once they ended.

    The others are to succeed when the plugin goes on.
    """
    with ExitStack() as stack:
        calls = [node.start("ADD", n, node.trusted(network(names[n % len(names)]))) for n in range(CALLERS)]
        for call in calls:
            stack.enter_context(call)
            stack.callback(call.kill)
        until(lambda: sum(call.poll() is not None for call in calls) >= CALLERS - MAX_ADDING)
        yield calls
        waiting = [call for call in calls if call.poll() is None]
        (node.rig.folder / "go").touch()
        assert [finish(call).status for call in waiting] == [0] * len(waiting)


def look_at_the_rest(node: Node) -> None:
    """Call as a runtime does for the node, and for a pod that has nothing of ours."""
    until(lambda: node.run("STATUS", 900, CLUSTER).status == 0)
    conf = {**CLUSTER, "prevResult": PASSED}
    for _ in range(3):
        passed = node.run("ADD", 900, conf)
        assert (passed.status, json.loads(passed.stdout)) == (0, PASSED)
        assert node.run("DEL", 900, conf) == Outcome(0, b"")
    assert node.relay.spooled() == []


def test_pods_of_a_network_whose_plugin_hangs_keep_nobody_else(node: Node) -> None:
    with crowd(node, "hangs-a") as calls:
        until(lambda: sum(call.poll() is None for call in calls) == MAX_ADDING // 2)
        for call in calls:
            if call.poll() is not None:
                error = finish(call).error
                assert (error["code"], error["details"]) == (11, "DeviceBusy")
                assert "network hangs-a (addresses from stub) has 8 ADDs under way" in error["msg"]
        until(lambda: len(node.hanging()) == 2)
        look_at_the_rest(node)
        until(lambda: node.run("STATUS", 900, network("hangs-a")).status == 0)
        for _ in range(3):
            answer = node.run("ADD", 901, network("healthy"), "team")
            assert [ip["address"] for ip in json.loads(answer.stdout)["ips"]] == ["10.0.0.2/24"]
            checked = {**network("healthy"), "prevResult": json.loads(answer.stdout)}
            assert node.run("CHECK", 901, checked, "team").status == 0
            assert node.run("DEL", 901, network("healthy"), "team") == Outcome(0, b"")
            until(lambda: not node.rig.ledger.attachments_of("c901", "net901"))
        assert node.rig.ledger.owed_leases() == ()
        assert [line.split()[0] for line in node.hanging() if line.startswith("ADD")] == ["ADD", "ADD"]


def test_pods_that_all_want_one_device_keep_nobody_else(node: Node) -> None:
    """A tenant may name the same device in all its pods; who has to wait for another waits for half a minute."""
    one = {**CLUSTER, "name": "one", "deviceID": vf(0), "ipam": {"type": "stub", "subnet": "hangs-a"}}
    with ExitStack() as stack:
        calls = [node.start("ADD", n, node.trusted(one)) for n in range(CALLERS)]
        for call in calls:
            stack.enter_context(call)
            stack.callback(call.kill)
        until(lambda: sum(call.poll() is None for call in calls) <= MAX_ADDING // 2)
        look_at_the_rest(node)
        answer = node.run("ADD", 901, network("healthy"), "team")
        assert [ip["address"] for ip in json.loads(answer.stdout)["ips"]] == ["10.0.0.2/24"]
        (node.rig.folder / "go").touch()
        assert sorted(finish(call).status for call in calls)[0] == 0
