"""Ten configurations that are wrong or poor, and what `check-config` says of them: the fault, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.__main__ import main

SECOND = "{name: a/second, kind: vf, select: {rootDevices: ['0000:18:00.0']}}"
RDMA_NICS = "{name: a/nic, kind: nic, select: {isRdma: true}, network: r}"
TEN = {
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


@pytest.mark.parametrize("name", NOT_SHOWN)
def test_nothing_is_shown_that_is_not_so(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    node, text, expected, wrong = NOT_SHOWN[name]
    path = tmp_path / "config.yaml"
    path.write_text(text)
    main(["check-config", "--node", node, str(path)])
    shown = capsys.readouterr().out
    assert expected in shown
    assert wrong not in shown


@pytest.mark.parametrize("name", TEN)
def test_a_wrong_or_poor_configuration_is_told_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    node, text, status, expected = TEN[name]
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert main(["check-config", "--node", node, str(path)]) == status
    found = capsys.readouterr()
    shown = found.out + found.err
    for part in expected:
        assert part in shown
