"""IDs of units: those of slots are unlike each other's, short, and good for CDI, and each kind is known from others."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.resources import RESOURCE_NAME
from agent.model.device import is_pci_address
from agent.model.unit_id import MAX_UNIT_ID, UnitId, UnitKind, cdi_name, rail_id, replica_id, slot_id

# CDI's SPEC.md: what a device may be called.
CDI_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*[A-Za-z0-9]")
NAMES = st.from_regex(RESOURCE_NAME, fullmatch=True)
NUMA = st.integers(-1, 9999)
NUMBERS = st.integers(0, 99999)


def test_a_slot_says_its_resource_and_numa_node() -> None:
    assert slot_id("rdma/vf", 1, 3) == "slot-rdma:vf-1-3"
    assert slot_id("rdma/vf", -1, 0) == "slot-rdma:vf-any-0"
    assert cdi_name("vf", "slot-rdma:vf-1-3") == "nodefabric.io/vf=slot-rdma:vf-1-3"


@given(NAMES, NAMES, NUMA, NUMBERS)
def test_a_slots_name_is_short_and_tells_what_it_was_made_of(name: str, another: str, numa: int, number: int) -> None:
    slot = slot_id(name, numa, number)
    assert len(slot) <= MAX_UNIT_ID
    assert CDI_DEVICE.fullmatch(slot)
    assert UnitId.parse(slot).is_slot
    assert UnitId.parse(slot).is_slot_of(name)
    assert UnitId.parse(slot).is_slot_of(another) is (another == name)
    assert (UnitId.parse(slot).numa_node, UnitId.parse(slot).number) == (numa, number)
    assert not is_pci_address(slot)


@pytest.mark.parametrize(
    ("text", "kind", "device", "number"),
    [
        ("0000:3b:02.1", UnitKind.DEVICE, "0000:3b:02.1", 0),
        ("hca-0c42a10300651234-7", UnitKind.SHARE, "0c42a10300651234", 7),
        ("hca-0000:3b:00.0-1-62", UnitKind.SHARE, "0000:3b:00.0-1", 62),
        ("slot-rdma:vf-any-4", UnitKind.SLOT, "", 4),
        ("GPU-5c3a9f60", UnitKind.GPU, "GPU-5c3a9f60", 0),
        (replica_id("MIG-5c3a9f60", 3), UnitKind.GPU, "MIG-5c3a9f60", 3),
        (rail_id("GPU-5c3a9f60"), UnitKind.RAIL, "GPU-5c3a9f60", 0),
        ("17", UnitKind.OTHER, "17", 0),
        *((text, UnitKind.OTHER, text, 0) for text in ("", "hca-17", "hca-mlx5_0-1", "hca-0c42a10300651234-0\n")),
        *((text, UnitKind.OTHER, text, 0) for text in ("slot-", "slot-a:b-x-1", "slot-a:b-0-1 ")),
        ("3::1", UnitKind.OTHER, "3", 0),
    ],
)
def test_an_id_tells_its_kind_its_device_and_its_number(text: str, kind: UnitKind, device: str, number: int) -> None:
    unit = UnitId.parse(text)
    assert (unit.text, unit.kind, unit.device, unit.number) == (text, kind, device, number)
