"""How the stand-in's kubelet prepares claims, as the real one was seen to."""

from __future__ import annotations

import asyncio
import json
import zlib
from dataclasses import replace

import pytest

from hack.sim.pods import Container, ExtendedClaim, ExtendedRequest, PodSpec, UsedClaim
from tests.awaiting import until
from tests.sim.dra.rig import GPU_DRIVER, NIC_DRIVER, NODE, QUICK, node, pod

NIC = ("nic", NIC_DRIVER, "vf-1")
GPU = ("gpu", GPU_DRIVER, "gpu-0")
ALL = UsedClaim("rails")


def cdi(uid: str, driver: str, device: str) -> str:
    return f"k8s.{driver}/claim={uid}-{device}"


def test_a_container_gets_the_devices_of_the_requests_that_it_names() -> None:
    async def work() -> None:
        async with node() as n:
            await n.serve(NIC_DRIVER)
            await n.serve(GPU_DRIVER)
            near = ("nic/near", NIC_DRIVER, "vf-1")  # a request counts without its sub-request
            uid = n.cluster.allocate("claim", near, GPU, users=["uid-of-p"])
            running = await n.running(
                pod("p", "claim", ALL, UsedClaim("rails", "nic"), UsedClaim("rails", "gpu"), UsedClaim("other"))
            )
            shown = [set(c["cdi_devices"]) for c in n.kubelet.describe(running)["containers"]]
            nic, gpu = cdi(uid, NIC_DRIVER, "vf-1"), cdi(uid, GPU_DRIVER, "gpu-0")
            assert shown == [{nic, gpu}, {nic}, {gpu}, set()]

    asyncio.run(work())


def test_all_claims_of_a_pod_go_to_a_driver_in_one_call_and_drivers_come_in_any_order() -> None:
    async def work() -> None:
        async with node() as n:
            await n.serve(NIC_DRIVER)
            await n.serve(GPU_DRIVER)
            orders = set()
            for number in range(20):
                name = f"p{number}"
                first = n.cluster.allocate(f"{name}-a", NIC, GPU, users=[f"uid-of-{name}"])
                second = n.cluster.allocate(f"{name}-b", NIC, users=[f"uid-of-{name}"])
                spec = pod(name, f"{name}-a")
                more = replace(spec.claims[0], name="b", claim_name=f"{name}-b")
                await n.running(replace(spec, claims=(*spec.claims, more)))
                calls = n.calls("NodePrepareResources")[2 * number :]
                assert {c.driver: c.claims for c in calls} == {NIC_DRIVER: (first, second), GPU_DRIVER: (first,)}
                orders.add(tuple(c.driver for c in calls))
            assert orders == {(NIC_DRIVER, GPU_DRIVER), (GPU_DRIVER, NIC_DRIVER)}

    asyncio.run(work())


@pytest.mark.parametrize("how", ["absent", "not allocated", "not reserved", "of another pod", "api server away"])
def test_a_claim_that_the_pod_may_not_use_reaches_no_driver_and_no_file(how: str) -> None:
    async def work() -> None:
        async with node() as n:
            await n.serve(NIC_DRIVER)
            users = ["uid-of-p"] if how != "not reserved" else ["another"]
            n.cluster.allocate("claim", NIC, users=users, owner="another" if how == "of another pod" else "uid-of-p")
            if how == "absent":
                n.cluster.claims.clear()
            if how == "not allocated":
                del n.cluster.claims["default", "claim"]["status"]["allocation"]
            n.cluster.away = how == "api server away"
            waiting = n.kubelet.create(pod("p", "claim", from_template=True))
            await until(lambda: waiting.message)
            assert "failed to prepare dynamic resources" in waiting.message
            assert n.calls("NodePrepareResources") == []
            assert not (n.folder / "dra_manager_state").exists()
            await n.kubelet.delete("default/p")
            assert n.calls("NodeUnprepareResources") == []
            n.cluster.away = False

    asyncio.run(work())


def test_a_driver_that_is_not_registered_fails_even_a_prepared_claim() -> None:
    async def work() -> None:
        async with node() as n:
            await n.serve(NIC_DRIVER)
            n.cluster.allocate("claim", NIC, users=["uid-of-p", "uid-of-q"])
            await n.running(pod("p", "claim"))
            await n.end(NIC_DRIVER)
            assert n.kubelet.dra is not None
            dra = n.kubelet.dra
            await until(lambda: dra.drivers.get(NIC_DRIVER) is None)
            second = n.kubelet.create(pod("q", "claim"))
            await until(lambda: "DRA driver nodefabric.io is not registered" in second.message)
            await n.serve(NIC_DRIVER)
            await until(lambda: second.phase == "Running")
            assert len(n.calls("NodePrepareResources")) == 1

    asyncio.run(work())


def test_a_failed_prepare_is_tried_again_later_and_then_the_devices_are_there_twice() -> None:
    async def devices(duplicates: bool) -> tuple[int, int]:
        async with node(replace(QUICK, duplicates=duplicates, retry=(0.02, 0.03))) as n:
            await n.serve(NIC_DRIVER)
            gpus = await n.serve(GPU_DRIVER)
            gpus.failing = 12
            uid = n.cluster.allocate("claim", NIC, GPU, users=["uid-of-p"])
            running = await n.running(pod("p", "claim", ALL))
            asked = [call.driver for call in n.calls("NodePrepareResources")].count(NIC_DRIVER)
            assert n.drivers[NIC_DRIVER].prepared == {uid: asked}
            (container,) = n.kubelet.describe(running)["containers"]
            return asked, container["cdi_devices"].count(cdi(uid, NIC_DRIVER, "vf-1"))

    async def work() -> None:
        asked, shown = await devices(duplicates=True)
        assert asked > 1, "the other driver failed before ours was asked, each time"
        assert shown == asked
        asked, shown = await devices(duplicates=False)
        assert asked > 1
        assert shown == 1

    asyncio.run(work())


def test_a_prepare_goes_on_while_its_pod_is_deleted_and_is_undone_at_once_then() -> None:
    async def work() -> None:
        async with node() as n:
            gpus = await n.serve(GPU_DRIVER)
            gpus.seconds = 1.0
            uid = n.cluster.allocate("claim", GPU, users=["uid-of-p"])
            waiting = n.kubelet.create(pod("p", "claim"))
            await until(lambda: n.calls("NodePrepareResources"))
            ending = n.kubelet.delete("default/p")
            await asyncio.sleep(0.1)
            assert not ending.done()
            assert n.calls("NodeUnprepareResources") == []
            await ending
            assert waiting.phase == "Pending"
            assert gpus.prepared == {}
            assert [call.claims for call in n.calls("NodeUnprepareResources")] == [(uid,)]

    asyncio.run(work())


def test_a_prepare_is_cancelled_when_kubelets_patience_ends() -> None:
    async def work() -> None:
        async with node(replace(QUICK, call=0.3)) as n:
            gpus = await n.serve(GPU_DRIVER)
            gpus.seconds = 0.6
            uid = n.cluster.allocate("claim", GPU, users=["uid-of-p"])
            waiting = n.kubelet.create(pod("p", "claim"))
            await until(lambda: "DEADLINE_EXCEEDED" in waiting.message)
            gpus.seconds = 0.0
            await until(lambda: waiting.phase == "Running")
            assert gpus.prepared[uid] >= 2, "what the first thread did was lost"

    asyncio.run(work())


def test_the_second_pod_of_a_prepared_claim_asks_nobody() -> None:
    async def work() -> None:
        async with node() as n:
            await n.serve(NIC_DRIVER)
            uid = n.cluster.allocate("claim", NIC, users=["uid-of-p", "uid-of-q"])
            await n.running(pod("p", "claim", ALL))
            second = await n.running(pod("q", "claim", ALL))
            assert len(n.calls("NodePrepareResources")) == 1
            assert n.kubelet.describe(second)["containers"][0]["cdi_devices"] == [cdi(uid, NIC_DRIVER, "vf-1")]

    asyncio.run(work())


def test_the_checkpoint_is_written_before_a_driver_is_asked_and_says_nothing_of_prepared() -> None:
    async def work() -> None:
        async with node() as n:
            gpus = await n.serve(GPU_DRIVER)
            gpus.seconds = 0.3
            uid = n.cluster.allocate("claim", GPU, users=["uid-of-p"])
            waiting = n.kubelet.create(pod("p", "claim"))
            await until(lambda: n.calls("NodePrepareResources"))
            path = n.folder / "dra_manager_state"
            early = json.loads(path.read_text())
            assert early["Checksum"] == zlib.crc32(early["Data"].encode())
            data = json.loads(early["Data"])
            assert data["kind"] == "DRACheckpoint"
            (entry,) = data["ClaimInfoStateList"]
            assert (entry["ClaimUID"], entry["ClaimName"], entry["Namespace"]) == (uid, "claim", "default")
            assert entry["PodUIDs"] == {"uid-of-p": {}}
            assert entry["DriverState"] == {GPU_DRIVER: {"Devices": None}}
            await until(lambda: waiting.phase == "Running")
            (entry,) = json.loads(json.loads(path.read_text())["Data"])["ClaimInfoStateList"]
            (device,) = entry["DriverState"][GPU_DRIVER]["Devices"]
            assert (device["PoolName"], device["DeviceName"], device["RequestNames"]) == (NODE, "gpu-0", ["gpu"])
            assert device["CDIDeviceIDs"] == [cdi(uid, GPU_DRIVER, "gpu-0")]
            assert not any("repared" in key for key in entry)

    asyncio.run(work())


def test_another_claim_under_a_name_that_is_still_prepared_is_refused() -> None:
    async def work() -> None:
        async with node() as n:
            await n.serve(NIC_DRIVER)
            old = n.cluster.allocate("claim", NIC, users=["uid-of-p"])
            await n.running(pod("p", "claim"))
            n.cluster.allocate("claim", NIC, users=["uid-of-q"])
            second = n.kubelet.create(pod("q", "claim"))
            await until(lambda: f"different UID {old} still exists" in second.message)
            await n.kubelet.delete("default/p")
            await until(lambda: second.phase == "Running")

    asyncio.run(work())


def test_extended_resources_come_by_their_claim_and_not_by_plugins() -> None:
    async def work() -> None:
        async with node() as n:
            await n.serve(NIC_DRIVER)
            uid = n.cluster.allocate("special", ("container-0-request-0", NIC_DRIVER, "vf-1"), users=["uid-of-p"])
            special = ExtendedClaim("special", (ExtendedRequest("main", "rdma/vf", "container-0-request-0"),))
            main = Container("main", limits=(("rdma/vf", 1),))
            spec = PodSpec("default", "p", containers=(main, Container("side")), uid="uid-of-p", extended=special)
            running = await n.running(spec)
            first, second = n.kubelet.describe(running)["containers"]
            assert first["cdi_devices"] == [cdi(uid, NIC_DRIVER, "vf-1")]
            assert (first["devices"], second["cdi_devices"]) == ({}, [])

    asyncio.run(work())
