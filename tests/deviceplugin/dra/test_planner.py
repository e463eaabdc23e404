"""Devices that are chosen in Prepare: near to the pod's GPUs, whoever gave them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.config import parse
from agent.errors import AgentError, NotYet, Unavailable
from agent.kubelet.podresources import ClaimedDevice, ContainerDevices, PodDevices
from agent.model.allocation import ClaimRef, ClaimState, PodRef
from agent.model.health import HEALTHY
from agent.offer.offer import Unit
from agent.placement import Distances
from deviceplugin.dra.allocated_claim import ours
from deviceplugin.dra.planner import LateWish, choose_late
from deviceplugin.dra.pods import (
    MOST_READ,
    NO_GPUS,
    Allocations,
    GpuAsker,
    claim_names,
    container_names,
    container_of,
    named_gpus,
    names_all_of,
)
from tests.deviceplugin.dra.claim_documents import DRIVER, NODE, POD, REF, claim, result
from tests.deviceplugin.dra.preparing import LATE, Desk, Desks
from tests.deviceplugin.dra.test_allocated_claim import JSON
from tests.node import gpu_uuid, node

PFS = tuple(d.address for d in node().devices if d.vfs)
OTHER = ClaimRef("11111111-2222-4333-8444-555555555555", "team", "gpus")
NVIDIA = "gpu.nvidia.com"
WITH_SELECTOR = {"requests": [{"name": "nic", "exactly": {"selectors": [{"cel": {"expression": "true"}}]}}]}


@pytest.fixture
def desk(desks: Desks) -> Desk:
    return desks(LATE)


def rails(desk: Desk, uid: str = REF.uid) -> list[int]:
    """Behind which adapters the devices of a claim are, in the order of its results."""
    found = desk.ledger.claim(uid)
    assert found is not None
    snapshot = desk.offer.snapshot
    return [PFS.index(snapshot.by_address[row.device].physfn or "") for row in found.devices]


def prepare(desk: Desk, *results: Any, **more: Any) -> list[int]:
    desk.preparer.prepare(desk.claimed(REF, claim(*results, **more)))
    return rails(desk)


def gpu_of_driver(device: str, request: str = "gpu") -> dict[str, Any]:
    return {"request": request, "driver": NVIDIA, "pool": NODE, "device": device}


def nvidia(attribute: str = "uuid", **devices: Any) -> list[dict[str, Any]]:
    """Slices of NVIDIA's driver: device → what it says of itself."""
    listed = [{"name": name, "attributes": {attribute: {"string": text}}} for name, text in devices.items()]
    return [{"spec": {"driver": NVIDIA, "pool": {"name": NODE}, "devices": listed}}]


def test_each_container_is_near_to_its_own_gpu(desk: Desk) -> None:
    desk.others.held[POD.name] = {
        "first": {"nvidia.com/gpu": [gpu_uuid(3)]},
        "second": {"nvidia.com/gpu": [gpu_uuid(1)]},
    }
    desk.others.pods[POD.name] = {
        "spec": {"initContainers": [{"name": "init"}], "containers": [{"name": "first"}, {"name": "second"}]}
    }
    results = result("container-2-request-0", "slots-0"), result("container-1-request-0", "slots-1")

    assert prepare(desk, *results, owner=POD, extended=True) == [1, 3]


@pytest.mark.parametrize("attribute", ["uuid", "resource.kubernetes.io/pciBusID"])
def test_a_gpu_of_another_driver_in_the_same_claim_is_found_by_uuid_or_address(desk: Desk, attribute: str) -> None:
    gpus = {f"gpu-{n}": desk.offer.snapshot.gpus[n] for n in (2, 0)}
    named = {name: gpu.uuid if attribute == "uuid" else gpu.pci_address for name, gpu in gpus.items()}
    desk.others.of_drivers[NVIDIA] = nvidia(attribute, **named)

    assert prepare(desk, gpu_of_driver("gpu-2"), result("nic", "slots-0")) == [2]


def test_the_pods_other_claims_are_read_only_if_no_gpu_was_found(desk: Desk) -> None:
    desk.others.of_drivers[NVIDIA] = nvidia(**{"gpu-2": gpu_uuid(2)})
    desk.others.pods[POD.name] = {
        "spec": {"resourceClaims": [{"name": "g", "resourceClaimTemplateName": "t"}, {"name": "n"}]},
        "status": {"resourceClaimStatuses": [{"name": "g", "resourceClaimName": OTHER.name}]},
    }
    desk.claimed(OTHER, claim(gpu_of_driver("gpu-2"), ref=OTHER))
    assert prepare(desk, result("nic", "slots-0")) == [2]

    desk.preparer.unprepare(REF)
    desk.others.held[POD.name] = {"main": {"nvidia.com/gpu": [gpu_uuid(1)]}}
    desk.others.asked.clear()
    assert prepare(desk, result("nic", "slots-0")) == [1]
    assert desk.others.asked == [f"claim {REF}"]


def test_a_request_that_selects_stays_in_its_place_whatever_gpu_the_pod_has(desk: Desk) -> None:
    desk.others.held[POD.name] = {"main": {"nvidia.com/gpu": [gpu_uuid(3)]}}

    assert prepare(desk, result("nic", "slots-1"), devices=WITH_SELECTOR) == [1]


def test_a_place_that_is_used_up_is_left_only_by_requests_that_do_not_select(desk: Desk) -> None:
    for number in range(4):
        ref = ClaimRef(f"{number}1111111-2222-4333-8444-555555555555", "team", f"c-{number}")
        pod = PodRef("team", ref.name, f"p-{number}")
        desk.claimed(ref, claim(result("nic", "slots-1", shareID=f"s-{number}"), ref=ref, pods=[pod]))
        desk.preparer.prepare(ref)
        assert rails(desk, ref.uid) == [1]

    with pytest.raises(NotYet, match="where the scheduler has chosen, and 0 of 4 there and 12 of 16 on"):
        prepare(desk, result("nic", "slots-1"), devices=WITH_SELECTOR)
    assert prepare(desk, result("nic", "slots-1")) != [1]


def test_what_was_chosen_before_a_crash_stays_chosen(desk: Desk) -> None:
    prepare(desk, result("nic", "slots-3"))
    desk.ledger.set_claim_state(REF.uid, ClaimState.PREPARING)
    desk.others.held[POD.name] = {"main": {"nvidia.com/gpu": [gpu_uuid(0)]}}
    desk.preparer.prepare(REF)

    assert rails(desk) == [3]


def test_pods_without_gpus_are_spread_over_shared_adapters(desks: Desks) -> None:
    late = replace(LATE, name="rdma/hca", kind="hca", shares=1)
    desk = desks(late)
    one_place = replace_places(desk)
    desk.catalog.set(one_place)
    for number in range(4):
        ref = ClaimRef(f"{number}1111111-2222-4333-8444-555555555555", "team", f"c-{number}")
        desk.claimed(ref, claim(result("rdma", "slots-0", shareID=f"s-{number}"), ref=ref))
        desk.preparer.prepare(ref)

    assert len({row.device for found in desk.ledger.claims() for row in found.devices}) == 4
    with pytest.raises(AgentError, match="0 of 4 on this node are free"):
        prepare_share(desk)


def test_two_requests_for_shares_of_one_place_may_have_one_adapter_and_one_request_may_not(desks: Desks) -> None:
    desk = desks(replace(LATE, name="rdma/hca", kind="hca", shares=2))
    pinned = {"constraints": [{"matchAttribute": "a/b"}]}

    def claimed(*requests: str) -> list[str]:
        spec = {**pinned, "requests": [{"name": name} for name in dict.fromkeys(requests)]}
        results = [result(name, "slots-0", shareID=f"s-{i}") for i, name in enumerate(requests)]
        desk.preparer.prepare(desk.claimed(REF, claim(*results, devices=spec)))
        return [row.device for row in desk.ledger.claims()[0].devices]

    assert len(set(claimed("a", "b"))) == 1
    desk.preparer.unprepare(REF)
    with pytest.raises(NotYet):
        claimed("a", "a")
    with pytest.raises(NotYet):
        claimed("a", "b", "c")


def test_an_adapter_of_a_place_has_no_more_shares_taken_of_it_than_it_has(desks: Desks) -> None:
    desk = desks(replace(LATE, name="rdma/hca", kind="hca", shares=4))
    desk.catalog.set(replace_places(desk))

    def claimed(number: int, *amounts: str) -> Sequence[str]:
        ref = ClaimRef(f"{number}1111111-2222-4333-8444-555555555555", "team", f"c-{number}")
        pod = PodRef("team", ref.name, f"pod-{number}")
        results = [
            result(f"r{i}", "slots-0", shareID=f"s-{i}", consumedCapacity={"nodefabric.io/shares": amount})
            for i, amount in enumerate(amounts)
        ]
        desk.preparer.prepare(desk.claimed(ref, claim(*results, ref=ref, pods=[pod])))
        found = desk.ledger.claim(ref.uid)
        assert found is not None
        return [row.device for row in found.devices]

    taken = [device for number in range(3) for device in claimed(number, "3")]
    assert len(set(taken)) == 3
    assert claimed(3, "2", "2")[0] == claimed(3, "2", "2")[1]
    with pytest.raises(NotYet, match="0 of 4 on this node are free"):
        claimed(4, "2")
    ones = [claimed(number, "1")[0] for number in (5, 6, 7)]
    assert sorted(ones) == sorted(taken)
    with pytest.raises(NotYet, match="0 of 4 on this node are free"):
        claimed(8, "1")


def test_a_bond_for_which_one_port_is_full_is_refused_at_once_though_the_other_has_more_than_it_may_take(
    desks: Desks,
) -> None:
    vfs = "{name: rdma/vf, kind: vf, offer: dra, binding: late, network: pair}"
    config = parse(f"{{resources: [{vfs}], networks: [{{name: pair, bond: active-backup}}]}}", "test")
    desk = desks(config=config, snapshot=node(rails=2, vfs=2))
    full = [d.address for d in desk.offer.snapshot.devices if d.physfn == PFS[0]]
    rows = [desk.attach(device, PodRef("team", "other", "o"), container_id=device) for device in full]

    with pytest.raises(NotYet, match="2 devices of rdma/vf are wanted"):
        prepare(desk, result("nic", "slots-0", shareID="s"), result("nic", "slots-1", shareID="t"))
    desk.detached(rows[0])
    assert sorted(prepare(desk, result("nic", "slots-0"), result("nic", "slots-1"))) == [0, 1]


def replace_places(desk: Desk) -> tuple[Any, ...]:
    """All adapters in one place."""
    first = desk.catalog.value[0]
    return (replace(first, units=tuple(unit for device in desk.catalog.value for unit in device.units)),)


def prepare_share(desk: Desk) -> None:
    desk.preparer.prepare(desk.claimed(REF, claim(result("rdma", "slots-0", shareID="s"))))


def test_a_claim_is_near_to_a_gpu_that_only_the_files_of_its_plugins_answer_name(desk: Desk) -> None:
    desk.others.held[POD.name] = {"main": {"habana.ai/gaudi": ["AN24001234"]}}
    desk.others.files["habana.ai/gaudi"] = ["/dev/nvidia3"]
    assert prepare(desk, result("nic", "slots-0")) == [3]


def member(name: str, group: str, has: str = "spec") -> dict[str, Any]:
    """A pod, as the API server has it. It names the claim in its spec, in its status, or nowhere."""
    spec: dict[str, Any] = {"schedulingGroup": {"podGroupName": group}} if group else {}
    status: dict[str, Any] = {}
    named = {"name": "nic", "resourceClaimName": REF.name}
    if has == "spec":
        spec["resourceClaims"] = [named]
    elif has == "status":
        spec["resourceClaims"] = [{"name": "nic", "resourceClaimTemplateName": "nics"}]
        status["resourceClaimStatuses"] = [named]
    meta = {"namespace": POD.namespace, "name": name, "uid": f"uid-{name}"}
    return {"metadata": meta, "spec": spec, "status": status}


@pytest.mark.parametrize(
    ("of_pods", "rail", "members"),
    [
        ({"a": "others", "b": "workers", "c": ""}, 3, ["b"]),
        ({"b": "workers", "d": "workers"}, 3, ["b", "d"]),
        ({"a": "workers nowhere", "b": "workers status"}, 3, ["b"]),
        ({"a": "others", "b": "others"}, 0, []),
        ({}, 0, []),
    ],
)
def test_a_claim_of_a_pod_group_is_near_to_the_gpu_of_the_pod_here_that_has_it(
    desk: Desk, of_pods: dict[str, str], rail: int, members: list[str]
) -> None:
    desk.others.pods = {name: member(name, *group.split(" ")) for name, group in of_pods.items()}
    desk.others.held = {name: {"main": {}} for name in ("a", "c", "d")}
    desk.others.held["a"] = {"main": {"nvidia.com/gpu": [gpu_uuid(1)]}}
    desk.others.held["b"] = {"main": {"nvidia.com/gpu": [gpu_uuid(3)]}}
    document = claim(result("nic", "slots-0"), pods=(), groups=("workers",))
    desk.preparer.prepare(desk.claimed(REF, document))
    assert rails(desk) == [rail]
    (known,) = desk.ledger.claims()
    assert sorted((pod.name, pod.uid) for pod in known.pods) == [(name, f"uid-{name}") for name in members]
    desk.others.asked.clear()
    desk.preparer.prepare(REF)
    assert desk.others.asked == [f"claim {REF}"], "no pod is read for a claim that is prepared"
    assert desk.ledger.claims()[0].pods == known.pods, "what is known of a group's pods stays"


def test_of_a_pod_groups_pods_those_are_read_that_kubelet_gives_the_claim_and_so_many_at_most(desk: Desk) -> None:
    document = ours(claim(result("nic", "slots-0"), pods=(), groups=("workers",)), REF, "nodefabric.io", NODE)
    names = [f"p{n}" for n in range(MOST_READ + 1)]
    desk.others.pods = {name: member(name, "workers") for name in names}
    claimed = ClaimedDevice(POD.namespace, REF.name, "nodefabric.io", NODE, "slots-0")
    asked = {
        "none has it": [PodDevices(PodRef(POD.namespace, name)) for name in names],
        "one has it": [
            PodDevices(
                PodRef(POD.namespace, name), (ContainerDevices("main", claimed=(claimed,) if name == "p7" else ()),)
            )
            for name in names
        ],
        "another namespace": [PodDevices(PodRef("other", name)) for name in names],
    }
    found = {}
    for why, pods in asked.items():
        kubelet: Any = SimpleNamespace(pods=lambda p=pods: p)
        found[why] = len(Allocations(kubelet, desk.others, DRIVER, NODE).with_members(document).pods)
    assert found == {"none has it": MOST_READ, "one has it": 1, "another namespace": 0}


def test_a_claim_of_a_pod_group_is_prepared_though_nobody_tells_its_pods(desk: Desk) -> None:
    class Away:
        def pods(self) -> Any:
            raise Unavailable("away")

    document = ours(claim(result("nic", "slots-0"), pods=(), groups=("workers",)), REF, "nodefabric.io", NODE)
    assert Allocations(cast(Any, Away()), desk.others, DRIVER, NODE).with_members(document) == document


def test_nobody_who_is_away_keeps_a_pod_from_starting(desk: Desk) -> None:
    class Away:
        def __getattr__(self, name: str) -> Any:
            raise AgentError("away")

    document = claim(gpu_of_driver("gpu-2"), result("nic", "slots-0"))
    away: Any = Away()
    found = GpuAsker(away, away).of(ours(document, REF, "nodefabric.io", NODE), desk.offer.distances)
    assert found == NO_GPUS


@pytest.mark.parametrize(
    ("containers", "values"),
    [
        ([{"claims": [{"name": "n"}]}], {"=mlx5_0,mlx5_1"}),
        ([{"claims": [{"name": "n", "request": "a"}]}, {"claims": [{"name": "n"}]}], {"=mlx5_0", "=mlx5_1"}),
    ],
)
def test_libraries_are_told_all_devices_of_a_claim_or_those_of_a_request(
    desks: Desks, containers: list[Any], values: set[str]
) -> None:
    desk = desks(replace(LATE, name="rdma/hca", kind="hca", binding="early", environment=("nccl",)))
    desk.others.pods[POD.name] = {
        "spec": {
            "resourceClaims": [{"name": "n", "resourceClaimName": REF.name}],
            "containers": [{"name": f"c{i}", "resources": r} for i, r in enumerate(containers)],
        }
    }
    two = claim(result("a", "hca-0", shareID="s"), result("b", "hca-1", shareID="t"))
    desk.preparer.prepare(desk.claimed(REF, two))
    (row,) = desk.ledger.claims()
    told = {text for found in row.devices for text in found.edits["env"]}
    assert told == {f"NCCL_IB_HCA={value}" for value in values}


RAILS, VFS = 4, 3
SNAPSHOT = node(rails=RAILS, vfs=VFS)
DISTANCES = Distances(SNAPSHOT)
PLACES = [tuple(pf.vfs) for pf in SNAPSHOT.devices if pf.vfs]
UNITS = [Unit(vf, "rdma/vf", "vf", vf, HEALTHY, SNAPSHOT.by_address[vf].numa_node) for place in PLACES for vf in place]
WISHES = st.lists(
    st.tuples(st.integers(0, RAILS - 1), st.booleans(), st.none() | st.integers(0, 2)), min_size=1, max_size=8
)
GPUS = st.dictionaries(
    st.none() | st.integers(0, 2), st.lists(st.integers(0, RAILS - 1).map(gpu_uuid), unique=True), max_size=4
)


@settings(max_examples=200, deadline=None)
@given(WISHES, st.sets(st.sampled_from(UNITS), max_size=RAILS * VFS), GPUS)
def test_each_result_gets_a_free_device_of_its_own_and_the_pinned_ones_their_place(
    asked: list[tuple[int, bool, int | None]], free: set[Unit], gpus: dict[int | None, list[str]]
) -> None:
    wishes = [LateWish(PLACES[place], pinned, container) for place, pinned, container in asked]
    chosen = choose_late(DISTANCES, wishes, sorted(free, key=lambda unit: unit.device), gpus, {})

    there = Counter(next(i for i, place in enumerate(PLACES) if unit.device in place) for unit in free)
    pinned = Counter(place for place, is_pinned, _ in asked if is_pinned)
    if len(wishes) > len(free) or any(there[place] < count for place, count in pinned.items()):
        assert chosen is None
        return
    assert chosen is not None
    assert len(set(chosen)) == len(wishes)
    assert set(chosen) <= {unit.device for unit in free}
    assert all(device in wish.place for device, wish in zip(chosen, wishes, strict=True) if wish.is_pinned)


def test_without_spread_one_adapter_is_filled_before_another() -> None:
    wishes = [LateWish(PLACES[0], False)] * VFS
    load = {DISTANCES.port(PLACES[2][0]): 1}
    filled = choose_late(DISTANCES, wishes, UNITS, {}, load, spread=False)
    spread = choose_late(DISTANCES, wishes, UNITS, {None: [gpu_uuid(1)]}, load, spread=False)

    assert filled is not None
    assert set(filled) == set(PLACES[0])  # the place that the scheduler has chosen goes first
    assert spread is not None
    assert set(spread) == set(PLACES[1])


@pytest.mark.parametrize(
    ("request_name", "number"),
    [("container-2-request-0", 2), ("container-x-request-0", None), ("nic", None), ("container-1-request-0/a", None)],
)
def test_a_request_for_extended_resources_names_its_container(request_name: str, number: int | None) -> None:
    assert container_of(request_name) == number


def test_gpus_are_named_by_uuid_and_pci_address_in_any_drivers_domain() -> None:
    attributes = {
        "gpu.nvidia.com/uuid": {"string": "GPU-1"},
        "resource.kubernetes.io/pciBusID": {"string": "0000:1B:00.0"},
        "uuid": {"int": 7},
        "type": {"string": "gpu"},
    }
    device = {"name": "gpu-0", "attributes": attributes}
    document = {"spec": {"pool": {"name": "n"}, "devices": [device]}}

    assert list(named_gpus([document])) == [(("n", "gpu-0"), ["GPU-1", "0000:1b:00.0"])]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(("spec", "status", "metadata")), JSON, JSON)
def test_garbage_in_a_pod_or_a_slice_is_one_clear_error(key: str, one: Any, other: Any) -> None:
    keys = ("resourceClaims", "containers", "resourceClaimStatuses", "pool", "devices")
    document = {key: one, "spec": dict.fromkeys(keys, other) if key != "spec" else one}
    reads = claim_names, container_names, partial(names_all_of, claim="x"), lambda pod: list(named_gpus([pod]))
    for read in reads:
        with contextlib.suppress(Unavailable):
            read(document)
