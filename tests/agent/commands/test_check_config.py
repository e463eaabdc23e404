"""Configurations, most of them wrong or poor, and what `check-config` says of them: the fault, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from agent.__main__ import main
from agent.hardware.host import Host
from agent.model.device import Snapshot

Check = Callable[[str, str], tuple[int, str]]

SECOND = "{name: a/second, kind: vf, select: {rootDevices: ['0000:18:00.0']}}"
RDMA_NICS = "{name: a/nic, kind: nic, select: {isRdma: true}, network: r}"
LATE = "{name: rdma/vf, kind: vf, offer: dra, binding: late}"
PLANE_PAIRS = (
    "{name: rdma/rail, kind: rail, network: rails, nic: {kind: nic, count: planes, select: {vendors: ['15b3']}}}"
)
CASES = {
    "a PF that is called otherwise": (
        "h100-8gpu",
        "resources: [{name: rdma/vf, kind: vf, select: {pf: [ens1f0]}}]",
        5,
        [
            "warning: resources[0].select.pf[0]: no PF here is called ens1f0: here are ens1f0np0, ",
            "64 VFs (ens1f0np0, ens2f0np0, ens3f0np0, ens4f0np0 and 4 more: VFs 0–7 each): not selected by select.pf",
        ],
    ),
    "VFs where there are none": (
        "one-nic",
        "resources: [{name: rdma/vf, kind: vf}]",
        5,
        ["1 adapter (enp1s0): selected, but without SR-IOV, so it cannot have VFs: take kind nic, or hca if it has "],
    ),
    "whole adapters that have VFs": (
        "h100-8gpu",
        "resources: [{name: rdma/nic, kind: nic, select: {isRdma: true}}]",
        5,
        ["8 adapters (ens1f0np0, ens2f0np0, ens3f0np0, ens4f0np0 and 4 more): selected, but with VFs"],
    ),
    "InfiniBand on Ethernet": (
        "h100-8gpu",
        "resources: [{name: rdma/hca, kind: hca, select: {linkLayer: [InfiniBand]}}]",
        5,
        ["not selected by select.linkLayer: widen that selector"],
    ),
    "keys of sriov-network-device-plugin": (
        "h100-8gpu",
        "resources: [{resourceName: vf, resourcePrefix: rdma, kind: vf, selectors: {pfNames: [ens1f0np0]}}]",
        2,
        [
            "resourceName: is a key of sriov-network-device-plugin, whose own file --sriov-config takes as it is",
            "selectors: is a key of sriov-network-device-plugin",
        ],
    ),
    "a template without quotes": (
        "h100-8gpu",
        "networks: [{name: rails, ifName: rail{rail}, mtu: 9000}]",
        2,
        ["put the text in quotes: YAML reads { as the start of a mapping"],
    ),
    "a network with many faults": (
        "h100-8gpu",
        "networks: [{name: rails, mtu: 90000, vlan: 5000, spoofchck: on, ipam: {type: bridge}, trust: maybe}]",
        2,
        [
            "networks[0].mtu: must be a whole number from 68 to 65520, is 90000",
            "networks[0].vlan: must be a whole number from 0 to 4094, is 5000",
            "networks[0].spoofchck: is not a known key (did you mean 'spoofchk'?)",
            "networks[0].ipam.type: must be the name of an IPAM plugin, is 'bridge'",
            'networks[0].trust: must be "on" or "off", is \'maybe\'',
        ],
    ),
    "two resources for one device": (
        "h100-8gpu",
        "{resources: [{name: a/first, kind: vf, select: {pf: [ens1f0np0]}}, *]}".replace("*", SECOND),
        2,
        [
            "a/second selects ens1f0np0: VFs 0–7, which a/first has already",
            "8 VFs (ens1f0np0: VFs 0–7): selected, but taken by a/first",
        ],
    ),
    "rails with more NICs than there are": (
        "h100-8gpu",
        "resources: [{name: a/rail, kind: rail, nic: {kind: hca, shares: 1, count: 3}}]",
        0,
        ["6 GPUs (GPUs 1–3, 5–7): without a NIC for a rail: select more NICs under nic.select, lower nic.count"],
    ),
    "rails that need fewer VFs than are selected": (
        "gb300-4gpu",
        "resources: [{name: a/rail, kind: rail, nic: {kind: vf}}]",
        0,
        [
            "a/rail (rail): 8 of 20 devices, 4 units\n  takes GPUs 0–3; enp3s0np0,",
            "enP18p3s0np0: VF 0 each\n  unused: 12 VFs (enp3s0np0,",
        ],
    ),
    "rails with a count that leaves adapters over": (
        "gb200-cx8-4gpu",
        "resources: [{name: a/rail, kind: rail, nic: {kind: nic, count: 3}}]",
        0,
        [
            "  unused: 2 GPUs (GPUs 1, 3): without a NIC for a rail",
            "  unused: 2 adapters (enp3s0f1np1, enP16p3s0f1np1): too few for the rail of another GPU: lower nic.count",
        ],
    ),
    "adapters on a node with sixteen of them, and one of the host": (
        "oci-h100-8gpu",
        f"{{resources: [{RDMA_NICS}], networks: [{{name: r, ifName: 'r{{rail}}'}}]}}",
        0,
        [
            "0000:d5:00.0, 0000:d5:00.1\n  leaves out 1 adapter (eth0): needed by the host",
            "nothing to do, unless the host gets another way out",
            "ifName r9\n  rail 10,",
        ],
    ),
    "rails of GPUs that NVML does not show": (
        "mi250-8gpu",
        "{resources: [{name: a/rail, kind: rail}], topology: {rails: [ens9, ens1np0]}}",
        5,
        [
            "warning: resources[0].gpu: this node has no GPU that NVML shows",
            "warning: topology.rails[0]: no adapter here is called ens9: plug the adapter in, or correct its name",
            "not shown by NVML, which kinds gpu and rail go by",
        ],
    ),
    "wrong values, all at once": (
        "one-nic",
        "resources: [{name: RDMA, kind: hcas}]",
        2,
        ["config.yaml: resources[0].name: must be", "config.yaml: resources[0].kind: must be"],
    ),
    "GPUs without a NIC": (
        "h100-8gpu",
        "resources: [{name: rdma/rail, kind: rail, nic: {kind: vf, select: {pf: [ens1f0]}}}]",
        5,
        ["rdma/rail (rail): 0 of 72 devices, 0 units"],
    ),
    "nothing": ("one-nic", "", 0, ["it has no resources: the agent would offer nothing"]),
    "all VFs, and rails of which one is away": (
        "h100-8gpu",
        "{resources: [{name: rdma/vf, kind: vf}], topology: {rails: [ens1f0np0, gone0]}}",
        0,
        [
            "rdma/vf (vf): 64 of 64",
            "ens7f0np0, ens8f0np0: VFs 0–7 each\n",
            "warning: topology.rails[1]: no adapter here is called gone0: plug",
        ],
    ),
    "what the scheduler would see": (
        "h100-8gpu",
        f"resources: [{LATE}, {{name: rdma/hca, kind: hca, offer: dra}}]",
        0,
        [
            "rdma/vf (vf): 64 of 64 devices, 8 devices in slices\n",
            "  the scheduler sees slots-rdma-vf-gpu-0000-1b-00-0, ",
            "  the scheduler sees hca-946dae0300000000, ",
        ],
    ),
    "adapters that are protected": (
        "h100-8gpu",
        '{cni: {protect: ["0000:18:00.0", typo0]}, resources: [{name: rdma/hca, kind: hca}]}',
        0,
        [
            "takes 0000:3a:00.0 (mlx5_1)",
            "cni.protect 0000:18:00.0: 0000:18:00.0\n",
            "cni.protect typo0: no adapter of this node",
        ],
    ),
    "a network for each plane": (
        "gb200-cx8-4gpu",
        f"{{resources: [{PLANE_PAIRS}], networks: [{{name: rails, ifName: 'rail{{rail}}p{{plane}}'}}]}}",
        0,
        [
            "rdma/rail (rail): 12 of 12 devices, 4 units",
            "network rails: 8 networks\n  rail 0, enp3s0f0np0: ifName rail0p0\n  rail 0, enp3s0f1np1: ifName rail0p1",
            "  rail 3, enP18p3s0f1np1: ifName rail3p1\n",
        ],
    ),
}
PLANES = [[f"rdma{i}np0", f"rdma{i + 1}np1"] for i in range(0, 16, 2)]
PLANE_RAILS = "{name: a/rail, kind: rail, nic: {kind: nic, count: planes}}"
BY_PF = "{name: a/vf, kind: vf, select: {pf: [ens1f0np0, ens2f0np0]}, network: {ens1f0np0: a, ens2f0np0: b}}"
NOT_SHOWN = {
    "an adapter is no plane although topology.rails lists it": (
        "oci-h100-8gpu",
        f"{{resources: [{PLANE_RAILS}], topology: {{rails: {PLANES}}}}}",
        "a/rail (rail): 24 of 24 devices, 8 units",
        "not needed by any GPU",
    ),
    "an adapter is left out although a pool takes its VFs": (
        "h100-8gpu",
        '{"resourceList": [{"resourceName": "vf", "selectors": {"pfNames": ["ens1f0np0"]}}]}',
        "takes ens1f0np0: VFs 0–7",
        "selected, but with VFs",
    ),
    "a network of one PF is joined by another": (
        "h100-8gpu",
        f"{{resources: [{BY_PF}], networks: [{{name: a, ifName: 'a{{rail}}'}}, {{name: b, ifName: 'b{{rail}}'}}]}}",
        "network b: 1 network\n  rail 1, ens2f0np0: ifName b1\n",
        "ifName b0",
    ),
}


class Looked:
    """A modelled node that was scanned before: laying it out takes longer than all else."""

    def __init__(self, root: Path, snapshot: Snapshot) -> None:
        self.root, self.snapshot = root, snapshot

    def scan(self) -> Snapshot:
        return self.snapshot

    def close(self) -> None:
        pass


@pytest.fixture
def check(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    node_root: Callable[[str], Path],
    node_snapshot: Callable[[str], Snapshot],
) -> Check:
    """Check a configuration on a modelled node, and return the status and what is said."""

    def checked(node: str, text: str) -> tuple[int, str]:
        path, host = tmp_path / "config.yaml", cast(Host, Looked(node_root(node), node_snapshot(node)))
        path.write_text(text)
        status = main(["check-config", "--root", str(node_root(node)), str(path)], lambda: host)
        return status, "".join(capsys.readouterr())

    return checked


@pytest.mark.parametrize("name", NOT_SHOWN)
def test_nothing_is_shown_that_is_not_so(check: Check, name: str) -> None:
    node, text, expected, wrong = NOT_SHOWN[name]
    _, shown = check(node, text)
    assert expected in shown
    assert wrong not in shown


@pytest.mark.parametrize("name", CASES)
def test_a_configuration_is_told_with_its_faults_and_what_to_do(check: Check, name: str) -> None:
    node, text, status, expected = CASES[name]
    found, shown = check(node, text)
    assert found == status
    for part in expected:
        assert part in shown


PER_RAIL = "{type: whereabouts, range: '10.{rail}.0.0/16'}"
PER_PLANE = "{type: whereabouts, range: '10.{rail}.{plane}.0/24'}"


@pytest.mark.parametrize(
    ("keys", "alike", "listed"),
    [
        (
            f"ifName: 'rail{{rail}}', ipam: {PER_RAIL}",
            "ifName: 'rail{rail}'",
            "rail 0, planes 0 enp3s0f0np0 and 1 enp3s0f1np1: ifName rail0, ipam.range 10.0.0.0/16",
        ),
        (
            f"ifName: 'r{{rail}}p{{plane}}', ipam: {PER_RAIL}",
            "ipam.range: '10.{rail}.0.0/16'",
            "rail 0, enp3s0f1np1: ifName r0p1, ipam.range 10.0.0.0/16",
        ),
        (
            f"ifName: '{{pf}}', ipam: {PER_PLANE}",
            "",
            "rail 0, enp3s0f1np1: ifName enp3s0f1np1, ipam.range 10.0.1.0/24",
        ),
    ],
)
def test_planes_of_a_rail_that_have_the_same_network_are_told(check: Check, keys: str, alike: str, listed: str) -> None:
    nics = "{name: rdma/nic, kind: nic, select: {vendors: ['15b3']}, network: rails}"
    status, shown = check("gb200-cx8-4gpu", f"{{resources: [{nics}], networks: [{{name: rails, {keys}}}]}}")
    warnings = [line for line in shown.splitlines() if line.startswith("warning: networks[0].")]
    are = "is the same for enp3s0f0np0 and enp3s0f1np1, which are planes of rail 0: add {plane}"
    assert warnings == ([f"warning: networks[0].{alike} {are}, so that each plane has its own"] if alike else [])
    assert (status, f"  {listed}\n" in shown) == (0, True)
