"""Names of slots: unlike each other's, short, and good for CDI."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from agent.config.resources import RESOURCE_NAME
from agent.model import slots
from agent.model.device import is_pci_address

# CDI's SPEC.md: what a device may be called.
CDI_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*[A-Za-z0-9]")
NAMES = st.from_regex(RESOURCE_NAME, fullmatch=True)
NUMA = st.integers(-1, 9999)
NUMBERS = st.integers(0, 99999)


def test_a_slot_says_its_resource_and_numa_node() -> None:
    assert slots.slot_id("rdma/vf", 1, 3) == "slot-rdma:vf-1-3"
    assert slots.slot_id("rdma/vf", -1, 0) == "slot-rdma:vf-any-0"
    assert slots.cdi_name("vf", "slot-rdma:vf-1-3") == "nodefabric.io/vf=slot-rdma:vf-1-3"


@given(NAMES, NUMA, NUMBERS)
def test_a_slots_name_is_short_and_tells_what_it_was_made_of(name: str, numa: int, number: int) -> None:
    slot = slots.slot_id(name, numa, number)
    assert len(slot) <= slots.MAX_SLOT_ID
    assert CDI_DEVICE.fullmatch(slot)
    assert slots.is_slot_id(slot)
    assert slots.is_slot_of(name, slot)
    assert (slots.numa_node_of(slot), slots.number_of(slot)) == (numa, number)
    assert not is_pci_address(slot)


@given(st.tuples(NAMES, NUMA, NUMBERS), st.tuples(NAMES, NUMA, NUMBERS))
def test_no_two_slots_of_a_node_have_one_name(a: tuple[str, int, int], b: tuple[str, int, int]) -> None:
    assert (slots.slot_id(*a) == slots.slot_id(*b)) is (a == b)
    assert slots.is_slot_of(a[0], slots.slot_id(*b)) is (a[0] == b[0])


def test_names_that_differ_late_or_in_their_dashes_are_different_slots() -> None:
    names = ["a/b-1", "a/b", "a-b/1", "x." * 20 + "y/" + "v" * 60, "x." * 20 + "y/" + "v" * 59 + "w"]
    assert len({slots.slot_id(name, 0, 1) for name in names}) == len(names)


def test_other_units_are_no_slots() -> None:
    for text in ("0000:3b:02.1", "GPU-0b1c", "hca-0c42a10300651234-3", "slot-", "slot-a:b-x-1", "slot-a:b-0-1 "):
        assert not slots.is_slot_id(text)
