"""The virtual machine as QEMU's arguments. Pure: two equal shapes give two equal machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rig.kernel import Kernel
from rig.tools import QEMU

MAX_VFS = 7
"""An igb adapter has so many (82576)."""
_NO_EXTRAS = "usb=off,vmport=off,smbus=off,hpet=off"


@dataclass(frozen=True)
class Shape:
    """What the machine is made of."""

    accel: str = "tcg"
    cpus: int = 1
    """More than one is up to four times slower under emulation: each TLB shoot-down costs more than a second
    processor brings."""
    memory_mib: int = 2048
    pfs: int = 2
    vfs: int = 0
    """VFs made on each adapter before the command."""
    numa_nodes: int = 0
    """Adapter i is on node i modulo this. 0: no NUMA at all."""
    iommu: bool = False
    verbose: bool = False
    kernel_parameters: tuple[str, ...] = ()
    qemu_arguments: tuple[str, ...] = ()


def arguments(shape: Shape, kernel: Kernel, initramfs: Path, run: str, shares: Sequence[str]) -> list[str]:
    """Make QEMU's command line. `run` is the folder of its sockets and of the share that the guest reads."""
    return [
        QEMU,
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *_processor(shape),
        *("-kernel", str(kernel.vmlinux), "-initrd", str(initramfs)),
        *_memory(shape),
        *_adapters(shape),
        *_channels(run),
        *_shares(run, shares),
        *shape.qemu_arguments,
        *("-append", " ".join(_kernel_parameters(shape))),
    ]


def _processor(shape: Shape) -> list[str]:
    if shape.accel == "kvm":
        machine = ["-machine", f"q35,accel=kvm,{_NO_EXTRAS}", "-cpu", "host"]
    else:
        machine = ["-machine", f"q35,{_NO_EXTRAS}", "-accel", "tcg,thread=multi,tb-size=512"]
        machine += ["-cpu", "max,la57=off"]
    # With interrupt remapping on, a restored snapshot hung.
    iommu = ["-device", "intel-iommu,intremap=off,caching-mode=on"] if shape.iommu else []
    return [*machine, "-smp", str(shape.cpus), *iommu]


def _memory(shape: Shape) -> list[str]:
    words = ["-m", f"{shape.memory_mib}M"]
    nodes = shape.numa_nodes
    if nodes > 1:
        for node in range(nodes):
            cpus = "".join(f",cpus={cpu}" for cpu in range(shape.cpus) if cpu % nodes == node)
            words += ["-object", f"memory-backend-ram,id=mem{node},size={shape.memory_mib // nodes}M"]
            words += ["-numa", f"node,nodeid={node}{cpus},memdev=mem{node}"]
    return words


def _adapters(shape: Shape) -> list[str]:
    """Each adapter has a root port of its own, and one switch joins all their cables.

    QEMU lists the host bridges for the firmware last first, so adapter 0 must come last to be the guest's eth0.
    """
    words: list[str] = []
    numa = shape.numa_nodes > 1
    for i in reversed(range(shape.pfs)) if numa else range(shape.pfs):
        bus = f"pxb{i}" if numa else "pcie.0"
        if numa:
            node = i % shape.numa_nodes
            words += ["-device", f"pxb-pcie,id={bus},bus=pcie.0,bus_nr={240 - 16 * (i + 1)},numa_node={node}"]
        words += ["-device", f"pcie-root-port,id=rp{i},bus={bus},chassis={i + 1},slot={i + 1}"]
        words += ["-netdev", f"hubport,id=net{i},hubid=0"]
        words += ["-device", f"igb,id=pf{i},bus=rp{i},netdev=net{i},mac=52:54:00:00:00:{i + 1:02x},romfile="]
    return words


def _channels(run: str) -> list[str]:
    """The command's output, the control channel, the console, and QEMU's own monitor."""
    words = ["-device", "virtio-rng-pci,bus=pcie.0", "-device", "virtio-serial-pci,bus=pcie.0"]
    for name in ("out", "ctl"):
        words += ["-chardev", f"socket,id={name},path={run}/{name},server=on,wait=off"]
        words += ["-device", f"virtserialport,chardev={name},name=vmrun.{name}"]
    words += ["-chardev", f"file,id=console,path={run}/console,append=on", "-serial", "chardev:console"]
    return [*words, "-qmp", f"unix:{run}/qmp,server=on,wait=off"]


def _shares(run: str, shares: Sequence[str]) -> list[str]:
    words = _share("root", "path=/", "readonly=on,multidevs=remap")
    words += _share("ctl", f"path={run}/share", "readonly=on")
    for i, folder in enumerate(shares):
        words += _share(f"share{i}", f"path={folder}", "multidevs=remap")
    return words


def _share(tag: str, path: str, options: str) -> list[str]:
    return [
        *("-fsdev", f"local,id=fs-{tag},{path},security_model=none,{options}"),
        *("-device", f"virtio-9p-pci,bus=pcie.0,fsdev=fs-{tag},mount_tag={tag}"),
    ]


def _kernel_parameters(shape: Shape) -> list[str]:
    words = ["console=ttyS0", "panic=-1", "nokaslr", "mitigations=off", "random.trust_cpu=on", "tsc=reliable"]
    words += ["no_timer_check", "apparmor=0", "audit=0", "net.ifnames=0", f"loglevel={7 if shape.verbose else 4}"]
    if shape.vfs:
        words.append(f"vmrun.vfs={shape.vfs}")
    if shape.iommu:
        # Without interrupt remapping vfio wants to be told that this is known.
        words += ["intel_iommu=on", "iommu=pt", "vfio_iommu_type1.allow_unsafe_interrupts=1"]
    return [*words, *shape.kernel_parameters]
