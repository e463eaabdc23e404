"""Programs that connect by rdma_cm, in pods: Debian's rping, with the device files that its containers get."""

from __future__ import annotations

from collections.abc import Callable

from agent.config import parse
from agent.edits.build import edits_by_device
from agent.offer.units import plain_offer
from tests.vm.adapters import MakePod, Pf, ip
from tests.vm.containers import Container, ended
from tests.vm.direct import Direct
from tests.vm.test_rdma import exclusive as exclusive
from tests.vm.test_rdma import movable as movable
from tests.vm.test_rdma import node as node
from tests.vm.test_rdma import rdma as rdma
from tests.vm.test_told import HCAS, Scene, address, packets
from tests.vm.test_told import scene as scene

ROUNDS = 20
SECONDS = 100
"""How long each may take: the emulated processor needs 5, a busy one more."""
RPING = f"timeout -k 5 {SECONDS - 10} rping -v -C {ROUNDS}"
(VFS,) = parse("resources: [{name: rdma/vf, kind: vf}]", "VFs").resources


def files(container: Container) -> set[str]:
    """The RDMA device files in a container."""
    return set(container.run("ls /dev/infiniband").split())


def talk(server: Container, client: Container, listens_on: str) -> None:
    """Have rping in one container connect to rping in another; each is to see all that the other sends."""
    serving = server.start(f"exec {RPING} -s -a {listens_on}")
    said = client.run(f"for _ in $(seq 50); do {RPING} -c -a {listens_on} && exit; sleep 0.2; done; exit 1", SECONDS)
    heard = ended(serving, SECONDS)
    assert all(f"server ping data: rdma-ping-{n}:" in heard for n in range(ROUNDS)), heard
    assert all(f"ping data: rdma-ping-{n}:" in said for n in range(ROUNDS)), said


def test_rping_connects_pods_of_two_and_of_one_adapter_by_the_address_and_the_files_that_they_were_told(
    scene: Scene, pfs: tuple[Pf, ...], netns: MakePod
) -> None:
    first, second = (scene.start(netns(), pf) for pf in pfs)
    assert [files(pod) for pod in (first, second)] == [{"uverbs0", "rdma_cm"}, {"uverbs1", "rdma_cm"}]
    before = [packets(hca) for hca in HCAS]
    talk(first, second, address(first))
    for hca, earlier in zip(HCAS, before, strict=True):
        assert all(now > then + ROUNDS for now, then in zip(packets(hca), earlier, strict=True))
    talk(first, scene.start(netns(), pfs[0]), address(first))


def test_rping_connects_two_pods_that_have_the_rdma_device_of_their_vf_to_themselves(
    exclusive: None, node: Direct, movable: Callable[[int], str], netns: MakePod
) -> None:
    names = [movable(index) for index in range(2)]
    snapshot = node.machine.scan()
    units = {unit.device: unit for unit in plain_offer((VFS,), snapshot).offered[VFS.name]}
    pods = []
    for number, vf in enumerate(node.vfs):
        pod = netns()
        edits = edits_by_device(VFS, [units[vf]], snapshot)[vf]
        node.do("add", f"c{number}", pod, deviceID=vf)
        ip("-n", pod, "address", "add", f"10.99.0.{number + 1}/24", "dev", "net1")
        pods.append(Container(pod, edits))
    for number, (container, name) in enumerate(zip(pods, names, strict=True)):
        assert files(container) == {f"uverbs{number}", "rdma_cm"}
        assert container.run("ls /sys/class/infiniband").split() == [name]
    talk(pods[0], pods[1], "10.99.0.1")
    for number, container in enumerate(pods):
        node.do("delete", f"c{number}", container.pod)
    node.await_back()
    assert sorted(node.rdma_names()) == names
