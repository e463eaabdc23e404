"""Which Data Direct function belongs to which PF."""

from __future__ import annotations

from agent.model.data_direct import pair_functions
from agent.model.device import Gpu, PciDevice, Snapshot
from agent.model.topology import Locality
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


def test_functions_are_paired_by_what_their_adapter_says() -> None:
    found = pair_functions(DEVICES, IDS | {STORAGE.address: ""})
    assert found.of == {"0000:03:00.0": "0009:05:00.0", "0002:03:00.0": "0008:05:00.0"}
    assert (found.unknown, found.unpaired) == (frozenset(), ())


def test_a_pf_that_was_not_read_is_not_known() -> None:
    found = pair_functions(DEVICES, IDS)
    assert found.unknown == {STORAGE.address}


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


def test_without_such_functions_nothing_is_asked() -> None:
    found = pair_functions((*PFS, STORAGE, *GPUS), {})
    assert (dict(found.of), found.unknown) == ({}, frozenset())


def test_a_pf_is_near_the_gpu_beside_its_function_and_stays_on_its_own_numa_node() -> None:
    shown = tuple(Gpu(gpu.address, number, None, gpu.address, "GB300", 0) for number, gpu in enumerate(GPUS))
    ids = IDS | {STORAGE.address: ""}
    near = Distances(Snapshot(devices=DEVICES, accelerators=shown, adapter_ids=tuple(sorted(ids.items()))))
    assert near.distance("0000:03:00.0", "0009:06:00.0") is Locality.PIX
    assert near.distance("0002:03:00.0", "0008:06:00.0") is Locality.PIX
    assert near.distance("0000:03:00.0", "0008:06:00.0") > Locality.PHB
    assert near.numa_node("0000:03:00.0") == 0


def test_a_pf_of_which_nothing_is_known_is_far_from_all_gpus_alike() -> None:
    shown = tuple(Gpu(gpu.address, number, None, gpu.address, "GB300", 0) for number, gpu in enumerate(GPUS))
    near = Distances(Snapshot(devices=DEVICES, accelerators=shown))
    assert {near.span(pf.address, gpu.address) for pf in PFS for gpu in GPUS} == {near.span("none", GPUS[0].address)}
