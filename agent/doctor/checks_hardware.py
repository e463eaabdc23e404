"""Checks of kernel and hardware: modules, RDMA mode, IOMMU, VFs, MTU, names, hugepages, GPUs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from agent.chart.tree import is_gpu, is_nic
from agent.doctor.facts import Facts
from agent.doctor.findings import Finding, Severity
from agent.model.device import PciDevice, is_vfio

MOST_NAMED = 4
MELLANOX = 0x15B3
_KERNEL_NAME = re.compile(r"(?:eth|ib|wlan)\d+")
_COUNTED_RDMA_NAME = re.compile(r"(?:mlx[45]|hfi1|irdma|bnxt_re|qedr|rxe|siw|efa|hns)_?\d+")


def modules(facts: Facts) -> Iterator[Finding]:
    """The modules that containers' RDMA and VFs need."""
    if facts.modules is None:
        yield Finding("modules", Severity.UNSEEN, "neither /proc/modules nor /sys/module is to be seen")
        return
    has_rdma = any(device.rdma_devices for device in facts.snapshot.devices)
    wanted = {}
    mellanox = [d for d in facts.snapshot.devices if d.vendor == MELLANOX and not d.is_for_programs]
    if has_rdma or mellanox or _offers(facts, "hca"):
        wanted["ib_uverbs"] = "containers get no uverbs device without it"
    if _knows_rdma_cm(facts) or mellanox or (_offers(facts, "hca") and not has_rdma):
        wanted["rdma_ucm"] = "RDMA-CM does not work without it"
    if any(d.driver == "mlx5_core" for d in mellanox):
        wanted["mlx5_ib"] = "ConnectX adapters have no RDMA device without it"
    for driver in _vfio_drivers(facts):  # a variant of vfio-pci for single adapters does without it
        wanted[driver.replace("-", "_")] = "VFs for DPDK and virtual machines are bound to it"
    missing = [name for name in wanted if name not in facts.modules]
    for name in missing:
        yield Finding(
            *("modules", Severity.ERROR, f"the module {name} is not loaded: {wanted[name]}"),
            f"modprobe {name}, and write {name} into /etc/modules-load.d/nodefabric.conf",
        )
    if not missing:
        loaded = ", ".join(wanted) or "nothing here needs any"
        yield Finding("modules", Severity.FINE, loaded)


def rdma_mode(facts: Facts) -> Iterator[Finding]:
    """Whether RDMA devices are seen by all namespaces or belong to one."""
    snapshot = facts.snapshot
    if not any(device.rdma_devices for device in snapshot.devices):
        yield Finding("rdma-mode", Severity.FINE, "there is no RDMA device")
        return
    if not snapshot.rdma_cm and _knows_rdma_cm(facts):
        yield Finding(
            *("rdma-mode", Severity.ERROR, "/dev/infiniband/rdma_cm is missing, though there are RDMA devices"),
            "modprobe rdma_ucm",
        )
    mode = "exclusive" if snapshot.rdma_exclusive else "shared"
    if snapshot.rdma_exclusive and _offers(facts, "hca"):
        yield Finding(
            "rdma-mode",
            Severity.ERROR,
            "RDMA devices belong to one network namespace each, so no HCA can be shared, and a resource of kind hca"
            " is configured",
            "rdma system set netns shared (options ib_core netns_mode=1 in /etc/modprobe.d), or offer VFs only",
        )
    elif not snapshot.rdma_exclusive and _offers(facts, "vf") and not _offers(facts, "hca"):
        yield Finding(
            "rdma-mode",
            Severity.NOTE,
            "the mode is shared: every pod sees the names and counters of all RDMA devices, though it can use only"
            " its own",
            "rdma system set netns exclusive (options ib_core netns_mode=0 in /etc/modprobe.d), before any pod runs",
        )
    else:
        yield Finding("rdma-mode", Severity.FINE, f"{mode}, which suits the resources")


def iommu(facts: Facts) -> Iterator[Finding]:
    """The IOMMU, which vfio needs and which slows GPUs' peer-to-peer traffic where it translates."""
    line = set(facts.command_line)
    ungrouped = [d.address for d in facts.snapshot.devices if d.is_for_vfio and d.iommu_group is None]
    if ungrouped or (_vfio_drivers(facts) and not facts.has_iommu):
        who = f"{_some(ungrouped)}: bound to vfio-pci, " if ungrouped else "a resource selects vfio-pci, "
        yield Finding(
            *("iommu", Severity.ERROR, f"{who}and the IOMMU is off"),
            "switch on VT-d or AMD-Vi in the firmware, and boot with intel_iommu=on iommu=pt (AMD: iommu=pt)",
        )
    elif facts.has_iommu and facts.snapshot.gpus and "iommu=pt" not in line and "iommu.passthrough=1" not in line:
        yield Finding(
            "iommu",
            Severity.NOTE,
            "the IOMMU is on and may translate: GPUDirect traffic between GPU and NIC then takes the way over the"
            " root complex",
            "boot with iommu=pt",
        )
    else:
        yield Finding("iommu", Severity.FINE, "on" if facts.has_iommu else "off, and nothing needs it")


def vfs(facts: Facts) -> Iterator[Finding]:
    """Whether there are VFs where a resource wants some, and whether they have drivers."""
    devices = facts.snapshot.devices
    pfs = sorted((d for d in devices if d.is_pf), key=lambda d: not d.rdma_devices)
    found = [d for d in devices if d.is_vf]
    if _offers(facts, "vf") and not found:
        if pfs:
            place = f"/sys/bus/pci/devices/{pfs[0].address}/sriov_numvfs"
            text = f"a resource of kind vf is configured, and none of {_some([d.address for d in pfs])} has VFs"
            yield Finding("vfs", Severity.ERROR, text, f"echo {min(8, pfs[0].sriov_totalvfs)} > {place}")
        else:
            yield Finding(
                *("vfs", Severity.ERROR, "a resource of kind vf is configured, and no adapter can have VFs"),
                "switch SR-IOV on in the firmware (ConnectX: mlxconfig -d ADDRESS set SRIOV_EN=1 NUM_OF_VFS=8)",
            )
        return
    bare = [d.address for d in found if d.driver is None]
    if bare:
        yield Finding(
            *("vfs", Severity.WARNING, f"no driver is bound to {_some(bare)}"),
            f"echo {bare[0]} > /sys/bus/pci/drivers_probe, or look why the driver refuses them: dmesg",
        )
    elif found:
        yield Finding("vfs", Severity.FINE, f"{len(found)} on {len([d for d in pfs if d.vfs])} adapters, each driven")
    else:
        yield Finding("vfs", Severity.FINE, "none, and none wanted")


def mtu(facts: Facts) -> Iterator[Finding]:
    """A VF takes no larger frames than its PF."""
    wrong = []
    for device in facts.snapshot.devices:
        pf = facts.snapshot.pf_netdev(device)
        own = device.netdev
        if device.is_vf and pf is not None and own is not None and own.mtu > pf.mtu:
            wrong.append(f"{own.name} has MTU {own.mtu}, its PF {pf.name} {pf.mtu}")
    if wrong:
        yield Finding(
            *("mtu", Severity.WARNING, f"{wrong[0]}" + (f", and {len(wrong) - 1} more alike" if wrong[1:] else "")),
            "set the MTU of the PF (ip link set PF mtu N) to that of the fabric, in the host's network configuration",
        )
    asked = _too_large_networks(facts)
    for text in asked:
        yield Finding("mtu", Severity.ERROR, text, "raise the MTU of the PFs, or lower that of the network")
    if not wrong and not asked:
        yield Finding("mtu", Severity.FINE, "no VF and no network has a larger MTU than its PF")


def names(facts: Facts) -> Iterator[Finding]:
    """Names that hardware order decides may be other ones after the next reboot."""
    config = facts.config
    adapters = [d for d in facts.snapshot.devices if is_nic(d)]
    counted = [n.name for d in adapters for n in d.netdevs if _KERNEL_NAME.fullmatch(n.name) and not n.is_representor]
    selects = [s for r in config.resources for s in (r.select, r.nic.select)] if config is not None else []
    by_netdev = {name for s in selects for name in (*s.netdevs, *(pf.pf for pf in s.pf))}
    by_rdma = sorted({name for s in selects for name in s.rdma_devices if _COUNTED_RDMA_NAME.fullmatch(name)})
    used = sorted(by_netdev & set(counted))
    if used:
        yield Finding(
            *(
                "names",
                Severity.WARNING,
                f"a resource selects by {_some(used)}, a name that the order of probing decides",
            ),
            "select by PCI address or by vendor, or give the interface a lasting name (systemd.link(5))",
        )
    if by_rdma:
        yield Finding(
            "names",
            Severity.WARNING,
            f"a resource selects by {_some(by_rdma)}, which is numbered in the order of probing",
            "select by PF or PCI address, or use rdma-core's rules for lasting names (60-rdma-persistent-naming.rules)",
        )
    if not used and not by_rdma:
        rest = (
            f"{_some(sorted(counted))}: named by the kernel, and nothing selects by it" if counted else "lasting ones"
        )
        yield Finding("names", Severity.FINE, rest)


def hugepages(facts: Facts) -> Iterator[Finding]:
    """DPDK programs take their memory from hugepages, of the NUMA node of their VF."""
    drivers = [d for d in facts.snapshot.devices if d.is_for_programs and is_network(d)]
    if not drivers and not _vfio_drivers(facts):
        yield Finding("hugepages", Severity.FINE, "nothing here is driven by programs")
        return
    wanted = {d.numa_node for d in drivers}
    bare = [n.number for n in facts.snapshot.numa_nodes if n.number in wanted and not any(c for _, c in n.hugepages)]
    none_at_all = not any(count for n in facts.snapshot.numa_nodes for _, count in n.hugepages)
    if bare or none_at_all:
        where = f"NUMA node {', '.join(map(str, bare))} has" if bare else "this node has"
        yield Finding(
            *("hugepages", Severity.WARNING, f"{where} no hugepages, and DPDK programs need some beside their VF"),
            "boot with default_hugepagesz=1G hugepagesz=1G hugepages=N, and restart kubelet so that it counts them",
        )
    else:
        yield Finding("hugepages", Severity.FINE, "there are some beside each VF that programs drive")


def gpus(facts: Facts) -> Iterator[Finding]:
    """GPUs that the PCI bus shows, the NVIDIA library must show too."""
    shown = {gpu.pci_address for gpu in facts.snapshot.gpus}
    on_bus = [d for d in facts.snapshot.devices if is_gpu(d)]
    silent = [d.address for d in on_bus if d.address not in shown and d.driver in (None, "nvidia")]
    if silent and (_offers(facts, "gpu") or _offers(facts, "rail")):
        yield Finding(
            *("gpus", Severity.ERROR, f"the NVIDIA library does not show {_some(silent)}"),
            "load the driver (nvidia-smi must list them), and let the agent see libnvidia-ml.so.1",
        )
    elif silent:
        text = f"the NVIDIA library does not show {_some(silent)}: VFs are placed without regard to them"
        yield Finding("gpus", Severity.NOTE, text, "let the agent see libnvidia-ml.so.1, if pods use these GPUs")
    else:
        yield Finding("gpus", Severity.FINE, f"{len(shown)} GPUs answer" if shown else "none")
    has_rdma = any(device.rdma_devices for device in facts.snapshot.devices)
    if shown and has_rdma and facts.modules is not None and not facts.modules & {"nvidia_peermem", "nv_peer_mem"}:
        yield Finding(
            "gpus",
            Severity.NOTE,
            "nvidia_peermem is not loaded: GPUDirect RDMA then works only by dma-buf (open kernel modules, recent"
            " libraries)",
            "modprobe nvidia_peermem, unless all programs use dma-buf",
        )


def is_network(device: PciDevice) -> bool:
    """Tell whether a device is an adapter or a VF of one."""
    return is_nic(device) or device.is_vf


def _too_large_networks(facts: Facts) -> list[str]:
    config = facts.config
    if config is None:
        return []
    smallest = min((n.mtu for d in facts.snapshot.devices if d.vfs and (n := d.netdev) is not None), default=None)
    used = {resource.network for resource in config.resources if resource.kind in ("vf", "rail")}
    return [
        f"the network {network.name} asks for MTU {asked}, and a PF with VFs has {smallest}"
        for network in config.networks
        if network.name in used
        and isinstance(asked := network.netconf.get("mtu"), int)
        and smallest is not None
        and asked > smallest
    ]


def _vfio_drivers(facts: Facts) -> list[str]:
    """Name vfio-pci and its variants, as far as adapters are bound to them or resources select them."""
    bound = {d.driver for d in facts.snapshot.devices if is_network(d)}
    resources = facts.config.resources if facts.config is not None else ()
    selected = {driver for resource in resources for driver in resource.select.drivers}
    return sorted(driver for driver in bound | selected if driver is not None and is_vfio(driver))


def _knows_rdma_cm(facts: Facts) -> bool:
    """Tell whether the RDMA-CM can do anything with one of the RDMA devices: it knows no EFA, of no type."""
    return any(rdma.node_type != "unspecified" for device in facts.snapshot.devices for rdma in device.rdma_devices)


def _offers(facts: Facts, kind: str) -> bool:
    """Tell whether a resource of a kind is configured, a rail's NIC included."""
    resources = facts.config.resources if facts.config is not None else ()
    return any(r.kind == kind or (r.kind == "rail" and r.nic.kind == kind) for r in resources)


def _some(found: list[str]) -> str:
    rest = len(found) - MOST_NAMED
    return ", ".join(found[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
