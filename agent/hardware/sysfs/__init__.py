"""What the kernel shows as files: PCI devices, interfaces, RDMA devices, NUMA nodes, counters."""
