"""Pods that share an adapter talk by RDMA, with what their containers are told at ADD and nothing else.

Soft RoCE over the PFs, changed so that it sends and receives for macvlans in other namespaces as hardware does.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.config import parse
from agent.edits.build import edits_by_device, helper_variables
from agent.edits.specs import Specs, file_of_claim
from agent.hardware.machine import Machine
from agent.ledger import Ledger
from agent.model.allocation import Claim, ClaimRef, ClaimState, PodRef
from agent.offer.offer import Offer
from agent.offer.units import plain_offer
from agent.state import Latest
from cni.add_facts import FactsWriter, RailFiles
from cni.call import GrantedDevice, Node
from tests.cni.networks import network
from tests.cni.stand_ins import FixedDevices, attachments_of
from tests.node import claimed
from tests.vm.adapters import MakePod, Pf
from tests.vm.containers import Container, ended
from tests.vm.direct import Direct

PODS = 10
HCAS = ("mlx5_0", "mlx5_1")
WORDS = ("nccl", "ucx", "rails")
(SHARES,) = parse("resources: [{name: rdma/hca, kind: hca, shares: 10}]", "shares").resources
PREVIOUS = {"cniVersion": "1.0.0", "interfaces": [{"name": "eth0"}]}
PINGPONG = 'ibv_rc_pingpong -d "${UCX_NET_DEVICES%%:*}" -g "$UCX_IB_GID_INDEX" -n 200'


class Scene:
    """Pods with a share of a PF each, by a claim of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machine = Machine.open()
        self.ledger = Ledger.open(folder / "ledger.db", "boot")
        snapshot = self.machine.scan()
        self.snapshot = snapshot
        node = Node(self.machine, self.ledger, Latest(snapshot))
        specs = Specs(self.ledger, folder / "cdi")
        self.specs = specs
        files = RailFiles(folder / "cdi", Latest(Offer(snapshot)), cast(Any, SimpleNamespace()), Latest({}))
        tells = cast(Any, Latest(SimpleNamespace(tells=True)))
        facts = FactsWriter(tells, node, specs, files, {})
        granted: list[GrantedDevice] = []
        self.direct = Direct(
            self.machine, self.ledger, attachments_of(node, FixedDevices(granted), facts=facts), granted
        )

    def close(self) -> None:
        self.direct.attachments.close(20)
        self.ledger.close()
        self.machine.close()

    def start(self, pod: str, pf: Pf) -> Container:
        """Prepare a pod's claim, make its sandbox, and tell what its container gets."""
        ref, owner = ClaimRef(f"uid-{pod}", "default", pod), PodRef("default", pod, f"uid-{pod}")
        variables = helper_variables(WORDS, self.snapshot.by_address[pf.address].rdma_devices)
        unit = next(u for u in plain_offer((SHARES,), self.snapshot).offered[SHARES.name] if u.device == pf.address)
        edits = edits_by_device(SHARES, [unit], self.snapshot, variables)[pf.address]
        share = claimed("nic", "node", "hca", SHARES.name, "hca", pf.address, pod, exclusive=False, edits=edits)
        self.ledger.prepare_claim(Claim(ref, ClaimState.PREPARING, (share,), (owner,), owner.uid))
        self.specs.sync([file_of_claim(ref.uid)])
        self.ledger.set_claim_state(ref.uid, ClaimState.PREPARED)
        ranges = [[{"subnet": "10.99.0.0/24"}]]
        ipam = {"type": "host-local", "dataDir": str(self.folder / "leases"), "ranges": ranges}
        keys = network({"name": "fabric", "mode": "macvlan", "ipam": ipam})
        self.direct.granted[:] = [GrantedDevice(pf.address, SHARES.name, keys, claim_uid=ref.uid)]
        self.direct.do("add", pod, pod, "eth0", prevResult=PREVIOUS)
        (spec,) = json.loads((self.folder / f"cdi/nodefabric-claim-{ref.uid}.json").read_text())["devices"]
        return Container(pod, spec["containerEdits"])


@pytest.fixture
def scene(pfs: tuple[Pf, ...], changed_rxe: Callable[[str, str], None], tmp_path: Path) -> Iterator[Scene]:
    for name, pf in zip(HCAS, pfs, strict=True):
        changed_rxe(name, pf.netdev)
    made = Scene(tmp_path)
    yield made
    made.close()


def address(container: Container) -> str:
    """The address that a container reads in its file."""
    (rail,) = json.loads(container.run('cat "$NODEFABRIC_RAILS"'))["rails"]
    found: str = rail["nic"]["addresses"][0]
    return found.partition("/")[0]


def packets(hca: str) -> tuple[int, int]:
    """How many packets an adapter has sent and received by RDMA."""
    counters = Path("/sys/class/infiniband", hca, "ports/1/hw_counters")
    sent, received = (int((counters / name).read_text()) for name in ("sent_pkts", "rcvd_pkts"))
    return sent, received


def test_ten_pods_of_one_adapter_each_know_their_own_gid_talk_with_it_and_leave_nothing_told(
    scene: Scene, pfs: tuple[Pf, ...], netns: MakePod
) -> None:
    pods = [scene.start(netns(), pfs[1]) for _ in range(PODS)]
    indexes = [int(pod.env["UCX_IB_GID_INDEX"]) for pod in pods]
    assert len(set(indexes)) == PODS
    assert [pod.env["NCCL_IB_GID_INDEX"] for pod in pods] == [pod.env["UCX_IB_GID_INDEX"] for pod in pods]

    first, last = pods[0], pods[-1]
    before, _ = packets(HCAS[1])
    server = first.start(PINGPONG)
    client = f"until {PINGPONG} {address(first)}; do sleep 0.2; done"
    assert "200 iters" in last.run(client)
    assert f"GID ::ffff:{address(last)}" in ended(server)
    assert packets(HCAS[1])[0] > before + 400

    assert len(list((scene.folder / "cdi").glob("*.rails"))) == PODS
    for pod in pods:
        scene.direct.do("delete", pod.pod, pod.pod, "eth0")
    scene.direct.await_back()
    assert not list((scene.folder / "cdi").glob("*.rails"))
    shown = subprocess.run(["ip", "-n", last.pod, "link", "show", "net1"], check=False, capture_output=True)
    assert shown.returncode != 0
