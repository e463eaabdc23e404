"""The closed list of reasons why a device is not offered, each with what to do."""

from __future__ import annotations

from enum import StrEnum


class Why(StrEnum):
    """A word, which is the member itself, with its sentence and what to do. The nearest to being offered comes first.

    `{}` stands for what differs: a resource, keys of a selector, a kind, the word of an ill unit.
    """

    text: str
    remedy: str

    def __new__(cls, word: str, text: str, remedy: str) -> Why:
        member = str.__new__(cls, word)
        member._value_ = word
        member.text = text
        member.remedy = remedy
        return member

    UNHEALTHY = (
        "Unhealthy",
        "offered, and unhealthy: {}",
        "mend what the reason names (docs/health.md lists them)",
    )
    NOT_YET = "NotYet", "selected, and about to be listed", "wait a moment"
    NO_NIC = (
        "NoNic",
        "without a NIC for a rail",
        "select more NICs under nic.select, lower nic.count, or raise nic.shares of kind hca",
    )
    NO_GPU = (
        "NoGpu",
        "not needed by any GPU of the rails",
        "raise nic.count, or narrow nic.select and offer the rest by a resource of its own",
    )
    NO_GPU_HERE = (
        "NoGpuHere",
        "selected for rails, which need GPUs that NVML shows, and this node has none",
        "let the agent see libnvidia-ml.so.1 (nvidia.enabled of the chart), or take kind vf or nic with binding: late",
    )
    TOO_FEW = (
        "TooFew",
        "too few for the rail of another GPU",
        "lower nic.count, or select more NICs under nic.select",
    )
    SLICED = (
        "Sliced",
        "cut into slices (MIG) that another resource offers",
        "ask for the resource of the slices, or switch MIG off: nvidia-smi -mig 0",
    )
    TAKEN = (
        "Taken",
        "selected, but taken by {}",
        "narrow the selector of one of the two: a device serves one resource",
    )
    NO_VFS = "NoVfs", "selected, but without VFs", "take kind nic or hca, or create VFs (sriov_numvfs)"
    NO_SRIOV = (
        "NoSriov",
        "selected, but without SR-IOV, so it cannot have VFs",
        "take kind nic, or hca if it has an RDMA device; if the adapter knows SR-IOV, turn it on in firmware and BIOS",
    )
    HAS_VFS = (
        "HasVfs",
        "selected, but with VFs, so not free as a whole",
        "take kind vf or hca, or remove the VFs",
    )
    HOST_PORT = (
        "HostPort",
        "part of a bond, bridge or the like of the host",
        "nothing to do: the host needs it; kind hca can share an adapter that has an RDMA device",
    )
    DEFAULT_ROUTE = (
        "DefaultRoute",
        "needed by the host: its default route, or its way to the API server",
        "nothing to do, unless the host gets another way out, of a metric as low; kind hca can share one with RDMA",
    )
    PROTECTED = "Protected", "named by cni.protect", "take it out of cni.protect"
    NO_DRIVER = (
        "NoDriver",
        "without a driver",
        "echo ADDRESS > /sys/bus/pci/drivers_probe, or look in dmesg why the driver refuses it",
    )
    NO_RDMA = (
        "NoRdma",
        "without an RDMA device",
        "if it can do RDMA, load its module (mlx5_ib, irdma, bnxt_re …); else take kind vf or nic without isRdma",
    )
    IN_A_POD = "InAPod", "with its RDMA device in a pod", "wait until that pod ends, or take kind vf"
    NOT_IN_NVML = (
        "NotInNvml",
        "not shown by NVML, which kinds gpu and rail go by",
        "let the agent see libnvidia-ml.so.1 (nvidia.enabled of the chart); of another vendor: NICs with binding: late",
    )
    NOT_SELECTED = "NotSelected", "not selected by {}", "widen that selector, or add a resource for the rest"
    NOT_NETWORK = (
        "NotNetwork",
        "of a PCI class that is not a network controller's",
        "take kind hca if it has an RDMA device; VFs of other devices are not offered",
    )
    OTHER_KIND = "OtherKind", "no resource is of kind {}", "add one, if pods need it"
    NOT_HANDED_OUT = (
        "NotHandedOut",
        "not handed out by nodefabric: the GPU vendor's device plugin or DRA driver may do that",
        "nothing to do; or, for NVIDIA's, add a resource of kind gpu",
    )
