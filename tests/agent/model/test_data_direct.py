"""Which Data Direct function belongs to which PF."""

from __future__ import annotations

from dataclasses import replace

from agent.model.device import Gpu, NumaNode, PciDevice, Snapshot, pair_functions
from agent.model.locality import Locality
from agent.placement import Distances


def device(address: str, pci_class: int, product: int, *bridges: str, vendor: int = 0x15B3) -> PciDevice:
    path = (f"pci{address[:4]}:00", *bridges, address)
    return PciDevice(address, path, pci_class, vendor, product, None, int(address[:4], 16) // 0x10, None)


PFS = [device(f"{segment}:03:00.0", 0x020700, 0x1023, f"{segment}:00:00.0") for segment in ("0000", "0002")]
FUNCTIONS = [
    device(f"{segment}:05:00.0", 0x080100, 0x2100, f"{segment}:00:00.0", f"{segment}:01:00.0", f"{segment}:02:00.0")
    for segment in ("0009", "0008")
]
GPUS = [
    device(f"{segment}:06:00.0", 0x030200, 0x31C2, *FUNCTIONS[i].path[1:3], f"{segment}:02:03.0", vendor=0x10DE)
    for i, segment in enumerate(("0009", "0008"))
]
STORAGE = device("0010:01:00.0", 0x020000, 0xA2DC, "0010:00:00.0")
IDS = {"0000:03:00.0": "one", "0009:05:00.0": "one", "0002:03:00.0": "two", "0008:05:00.0": "two"}
DEVICES = (*PFS, *FUNCTIONS, STORAGE, *GPUS)
SHOWN = tuple(Gpu(gpu.address, number, None, gpu.address, "GB300", 0) for number, gpu in enumerate(GPUS))


def test_a_function_that_was_not_read_may_be_any_left_over_pf_s() -> None:
    ids = {address: adapter for address, adapter in IDS.items() if address != "0008:05:00.0"}
    found = pair_functions(DEVICES, ids | {STORAGE.address: ""})
    assert found.of == {"0000:03:00.0": "0009:05:00.0"}
    assert found.unknown == {"0002:03:00.0", STORAGE.address}
    assert found.unpaired == ("0008:05:00.0",)


def test_two_functions_of_one_adapter_are_not_chosen_between() -> None:
    found = pair_functions(DEVICES, dict.fromkeys(IDS, "one"))
    assert not found.of
    assert {"0000:03:00.0", "0002:03:00.0"} <= found.unknown


def test_of_a_pf_whose_function_is_not_known_only_the_numa_node_counts() -> None:
    near = Distances(Snapshot(devices=DEVICES, accelerators=SHOWN))
    assert {near.between(pf.address, gpu.address) for pf in PFS for gpu in GPUS} == {Locality.NODE}
    assert not any(near.is_known(gpu.address, pf.address) for pf in PFS for gpu in GPUS)


def test_a_pf_without_a_function_is_known_only_beside_others_of_another_model() -> None:
    lone = device("0012:03:00.0", 0x020700, 0x1023, "0012:00:00.0")
    found = pair_functions((*DEVICES, lone), IDS | {STORAGE.address: "three", lone.address: "four"})
    assert found.unknown == {lone.address}, "the other ConnectX-8 have one"


def test_a_pf_whose_function_is_gone_is_not_known_and_a_function_without_a_pf_may_be_of_any_left_over() -> None:
    without = tuple(d for d in DEVICES if d not in FUNCTIONS)
    assert pair_functions(without, IDS | {STORAGE.address: ""}).unknown == {pf.address for pf in PFS}
    stray = IDS | {FUNCTIONS[1].address: "another", STORAGE.address: ""}
    assert pair_functions(DEVICES, stray).unknown == {PFS[1].address, STORAGE.address}


def test_a_nic_that_is_not_known_is_nearest_to_nothing_and_hides_what_it_may_be_nearer_than() -> None:
    ids = {a: i for a, i in IDS.items() if a != "0002:03:00.0"} | {STORAGE.address: ""}
    near = Distances(Snapshot(devices=DEVICES, accelerators=SHOWN, adapter_ids=tuple(sorted(ids.items()))))
    nics = [pf.address for pf in PFS]
    assert near.nearest(GPUS[0].address, nics) == (nics[0],), "nothing is nearer than one switch"
    assert near.nearest(GPUS[1].address, nics) == ()
    assert near.nearest(nics[1], near.gpus) == ()
    assert near.is_known(nics[0], GPUS[1].address)
    assert near.is_known(nics[1], nics[0]), "towards other NICs a PF is where it is"


def test_a_gpu_of_which_only_the_numa_node_is_known_is_reached_through_the_function() -> None:
    shown = (Gpu(GPUS[0].address, 0, None, GPUS[0].address, "GB300", 0),)
    far = tuple(replace(d, numa_node=1) if d in FUNCTIONS else d for d in DEVICES)
    nodes = tuple(NumaNode(n, (), 0, distances=(10, 40) if n == 0 else (40, 10)) for n in (0, 1))
    ids = tuple(sorted((IDS | {STORAGE.address: ""}).items()))
    near = Distances(Snapshot(devices=far, accelerators=shown, numa_nodes=nodes, adapter_ids=ids))
    assert near.between("numa:1", "0000:03:00.0") is Locality.NODE
    assert near.between("numa:0", "0000:03:00.0") is Locality.SYS
