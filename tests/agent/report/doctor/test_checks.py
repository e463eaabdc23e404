"""What doctor finds of the node, of claims and of rails, from facts alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from agent.config import Config, parse
from agent.model.cloud_topology import Places
from agent.model.device import PciDevice, Snapshot
from agent.model.vf_identity import Rail, identities
from agent.process.startup import network_problems
from agent.report.doctor import CHECKS, checks_hardware, checks_node, examine
from agent.report.doctor.facts import (
    UNLIMITED,
    ContainerRuntime,
    Facts,
    NetworkFile,
    Result,
    Severity,
    as_document,
    as_text,
    is_sound,
)

Snapshots = Callable[[str], Snapshot]
Check = Callable[[Facts], Iterator[Result]]
EVERYTHING = frozenset({"ib_uverbs", "rdma_ucm", "mlx5_ib", "vfio_pci", "nvidia_peermem"})


def config(text: str) -> Config:
    return parse(text, "test")


ALL = config(
    """
resources:
  - {name: rdma/hca, kind: hca, select: {vendors: ["15b3"]}}
  - {name: rdma/vf, kind: vf, select: {vendors: ["15b3"]}, network: rails}
  - {name: nvidia.com/gpu, kind: gpu}
networks:
  - {name: rails, mtu: 4200, ipam: {type: host-local}}
"""
)
VFS_ONLY = config("resources: [{name: rdma/vf, kind: vf}]")
DPDK = config("resources: [{name: dpdk/vf, kind: vf, select: {drivers: [vfio-pci]}}]")
LATE = config("resources: [{name: rdma/vf, kind: vf, binding: late}]")


def sound(snapshot: Snapshot) -> Facts:
    """A node on which nothing is wrong."""
    return Facts(
        snapshot=snapshot,
        config=ALL,
        config_path="/etc/nodefabric/config.yaml",
        modules=EVERYTHING,
        command_line=("intel_iommu=on", "iommu=pt"),
        has_iommu=True,
        runtime=ContainerRuntime("containerd", "v2.1.4", True, UNLIMITED),
        kubelet_sockets=(("/k/kubelet.sock", None),),
        topology_policy="restricted",
        plugins=frozenset({"nodefabric", "host-local"}),
        networks=(NetworkFile("10-calico.conflist", ("calico", "nodefabric")),),
        agent={"obstacles": {}},
    )


Edit = Callable[[Snapshot], Snapshot]


def having(**changes: Any) -> Edit:
    """Change a snapshot."""
    return lambda snapshot: replace(snapshot, **changes)


def with_devices(change: Callable[[PciDevice], PciDevice | None]) -> Edit:
    """Change the devices of a snapshot, or leave some out."""
    return lambda snapshot: replace(snapshot, devices=tuple(filter(None, map(change, snapshot.devices))))


def with_vfs(**changes: Any) -> Edit:
    return with_devices(lambda device: replace(device, **changes) if device.is_vf else device)


def with_netdevs(address: str, **changes: Any) -> Edit:
    """Change the interfaces of a device, or of all with an empty address."""

    def changed(device: PciDevice) -> PciDevice:
        netdevs = tuple(replace(netdev, **changes) for netdev in device.netdevs)
        return replace(device, netdevs=netdevs) if device.address.endswith(address) else device

    return with_devices(changed)


without_vfs = with_devices(lambda device: None if device.is_vf else replace(device, vfs=()))


def without_hugepages(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, numa_nodes=tuple(replace(node, hugepages=()) for node in snapshot.numa_nodes))


def worst(found: Iterable[Result]) -> Result:
    return min(found, key=lambda finding: finding.severity)


def test_a_sound_node_has_nothing_to_complain_of_and_every_check_says_so(node_snapshot: Snapshots) -> None:
    facts = sound(node_snapshot("h100-8gpu"))
    found = examine(facts)
    assert {finding.severity for finding in found} == {Severity.FINE}, as_text(found)
    assert is_sound(found)
    # They have tests of their own: nothing is offered to claims here, and no adapter has a Data Direct function.
    elsewhere = {"driver", "slices", "classes", "held", "data_direct"}
    assert all(list(check(facts)) for _, check in CHECKS if check.__name__ not in elsewhere)


CASES = [
    (checks_hardware.modules, {"modules": EVERYTHING - {"rdma_ucm"}}, Severity.ERROR, "rdma_ucm", "modprobe rdma_ucm"),
    (checks_hardware.modules, {"modules": None}, Severity.UNSEEN, "/proc/modules", ""),
    (checks_hardware.gpus, {"modules": EVERYTHING - {"nvidia_peermem"}}, Severity.NOTE, "nvidia_peermem", "modprobe"),
    (checks_hardware.iommu, {"command_line": ("intel_iommu=on",)}, Severity.NOTE, "may translate", "iommu=pt"),
    (checks_hardware.iommu, {"config": DPDK, "has_iommu": False}, Severity.ERROR, "is off", "VT-d"),
    (checks_hardware.hugepages, {"config": DPDK}, Severity.FINE, "beside each VF", ""),
    (checks_hardware.rdma_mode, {"config": VFS_ONLY}, Severity.NOTE, "every pod sees", "netns exclusive"),
    (checks_node.configuration, {"config": None}, Severity.ERROR, "is not there", "--config"),
    (checks_node.configuration, {"config": Config()}, Severity.WARNING, "offers nothing", "resources"),
    (
        checks_node.cdi,
        {"runtime": ContainerRuntime("containerd", "1.7.24", False)},
        *(Severity.WARNING, "1.7.24 does not", 'plugins."io.containerd.grpc.v1.cri" in /etc/containerd/config.toml'),
    ),
    (
        checks_node.cdi,
        {"runtime": ContainerRuntime("containerd", "v2.0.0", False, config_file="")},
        *(Severity.WARNING, "does not", 'plugins."io.containerd.cri.v1.runtime" in its configuration (containerd con'),
    ),
    (
        checks_node.cdi,
        {"runtime": ContainerRuntime("containerd", problem="the container runtime at /r did not answer in 2 s")},
        *(Severity.UNSEEN, "whether containerd resolves CDI names: the container runtime at /r did not", "as root"),
    ),
    (
        checks_node.cdi,
        {"runtime": ContainerRuntime("containerd", "1.7.1")},
        *(Severity.UNSEEN, "it does not show its configuration", ""),
    ),
    (
        checks_node.cdi,
        {"runtime": None, "config": config("{resources: [], runtimeSocket: /run/k3s/c.sock}")},
        *(Severity.UNSEEN, "/run/k3s/c.sock, which runtimeSocket names", ""),
    ),
    (checks_node.cdi, {"runtime": ContainerRuntime("cri-o", "1.34.1", True)}, Severity.FINE, "cri-o 1.34.1", ""),
    (
        checks_node.cdi,
        {"runtime": ContainerRuntime("containerd", "1.7.24", False), "config": LATE},
        *(Severity.ERROR, "late binding needs it", "enable_cdi"),
    ),
    (
        checks_node.cdi,
        {"runtime": ContainerRuntime("containerd", "1.7.24", False)},
        *(Severity.WARNING, "units that stay true after a reboot need it", "cdiNames: false"),
    ),
    (
        checks_node.memlock,
        {"runtime": ContainerRuntime("containerd", memlock_bytes=8 << 20)},
        *(Severity.WARNING, "8192 KiB", "LimitMEMLOCK=infinity"),
    ),
    (checks_node.memlock, {"runtime": None}, Severity.UNSEEN, "process is not to be seen", "as root"),
    (checks_node.kubelet, {"kubelet_sockets": (("/k", "refused"),)}, Severity.ERROR, "/k: refused", "kubeletDir"),
    (checks_node.kubelet, {"topology_policy": "none"}, Severity.NOTE, "is none", "best-effort"),
    (checks_node.cni, {"plugins": frozenset({"host-local"})}, Severity.ERROR, "no plugin nodefabric", "install-cni"),
    (checks_node.cni, {"plugins": frozenset({"nodefabric"})}, Severity.ERROR, "from host-local", "install the CNI"),
    (checks_node.cni, {"networks": ()}, Severity.WARNING, "holds no network", "cluster network"),
    (checks_node.cni, {"networks": (NetworkFile("a", ("ptp",)),)}, Severity.WARNING, "does not call", "--chain"),
    (checks_node.cni, {"networks": (NetworkFile("00-multus.conf", ("multus",)),)}, Severity.FINE, "", ""),
    (
        checks_node.agent,
        {"agent": {"obstacles": {"agent": "nobody answers"}}},
        Severity.ERROR,
        "nobody answers",
        "status",
    ),
    (checks_node.agent, {"agent": {"obstacles": {"cdi": "x"}}}, Severity.WARNING, "cdi: x", "status"),
    (checks_node.agent, {"agent": ()}, Severity.UNSEEN, "own node", ""),
]


@pytest.mark.parametrize(("check", "change", "severity", "text", "remedy"), CASES)
def test_what_is_wrong_is_found_with_its_remedy(
    node_snapshot: Snapshots, check: Check, change: dict[str, object], severity: Severity, text: str, remedy: str
) -> None:
    facts = replace(sound(node_snapshot("h100-8gpu")), **change)  # type: ignore[arg-type]
    found = worst(check(facts))
    assert found.severity is severity
    assert text in found.text
    assert remedy in found.remedy


def vfs_of(network: str) -> Config:
    used, unused = f"{{name: n, {network}}}", "{name: unused, mtu: 65520}"
    return config(f"{{resources: [{{name: rdma/vf, kind: vf, network: n}}], networks: [{used}, {unused}]}}")


EFA = {"config": config("resources: [{name: vpc.amazonaws.com/efa, kind: hca}]"), "modules": EVERYTHING - {"rdma_ucm"}}
VARIANT = {"modules": EVERYTHING - {"vfio_pci"} | {"mlx5_vfio_pci"}}
ON_VARIANT = with_vfs(driver="mlx5_vfio_pci", iommu_group=7)
BY_NAME = {"config": config("resources: [{name: rdma/vf, kind: vf, select: {pf: [eth0]}}]")}
BY_RDMA = {"config": config("resources: [{name: rdma/vf, kind: vf, select: {rdmaDevices: [mlx5_3]}}]")}
MODULES, MODE, VFS, MTU = checks_hardware.modules, checks_hardware.rdma_mode, checks_hardware.vfs, checks_hardware.mtu
NAMES, GPUS, HUGEPAGES = checks_hardware.names, checks_hardware.gpus, checks_hardware.hugepages
FINE, NOTE, WARNING, ERROR = Severity.FINE, Severity.NOTE, Severity.WARNING, Severity.ERROR


@pytest.mark.parametrize(
    ("check", "node", "edit", "change", "severity", "text", "remedy"),
    [
        (MODE, "h100-8gpu", having(rdma_exclusive=True), {}, ERROR, "no HCA can be shared", "netns shared"),
        (MODE, "h100-8gpu", having(rdma_exclusive=True), {"config": VFS_ONLY}, FINE, "exclusive", ""),
        (MODE, "h100-8gpu", having(rdma_cm=False), {}, ERROR, "rdma_cm is missing", "modprobe rdma_ucm"),
        (MODE, "efa", having(rdma_cm=False), EFA, FINE, "shared", ""),
        (MODULES, "efa", having(rdma_cm=False), EFA, FINE, "ib_uverbs", ""),
        (MODULES, "h100-8gpu", ON_VARIANT, VARIANT, FINE, "mlx5_vfio_pci", ""),
        (
            MODULES,
            "h100-8gpu",
            ON_VARIANT,
            VARIANT | {"config": DPDK},
            ERROR,
            "vfio_pci is not loaded",
            "modprobe vfio_p",
        ),
        (
            VFS,
            "h100-8gpu",
            without_vfs,
            {},
            ERROR,
            "none of",
            "echo 8 > /sys/bus/pci/devices/0000:18:00.0/sriov_numvfs",
        ),
        (VFS, "one-nic", having(), {}, ERROR, "no adapter can have VFs", "mlxconfig"),
        (VFS, "h100-8gpu", with_vfs(driver=None), {}, WARNING, "and 4 more: VFs 0–7 each", "drivers_probe"),
        (MTU, "h100-8gpu", with_netdevs("18:00.1", mtu=9500), {}, WARNING, "has MTU 9500, its PF ens1f0np0", ""),
        (
            MTU,
            "h100-8gpu",
            having(),
            {"config": vfs_of("mtu: 9500")},
            ERROR,
            "n asks for MTU 9500, and a PF with VFs has",
            "",
        ),
        (NAMES, "one-nic", with_netdevs("", name="eth0"), BY_NAME, WARNING, "eth0", "by PCI address"),
        (NAMES, "one-nic", with_netdevs("", name="eth0"), BY_RDMA, WARNING, "mlx5_3", "by PF or PCI address"),
        (NAMES, "one-nic", with_netdevs("", name="eth0"), {}, FINE, "eth0: named by the kernel", ""),
        (GPUS, "h100-8gpu", having(gpus=()), {}, ERROR, "does not show", "load the driver"),
        (GPUS, "h100-8gpu", having(gpus=()), {"config": VFS_ONLY}, NOTE, "not known by UUID", ""),
        (GPUS, "mi300x-8gpu", having(), {}, FINE, "8 known by sysfs (amdgpu)", ""),
        (GPUS, "azure-nd-h100", having(), {}, FINE, "8 GPUs answer", ""),
        (GPUS, "azure-nd-h100", having(places=Places()), {}, WARNING, "no PCIe switch", "topologyFile"),
        (HUGEPAGES, "h100-8gpu", without_hugepages, {"config": DPDK}, WARNING, "no hugepages", "hugepages=N"),
        (HUGEPAGES, "h100-8gpu", without_hugepages, {}, FINE, "nothing here is driven by programs", ""),
    ],
)
def test_what_is_wrong_with_hardware_is_found_with_its_remedy(
    node_snapshot: Snapshots,
    check: Check,
    node: str,
    edit: Edit,
    change: dict[str, Any],
    severity: Severity,
    text: str,
    remedy: str,
) -> None:
    found = list(check(replace(sound(edit(node_snapshot(node))), **change)))
    assert min(each.severity for each in found) is severity
    assert [text in each.text and remedy in each.remedy for each in found if each.severity is severity] == [True]


def test_findings_are_laid_out_worst_first_and_counted_and_none_is_forged() -> None:
    found = [
        Result(Severity.FINE, "well", check="a"),
        Result(Severity.WARNING, "odd\nfine     b            well", "do\x1b[2K this", "b"),
        Result(Severity.ERROR, "broken", "do that", "c"),
        Result(Severity.ERROR, "broken too", "do more", "d"),
    ]
    assert as_text(found).splitlines() == [
        "error    c            broken",
        "                      do that",
        "error    d            broken too",
        "                      do more",
        "warning  b            odd\\nfine     b            well",
        "                      do\\x1b[2K this",
        "fine     a            well",
        "",
        "2 errors, 1 warning, 1 fine",
    ]
    document = json.loads(json.dumps(as_document(found)))
    assert document["sound"] is False
    assert document["findings"][2] == {"check": "c", "severity": "error", "text": "broken", "remedy": "do that"}


def test_a_device_that_is_not_offered_is_a_note_where_the_configuration_probably_means_something_else(
    node_snapshot: Snapshots,
) -> None:
    snapshot = node_snapshot("h100-8gpu")
    bare = without_vfs(snapshot)
    config = parse("resources: [{name: rdma/vf, kind: vf, select: {isRdma: true}}]", "test")
    found = list(checks_hardware.not_offered(replace(sound(bare), config=config)))
    assert [(each.severity, each.text.partition(" (")[0]) for each in found] == [
        (Severity.NOTE, "8 adapters"),
        (Severity.FINE, "2 adapters"),
        (Severity.FINE, "8 GPUs"),
    ]
    assert found[0].remedy.startswith("take kind nic or hca, or create VFs")
    (nothing,) = checks_hardware.not_offered(replace(sound(bare), config=parse("{}", "test")))
    assert nothing.severity is Severity.FINE


def rails_found(
    snapshot: Snapshot, text: str, rails: tuple[Rail, ...] = (), rails_unknown: str = ""
) -> list[tuple[Severity, str]]:
    facts = Facts(snapshot, parse(text, "test"), rails=rails, rails_unknown=rails_unknown)
    found = checks_hardware.rails(facts)
    return [(finding.severity, finding.text) for finding in found]


def by_rail(range_: str, more: str = "") -> str:
    return f"""
resources: [{{name: rdma/vf, kind: vf, network: rails}}]
networks: [{{name: rails, ipam: {{type: whereabouts, range: "{range_}"}}}}]
{more}
"""


def test_the_numbers_are_those_of_the_books_or_it_is_said_that_nobody_knows(node_snapshot: Snapshots) -> None:
    snapshot = node_snapshot("h100-8gpu")
    first, second, *_ = [device for device in snapshot.devices if device.rdma_devices and not device.is_vf]
    identity = identities(snapshot)
    swapped = (
        Rail(0, second.address, identity(second), "ens2f0np0"),
        Rail(1, first.address, identity(first), "ens1f0np0"),
        Rail(8, "0000:ff:00.0", "a card that is away", "ens9f0np0"),
    )
    ((_, text),) = rails_found(snapshot, "resources: []", rails=swapped)
    assert text.startswith("0 ens2f0np0, 1 ens1f0np0, 2 ens3f0np0")
    assert text.endswith(", 8 ens9f0np0 (away)")
    ((_, text),) = rails_found(snapshot, "resources: []", rails_unknown="/x/ledger.db is not there")
    assert text.endswith(", 7 ens8f0np0, as of a first start (/x/ledger.db is not there)")
    assert rails_found(Snapshot(), "resources: []") == [(Severity.FINE, "no adapter here has an RDMA device")]


def test_adapters_without_what_a_network_goes_by_are_named(node_snapshot: Snapshots) -> None:
    text = by_rail("10.{rail}.0.0/16", "topology: {rails: [ens1f0np0, ens2f0np0, ens3f0np0, ens4f0np0, ens5f0np0]}")
    (of_list, warning, _) = rails_found(node_snapshot("h100-8gpu"), text)
    left_out = "leaves out ens6f0np0, ens7f0np0, ens8f0np0, which resources take, so they have no rail"
    assert of_list == (Severity.WARNING, f"topology.rails: {left_out}")
    where = "which these adapters have not: 0000:ba:00.0, 0000:ca:00.0, 0000:da:00.0"
    assert warning == (Severity.WARNING, f"the network rails goes by rail, {where}")


def test_what_the_rails_of_the_node_cannot_use_is_found_by_doctor_and_at_the_start(node_snapshot: Snapshots) -> None:
    snapshot = node_snapshot("h100-8gpu")
    far = replace(snapshot, devices=tuple(replace(d, numa_node=d.numa_node + 4) for d in snapshot.devices))
    text = by_rail("10.{numa*60}.0.0/16")
    assert network_problems(parse(text, "test"), snapshot) == []
    (problem,) = network_problems(parse(text, "test"), far)
    assert problem.startswith("networks[0].ipam.range: for NUMA node 5: cannot be used")
    assert (Severity.ERROR, problem) in rails_found(far, text)
