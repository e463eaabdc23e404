"""Checks of kernel and hardware: modules, RDMA mode, IOMMU, VFs, MTU, names, rails, hugepages, GPUs,
Data Direct. Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from agent.config import Config
from agent.model.device import PciDevice, is_accelerator, is_vfio
from agent.model.printable import grouped, some
from agent.offer.explanation import cautions, strangers, template_problems
from agent.offer.left_out import left_out
from agent.offer.offer import Offer
from agent.offer.selection import Why
from agent.offer.units import plain_offer
from agent.report.chart import is_nic, why_not_known
from agent.report.doctor.facts import (
    REQUEST_REDIRECT,
    DataDirectFacts,
    Facts,
    Result,
    Severity,
    SwitchPort,
    error,
    fine,
    functions,
    note,
    unseen,
    warning,
)

MEANT = frozenset((Why.NOT_SELECTED, Why.OTHER_KIND, Why.NOT_HANDED_OUT, Why.TAKEN, Why.SLICED))
"""Reasons that a configuration gives on purpose."""
MELLANOX, NVIDIA = 0x15B3, 0x10DE
_KERNEL_NAME = re.compile(r"(?:eth|ib|wlan)\d+")
_COUNTED_RDMA_NAME = re.compile(r"(?:mlx[45]|hfi1|irdma|bnxt_re|qedr|rxe|siw|efa|hns)_?\d+")


def modules(facts: Facts) -> Iterator[Result]:
    """The modules that containers' RDMA and VFs need."""
    if facts.modules is None:
        yield unseen("neither /proc/modules nor /sys/module is to be seen")
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
    if any(d.cxi for d in facts.snapshot.devices):
        wanted["cxi_user"] = "Slingshot adapters have no /dev/cxiN without it"
    for driver in _vfio_drivers(facts):  # a variant of vfio-pci for single adapters does without it
        wanted[driver.replace("-", "_")] = "VFs for DPDK and virtual machines are bound to it"
    missing = [name for name in wanted if name not in facts.modules]
    for name in missing:
        yield error(
            f"the module {name} is not loaded: {wanted[name]}",
            f"modprobe {name}, and write {name} into /etc/modules-load.d/nodefabric.conf",
        )
    if not missing:
        loaded = ", ".join(wanted) or "nothing here needs any"
        yield fine(loaded)


def rdma_mode(facts: Facts) -> Iterator[Result]:
    """Whether RDMA devices are seen by all namespaces or belong to one."""
    snapshot = facts.snapshot
    if not any(device.rdma_devices for device in snapshot.devices):
        yield fine("there is no RDMA device")
        return
    if not snapshot.rdma_cm and _knows_rdma_cm(facts):
        yield error("/dev/infiniband/rdma_cm is missing, though there are RDMA devices", "modprobe rdma_ucm")
    mode = "exclusive" if snapshot.rdma_exclusive else "shared"
    if snapshot.rdma_exclusive and _offers(facts, "hca"):
        yield error(
            "RDMA devices belong to one network namespace each, so no HCA can be shared, and a resource of kind hca"
            " is configured",
            "rdma system set netns shared (options ib_core netns_mode=1 in /etc/modprobe.d), or offer VFs only",
        )
    elif not snapshot.rdma_exclusive and _offers(facts, "vf") and not _offers(facts, "hca"):
        yield note(
            "the mode is shared: every pod sees the names and counters of all RDMA devices, though it can use only"
            " its own",
            "rdma system set netns exclusive (options ib_core netns_mode=0 in /etc/modprobe.d), before any pod runs",
        )
    else:
        yield fine(f"{mode}, which suits the resources")


def iommu(facts: Facts) -> Iterator[Result]:
    """The IOMMU, which vfio needs and which slows GPUs' peer-to-peer traffic where it translates."""
    line = set(facts.command_line)
    ungrouped = [d.address for d in facts.snapshot.devices if d.is_for_vfio and d.iommu_group is None]
    if ungrouped or (_vfio_drivers(facts) and not facts.has_iommu):
        who = (
            f"{grouped(ungrouped, facts.snapshot)}: bound to vfio-pci, "
            if ungrouped
            else "a resource selects vfio-pci, "
        )
        yield error(
            f"{who}and the IOMMU is off",
            "switch on VT-d or AMD-Vi in the firmware, and boot with intel_iommu=on iommu=pt (AMD: iommu=pt)",
        )
    elif facts.has_iommu and facts.snapshot.all_gpus and "iommu=pt" not in line and "iommu.passthrough=1" not in line:
        yield note(
            "the IOMMU is on and may translate: GPUDirect traffic between GPU and NIC then takes the way over the"
            " root complex",
            "boot with iommu=pt",
        )
    else:
        yield fine("on" if facts.has_iommu else "off, and nothing needs it")


def vfs(facts: Facts) -> Iterator[Result]:
    """Whether there are VFs where a resource wants some, and whether they have drivers."""
    devices = facts.snapshot.devices
    pfs = sorted((d for d in devices if d.is_pf), key=lambda d: not d.rdma_devices)
    found = [d for d in devices if d.is_vf]
    if _offers(facts, "vf") and not found:
        if pfs:
            place = f"/sys/bus/pci/devices/{pfs[0].address}/sriov_numvfs"
            text = f"a resource of kind vf is configured, and none of {some([d.address for d in pfs])} has VFs"
            yield error(text, f"echo {min(8, pfs[0].sriov_totalvfs)} > {place}")
        else:
            yield error(
                "a resource of kind vf is configured, and no adapter can have VFs",
                "switch SR-IOV on in the firmware (ConnectX: mlxconfig -d ADDRESS set SRIOV_EN=1 NUM_OF_VFS=8)",
            )
        return
    bare = [d.address for d in found if d.driver is None]
    if bare:
        yield warning(
            f"no driver is bound to {grouped(bare, facts.snapshot)}",
            f"echo {bare[0]} > /sys/bus/pci/drivers_probe, or look why the driver refuses them: dmesg",
        )
    elif found:
        yield fine(f"{len(found)} on {len([d for d in pfs if d.vfs])} adapters, each driven")
    else:
        yield fine("none, and none wanted")


def mtu(facts: Facts) -> Iterator[Result]:
    """A VF takes no larger frames than its PF."""
    wrong = []
    for device in facts.snapshot.devices:
        pf = facts.snapshot.pf_netdev(device)
        own = device.netdev
        if device.is_vf and pf is not None and own is not None and own.mtu > pf.mtu:
            wrong.append(f"{own.name} has MTU {own.mtu}, its PF {pf.name} {pf.mtu}")
    if wrong:
        yield warning(
            f"{wrong[0]}" + (f", and {len(wrong) - 1} more alike" if wrong[1:] else ""),
            "set the MTU of the PF (ip link set PF mtu N) to that of the fabric, in the host's network configuration",
        )
    asked = _too_large_networks(facts)
    for text in asked:
        yield error(text, "raise the MTU of the PFs, or lower that of the network")
    if not wrong and not asked:
        yield fine("no VF and no network has a larger MTU than its PF")


def names(facts: Facts) -> Iterator[Result]:
    """Names that hardware order decides may be other ones after the next reboot."""
    config = facts.config
    adapters = [d for d in facts.snapshot.devices if is_nic(d)]
    counted = [n.name for d in adapters for n in d.netdevs if _KERNEL_NAME.fullmatch(n.name) and not n.is_representor]
    selects = [s for r in config.resources for s in (r.select, r.nic.select)] if config is not None else []
    by_netdev = {name for s in selects for name in (*s.netdevs, *(pf.pf for pf in s.pf))}
    by_rdma = sorted({name for s in selects for name in s.rdma_devices if _COUNTED_RDMA_NAME.fullmatch(name)})
    used = sorted(by_netdev & set(counted))
    if used:
        yield warning(
            f"a resource selects by {some(used)}, a name that the order of probing decides",
            "select by PCI address or by vendor, or give the interface a lasting name (systemd.link(5))",
        )
    if by_rdma:
        yield warning(
            f"a resource selects by {some(by_rdma)}, which is numbered in the order of probing",
            "select by PF or PCI address, or use rdma-core's rules for lasting names (60-rdma-persistent-naming.rules)",
        )
    if not used and not by_rdma:
        rest = f"{some(sorted(counted))}: named by the kernel, and nothing selects by it" if counted else "lasting ones"
        yield fine(rest)


def rails(facts: Facts) -> Iterator[Result]:
    """Which adapters are rails, and whether networks that go by rail find what they ask for."""
    config = facts.config or Config()
    named, offer = config.topology.rails, _offer(config, facts)
    for caution in cautions(config, offer):
        check = "rails" if caution.path.startswith("topology") else "config"
        yield warning(f"{caution.path}: {caution.text}", caution.remedy, check=check)
    for problem in template_problems(config, offer):
        yield error(problem, "correct the network: see nodefabric check-config")
    for network in config.networks:
        if strange := strangers(network, config, offer):
            asked = " and ".join(sorted(network.words))
            text = f"the network {network.name} goes by {asked}, which these adapters have not: {some(list(strange))}"
            yield warning(text, "list them under topology.rails, or select other devices")
    there = facts.snapshot.by_address
    away = {rail.key: " (away)" for rail in offer.rails if rail.device not in there}
    split = {rail.number for rail in offer.rails if rail.plane}
    number = {rail.key: f"{rail.number}.{rail.plane}" if rail.number in split else rail.number for rail in offer.rails}
    told = [f"{number[rail.key]} {rail.netdev or rail.device}{away.get(rail.key, '')}" for rail in offer.rails]
    numbers = ", ".join(told)
    as_of = "" if named or not facts.rails_unknown else f", as of a first start ({facts.rails_unknown})"
    yield fine(f"{numbers}{as_of}" if numbers else "no adapter here has an RDMA device")


def not_offered(facts: Facts) -> Iterator[Result]:
    """Each adapter, VF and accelerator that no resource offers has a reason; many with one reason are one finding."""
    config = facts.config
    if config is None or not config.resources:
        yield fine("there is no resource that could offer anything")
        return
    found = left_out(config.resources, _offer(config, facts))
    for each in found:
        meant = each.why in MEANT
        told = f"{each.what}{f', by {each.resource}' if each.resource else ''}: {each.text}"
        yield Result(Severity.FINE if meant else Severity.NOTE, told, "" if meant else each.why.remedy)
    if not found:
        yield fine("nothing: every adapter, VF and accelerator is in a resource")


def hugepages(facts: Facts) -> Iterator[Result]:
    """DPDK programs take their memory from hugepages, of the NUMA node of their VF."""
    drivers = [d for d in facts.snapshot.devices if d.is_for_programs and is_network(d)]
    if not drivers and not _vfio_drivers(facts):
        yield fine("nothing here is driven by programs")
        return
    wanted = {d.numa_node for d in drivers}
    bare = [n.number for n in facts.snapshot.numa_nodes if n.number in wanted and not any(c for _, c in n.hugepages)]
    none_at_all = not any(count for n in facts.snapshot.numa_nodes for _, count in n.hugepages)
    if bare or none_at_all:
        where = f"NUMA node {', '.join(map(str, bare))} has" if bare else "this node has"
        yield warning(
            f"{where} no hugepages, and DPDK programs need some beside their VF",
            "boot with default_hugepagesz=1G hugepagesz=1G hugepages=N, and restart kubelet so that it counts them",
        )
    else:
        yield fine("there are some beside each VF that programs drive")


def gpus(facts: Facts) -> Iterator[Result]:
    """GPUs of NVIDIA's that the PCI bus shows, their library must show too; how near NICs are should be known."""
    shown = {gpu.pci_address for gpu in facts.snapshot.gpus}
    on_bus = [d for d in facts.snapshot.devices if is_accelerator(d)]
    nvidias = [d for d in on_bus if d.vendor == NVIDIA and d.driver in (None, "nvidia")]
    silent = [d.address for d in nvidias if d.address not in shown]
    if silent and (_offers(facts, "gpu") or _offers(facts, "rail")):
        yield error(
            f"the NVIDIA library does not show {some(silent)}",
            "load the driver (nvidia-smi must list them), and let the agent see libnvidia-ml.so.1",
        )
    elif silent:
        text = f"the NVIDIA library does not show {some(silent)}: pods' GPUs are not known by UUID, only by address"
        yield note(text, "let the agent see libnvidia-ml.so.1, if pods use these GPUs")
    else:
        yield fine(_gpus_in_words(len(shown), on_bus, shown))
    if unknown := why_not_known(facts.snapshot):
        yield warning(*unknown)
    has_rdma = any(device.rdma_devices for device in facts.snapshot.devices)
    if shown and has_rdma and facts.modules is not None and not facts.modules & {"nvidia_peermem", "nv_peer_mem"}:
        yield note(
            "nvidia_peermem is not loaded: GPUDirect RDMA then works only by dma-buf (open kernel modules, recent"
            " libraries)",
            "modprobe nvidia_peermem, unless all programs use dma-buf",
        )


def _gpus_in_words(answering: int, on_bus: Sequence[PciDevice], shown: Collection[str]) -> str:
    others = Counter(d.driver or "no driver" for d in on_bus if d.address not in shown)
    told = [f"{answering} GPUs answer"] if answering else []
    told += [f"{count} known by sysfs ({driver})" for driver, count in sorted(others.items())]
    return ", ".join(told) or "none"


def is_network(device: PciDevice) -> bool:
    """Return whether a device is an adapter or a VF of one."""
    return is_nic(device) or device.is_vf


def _too_large_networks(facts: Facts) -> list[str]:
    config = facts.config
    if config is None:
        return []
    smallest = min((n.mtu for d in facts.snapshot.devices if d.vfs and (n := d.netdev) is not None), default=None)
    used = {name for each in config.resources if each.kind in ("vf", "rail") for name in each.networks.values()}
    return [
        f"the network {network.name} asks for MTU {asked}, and a PF with VFs has {smallest}"
        for network in config.networks
        if network.name in used
        and (asked := network.setup.mtu) is not None
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
    """Return whether the RDMA-CM can do anything with one of the RDMA devices: it knows no EFA, of no type."""
    return any(rdma.node_type != "unspecified" for device in facts.snapshot.devices for rdma in device.rdma_devices)


def _offer(config: Config, facts: Facts) -> Offer:
    named = config.topology.rails
    return plain_offer(config.resources, facts.snapshot, named_rails=named, known_rails=facts.rails)


def _offers(facts: Facts, kind: str) -> bool:
    """Return whether a resource of a kind is configured, a rail's NIC included."""
    resources = facts.config.resources if facts.config is not None else ()
    return any(r.kind == kind or (r.kind == "rail" and r.nic.kind == kind) for r in resources)


# -------------------------------------------------------------- Data Direct


def data_direct(facts: Facts) -> Iterator[Result]:
    """Whether traffic between GPUs and adapters takes the way of the Data Direct functions, where there are such."""
    known = facts.data_direct
    if known is None:
        return
    problems = [*_driver(facts, known), *_library(known), *_acs(known.ports)]
    yield from problems
    if not problems:
        count = len(functions(facts.snapshot))
        ready = "kernel, libmlx5 and ACS let GPUs' traffic through" if known.ports else "kernel and libmlx5 know them"
        yield fine(f"{count} functions; {ready}")


def _driver(facts: Facts, known: DataDirectFacts) -> Iterator[Result]:
    lacking = [d.address for d in functions(facts.snapshot) if d.driver is None or d.is_for_programs]
    if lacking:
        yield warning(
            f"{', '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} no kernel driver: GPUs' traffic then goes"
            " over the processor, with about half the bandwidth",
            f"modprobe mlx5_ib; if it is loaded, this kernel ({known.kernel or 'unknown'}) is too old: take Linux 6.12"
            " or later, or the driver of DOCA",
        )


def _library(known: DataDirectFacts) -> Iterator[Result]:
    if not known.library:
        text = "the host has no libmlx5.so.1 to look at: what counts is the one in each container image"
        yield unseen(text, "build images with rdma-core 54 or later")
    elif not known.library_knows:
        yield warning(
            f"{known.library} does not know Data Direct: NCCL and UCX then silently use the slower path",
            "install rdma-core 54 or later, on the host and in container images",
        )


def _acs(ports: Sequence[SwitchPort]) -> Iterator[Result]:
    """Redirected requests or completions go up to the processor and back down again."""
    seen = [(port, port.control) for port in ports if port.control is not None]
    wrong = [(port, port.rule.off) for port, control in seen if control & port.rule.off]
    unsafe = [(p, c) for p, c in seen if not c & p.rule.off and c & p.rule.on != p.rule.on]
    wanted = ";".join(f"{port.rule.words}@{port.address}" for port in ports)
    remedy = f"boot with pci=config_acs={wanted} (Linux 6.11 or later; rdma_topo write-grub-acs writes it)"
    if len(seen) < len(ports):
        hidden = ", ".join(port.address for port in ports if port.control is None)
        yield unseen(f"the ACS settings of {hidden} cannot be read", "run doctor as root on the host")
    if wrong:
        told = (
            f"{port.address} redirects {'requests' if bit == REQUEST_REDIRECT else 'completions'} ({port.towards} is"
            " below it)"
            for port, bit in wrong
        )
        yield warning(f"ACS sends GPUs' traffic up to the processor: {', '.join(told)}", remedy)
    if unsafe:
        told = (f"{port.address} ({control:07b}, not {port.rule.words})" for port, control in unsafe)
        text = "ACS is not set as rdma-core's rdma_topo asks, so functions are less isolated:"
        yield note(f"{text} {', '.join(told)}", remedy)
