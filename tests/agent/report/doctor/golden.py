"""What doctor finds on a node on which nothing is wrong but one thing, in findings.txt.

.venv/bin/python -m tests.agent.report.doctor.golden    writes it: read the difference before you commit it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.config import Config, parse
from agent.model.cloud_topology import Places
from agent.model.device import PciDevice, Snapshot
from agent.report.doctor.checks_hardware import (
    data_direct,
    gpus,
    hugepages,
    iommu,
    modules,
    mtu,
    names,
    not_offered,
    rdma_mode,
    vfs,
)
from agent.report.doctor.checks_node import (
    agent,
    cdi,
    cni,
    configuration,
    driver,
    held,
    kubelet,
    memlock,
    slices,
)
from agent.report.doctor.facts import (
    TOWARDS_DATA_DIRECT,
    TOWARDS_GPU,
    UNLIMITED,
    ClaimFacts,
    ContainerRuntime,
    DataDirectFacts,
    Facts,
    NetworkFile,
    Result,
    SwitchPort,
)
from tests.node import recorded_node

Check = Callable[[Facts], Iterator[Result]]
EVERYTHING = frozenset({"ib_uverbs", "rdma_ucm", "mlx5_ib", "vfio_pci", "nvidia_peermem"})
FILE = Path(__file__).with_name("findings.txt")


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
EFA = config("resources: [{name: vpc.amazonaws.com/efa, kind: hca}]")
K3S = config("{resources: [], runtimeSocket: /run/k3s/c.sock}")
BY_NAME = config("resources: [{name: rdma/vf, kind: vf, select: {pf: [eth0]}}]")
BY_RDMA = config("resources: [{name: rdma/vf, kind: vf, select: {rdmaDevices: [mlx5_3]}}]")
FOR_RDMA = config("resources: [{name: rdma/vf, kind: vf, select: {isRdma: true}}]")
LARGE = config(
    """
resources: [{name: rdma/vf, kind: vf, network: n}]
networks: [{name: n, mtu: 9500}, {name: unused, mtu: 65520}]
"""
)
CLAIMS = config(
    """
resources:
  - {name: rdma/vf, kind: vf, offer: dra}
  - {name: rdma/hca, kind: hca, offer: dra, binding: late, shares: 63}
"""
)


def sound(name: str = "h100-8gpu") -> Facts:
    """A node on which nothing is wrong."""
    return Facts(
        snapshot=recorded_node(name),
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


UNCHANGED = having()


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


def found(check: Check, name: str = "h100-8gpu", edit: Edit = UNCHANGED, **changes: Any) -> Sequence[Result]:
    """Look at a node with some changes."""
    facts = sound(name)
    return tuple(check(replace(facts, snapshot=edit(facts.snapshot), **changes)))


DEVICES = [
    {"resource": "rdma/hca", "health": "healthy", "count": 2},
    {"resource": "rdma/vf", "health": "healthy", "count": 16},
]
STATE = {"driver": "nodefabric.io", "registered": True, "problem": None, "slices": 2, "devices": DEVICES}
NOT_FOUND = STATE | {"registered": False, "problem": "kubelet has not found it"}
SOCKET = "/var/lib/kubelet/plugins_registry/nodefabric.io-1-reg.sock"
REGISTRY = (("/var/lib/kubelet/plugins_registry", None),)


def held_claim(name: str, state: str, since: float, *pods: str) -> dict[str, Any]:
    return {"namespace": "default", "name": name, "state": state, "since": since, "pods": pods}


PREPARED = held_claim("nics", "prepared", 5.0, "default/trainer")
LOST = held_claim("lost", "prepared", 0.0)
LEAVING = held_claim("leaving", "unpreparing", 0.0, "default/trainer")


def of_claims(check: Check, state: Any = STATE, claims: Any = (PREPARED,), **changes: Any) -> Sequence[Result]:
    """Look at a node that offers something to claims. `state` and `claims` are what its agent says."""
    plain: dict[str, Any] = {
        "sockets": ((SOCKET, None),),
        "folders": REGISTRY,
        "kubelet_version": "v1.36.2",
        "now": 1e4,
    }
    told = {"obstacles": {}} | ({"dra": state, "claims": claims} if state is not None else {})
    return tuple(check(Facts(Snapshot(), CLAIMS, agent=told, claims=ClaimFacts(**(plain | changes)))))


def containerd(version: str = "1.7.24", resolves: bool | None = False, **more: Any) -> ContainerRuntime:
    return ContainerRuntime("containerd", version, resolves, **more)


def direct(
    mlx5: str | None = "mlx5_ib",
    library: str = "/usr/lib64/libmlx5.so.1",
    knows: bool = True,
    acs: tuple[int | None, int | None] = (0b1111001, 0b0010101),
) -> Sequence[Result]:
    """Look at a host with Data Direct functions; `acs` is set towards a function, and towards its GPU."""
    edit = with_devices(lambda d: replace(d, driver=mlx5) if d.device == 0x2100 else d)
    ports = (
        SwitchPort("0008:02:00.0", "0008:03:00.0", TOWARDS_DATA_DIRECT, acs[0]),
        SwitchPort("0008:02:03.0", "0008:06:00.0", TOWARDS_GPU, acs[1]),
    )
    return found(data_direct, "gb300-4gpu", edit, data_direct=DataDirectFacts("6.8.0-64k", library, knows, ports))


ACS_OF_LINUX = 0b0011101
"""What the kernel sets by itself: everything goes up."""


ON_VARIANT = with_vfs(driver="mlx5_vfio_pci", iommu_group=7)
VARIANTS_MODULES = EVERYTHING - {"vfio_pci"} | {"mlx5_vfio_pci"}
CASES: dict[str, Callable[[], Sequence[Result]]] = {
    "a module is missing": lambda: found(modules, modules=EVERYTHING - {"rdma_ucm"}),
    "modules are not to be seen": lambda: found(modules, modules=None),
    "EFA knows no RDMA-CM": lambda: found(modules, "efa", having(rdma_cm=False), config=EFA),
    "VFs on a variant of vfio-pci": lambda: found(modules, edit=ON_VARIANT, modules=VARIANTS_MODULES),
    "vfio-pci is selected": lambda: found(modules, edit=ON_VARIANT, modules=VARIANTS_MODULES, config=DPDK),
    "RDMA devices belong to a namespace each": lambda: found(rdma_mode, edit=having(rdma_exclusive=True)),
    "... and VFs alone are offered": lambda: found(rdma_mode, edit=having(rdma_exclusive=True), config=VFS_ONLY),
    "RDMA devices are shared, and VFs alone offered": lambda: found(rdma_mode, config=VFS_ONLY),
    "rdma_cm is missing": lambda: found(rdma_mode, edit=having(rdma_cm=False)),
    "rdma_cm is missing beside EFA": lambda: found(rdma_mode, "efa", having(rdma_cm=False), config=EFA),
    "the IOMMU may translate": lambda: found(iommu, command_line=("intel_iommu=on",)),
    "vfio without an IOMMU": lambda: found(iommu, config=DPDK, has_iommu=False),
    "no VFs are made": lambda: found(vfs, edit=without_vfs),
    "no VFs can be made": lambda: found(vfs, "one-nic"),
    "VFs without a driver": lambda: found(vfs, edit=with_vfs(driver=None)),
    "a VF with a larger MTU": lambda: found(mtu, edit=with_netdevs("18:00.1", mtu=9500)),
    "a network with a larger MTU": lambda: found(mtu, config=LARGE),
    "an interface is selected by a counted name": lambda: found(
        names, "one-nic", with_netdevs("", name="eth0"), config=BY_NAME
    ),
    "an RDMA device is": lambda: found(names, "one-nic", with_netdevs("", name="eth0"), config=BY_RDMA),
    "none is": lambda: found(names, "one-nic", with_netdevs("", name="eth0")),
    "adapters without VFs are not offered": lambda: found(not_offered, edit=without_vfs, config=FOR_RDMA),
    "nothing is configured": lambda: found(not_offered, config=config("{}")),
    "DPDK": lambda: found(hugepages, config=DPDK),
    "DPDK without hugepages": lambda: found(hugepages, edit=without_hugepages, config=DPDK),
    "no hugepages, and no need of them": lambda: found(hugepages, edit=without_hugepages),
    "no GPUDirect": lambda: found(gpus, modules=EVERYTHING - {"nvidia_peermem"}),
    "GPUs without NVML": lambda: found(gpus, edit=having(gpus=())),
    "... that are not offered": lambda: found(gpus, edit=having(gpus=()), config=VFS_ONLY),
    "GPUs of another vendor": lambda: found(gpus, "mi300x-8gpu"),
    "a cloud that is known": lambda: found(gpus, "azure-nd-h100"),
    "a cloud that is not": lambda: found(gpus, "azure-nd-h100", having(places=Places())),
    "Data Direct": direct,
    "Data Direct functions without a driver": lambda: direct(None),
    "an old library": lambda: direct(knows=False),
    "no library": lambda: direct(library=""),
    "ACS as Linux sets it": lambda: direct(acs=(ACS_OF_LINUX, ACS_OF_LINUX)),
    "no ACS": lambda: direct(acs=(0, 0)),
    "ACS that only root may read": lambda: direct(acs=(None, 0b0010101)),
    "no Data Direct functions": lambda: found(data_direct),
    "no configuration": lambda: found(configuration, config=None),
    "no resources": lambda: found(configuration, config=Config()),
    "containerd 1.7 resolves no CDI names": lambda: found(cdi, runtime=containerd()),
    "k3s' containerd resolves none": lambda: found(cdi, runtime=containerd("v2.0.0", config_file="")),
    "... and late binding needs them": lambda: found(cdi, runtime=containerd(), config=LATE),
    "... and claims need them": lambda: found(cdi, runtime=containerd(), config=CLAIMS),
    "... and nothing needs them": lambda: found(cdi, runtime=containerd(), config=replace(ALL, cdi_names=False)),
    "containerd does not answer": lambda: found(cdi, runtime=containerd("", None, problem="/r did not answer in 2 s")),
    "containerd shows no configuration": lambda: found(cdi, runtime=containerd("1.7.1", None)),
    "no socket of the runtime": lambda: found(cdi, runtime=None, config=K3S),
    "CRI-O": lambda: found(cdi, runtime=ContainerRuntime("cri-o", "1.34.1", True)),
    "little memory may be locked": lambda: found(memlock, runtime=containerd(memlock_bytes=8 << 20)),
    "the runtime is not to be seen": lambda: found(memlock, runtime=None),
    "kubelet does not answer": lambda: found(kubelet, kubelet_sockets=(("/k", "refused"),)),
    "kubelet aligns nothing": lambda: found(kubelet, topology_policy="none"),
    "no CNI plugin": lambda: found(cni, plugins=frozenset({"host-local"})),
    "no IPAM plugin": lambda: found(cni, plugins=frozenset({"nodefabric"})),
    "no network": lambda: found(cni, networks=()),
    "a network that does not call the plugin": lambda: found(cni, networks=(NetworkFile("a", ("ptp",)),)),
    "Multus": lambda: found(cni, networks=(NetworkFile("00-multus.conf", ("multus",)),)),
    "the agent does not answer": lambda: found(agent, agent={"obstacles": {"agent": "nobody answers"}}),
    "the agent has a condition": lambda: found(agent, agent={"obstacles": {"cdi": "x"}}),
    "the agent is not asked": lambda: found(agent, agent={}),
    "the driver": lambda: of_claims(driver),
    "a folder of the driver's is missing": lambda: of_claims(
        driver, folders=(("/k/plugins_registry", "is not there"),)
    ),
    "a socket that an agent has left": lambda: of_claims(driver, sockets=((SOCKET, None), ("/r/old", "refused"))),
    "two agents": lambda: of_claims(driver, sockets=((SOCKET, None), ("/r/other", None))),
    "an old kubelet": lambda: of_claims(driver, kubelet_version="v1.31.4"),
    "an unregistered driver": lambda: of_claims(driver, NOT_FOUND),
    "... before 1.34": lambda: of_claims(driver, NOT_FOUND, kubelet_version="v1.33.0"),
    "... of an unknown kubelet": lambda: of_claims(driver, NOT_FOUND, kubelet_version=""),
    "the agent says nothing of the driver": lambda: of_claims(driver, None),
    "slices": lambda: of_claims(slices),
    "no devices for a resource": lambda: of_claims(slices, STATE | {"devices": DEVICES[1:]}),
    "slices that nobody knows": lambda: of_claims(slices, STATE | {"slices": None}),
    "the agent says nothing of slices": lambda: of_claims(slices, None),
    "claims": lambda: of_claims(held),
    "claims without a pod, or long on their way back": lambda: of_claims(held, claims=(LOST, LEAVING)),
    "... for a short time": lambda: of_claims(held, claims=(LOST, LEAVING), now=899.0),
}


def findings(case: str) -> str:
    """Return what is found in a case."""
    lines = [f"# {case}"]
    for each in CASES[case]():
        lines += [f"{each.severity.name.lower()}: {each.text}", *([f"    {each.remedy}"] if each.remedy else [])]
    return "\n".join(lines)


if __name__ == "__main__":
    FILE.write_text("\n\n".join(map(findings, CASES)) + "\n")
