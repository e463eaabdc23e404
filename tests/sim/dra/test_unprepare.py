"""How the stand-in's kubelet ends claims, and what it does after its own restart."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hack.sim.pods import UsedClaim
from tests.awaiting import until
from tests.sim.dra.rig import GPU_DRIVER, NIC_DRIVER, QUICK, node, pod

NIC = ("nic", NIC_DRIVER, "vf-1")
GPU = ("gpu", GPU_DRIVER, "gpu-0")


def test_only_the_last_pod_of_a_claim_ends_it() -> None:
    async def work() -> None:
        async with node() as n:
            nics = await n.serve(NIC_DRIVER)
            uid = n.cluster.allocate("claim", NIC, users=["uid-of-p", "uid-of-q"])
            await n.running(pod("p", "claim"))
            await n.running(pod("q", "claim"))
            await n.kubelet.delete("default/p")
            assert nics.prepared == {uid: 1}
            await n.kubelet.delete("default/q")
            assert nics.prepared == {}
            assert len(n.calls("NodeUnprepareResources")) == 1

    asyncio.run(work())


def test_a_claim_that_is_gone_from_the_api_server_is_ended_all_the_same() -> None:
    async def work() -> None:
        async with node() as n:
            nics = await n.serve(NIC_DRIVER)
            n.cluster.allocate("claim", NIC, users=["uid-of-p"])
            await n.running(pod("p", "claim"))
            n.cluster.claims.clear()
            n.cluster.away = True
            await n.kubelet.delete("default/p")
            assert nics.prepared == {}
            n.cluster.away = False

    asyncio.run(work())


def test_a_pod_stays_until_its_driver_is_back() -> None:
    async def work() -> None:
        async with node() as n:
            nics = await n.serve(NIC_DRIVER)
            n.cluster.allocate("claim", NIC, users=["uid-of-p"])
            running = await n.running(pod("p", "claim"))
            await n.end(NIC_DRIVER)
            ending = n.kubelet.delete("default/p")
            await until(lambda: "failed to unprepare dynamic resources" in running.message)
            assert not ending.done()
            await n.serve(NIC_DRIVER)
            await ending
            assert nics.prepared == {}

    asyncio.run(work())


def test_after_kubelets_restart_the_next_sandbox_prepares_again() -> None:
    async def work() -> None:
        async with node() as n:
            nics = await n.serve(NIC_DRIVER)
            uid = n.cluster.allocate("claim", NIC, users=["uid-of-p", "uid-of-q"])
            first = await n.running(pod("p", "claim", UsedClaim("rails")))
            await n.kubelet.restart()
            assert nics.prepared == {uid: 1}
            door = n.doors[NIC_DRIVER]
            dra = n.kubelet.dra
            assert dra is not None
            await until(lambda: dra.drivers.get(NIC_DRIVER) is not None)
            assert door.registered
            assert len(n.kubelet.describe(first)["containers"][0]["cdi_devices"]) == 1
            await n.running(pod("q", "claim"))
            assert nics.prepared == {uid: 2}
            await n.kubelet.delete("default/p")
            await n.kubelet.delete("default/q")
            assert nics.prepared == {}

    asyncio.run(work())


def test_claims_of_pods_that_kubelet_has_lost_are_found_and_ended() -> None:
    async def work() -> None:
        async with node(replace(QUICK, reconcile=0.2)) as n:
            nics = await n.serve(NIC_DRIVER)
            gpus = await n.serve(GPU_DRIVER)
            n.cluster.allocate("claim", NIC, GPU, users=["uid-of-p"])
            n.cluster.allocate("kept", NIC, users=["uid-of-q"], uid="kept")
            await n.running(pod("p", "claim"))
            await n.running(pod("q", "kept"))
            n.kubelet.lose("default/p")
            await until(lambda: not gpus.prepared)
            await until(lambda: nics.prepared == {"kept": 1})
            await asyncio.sleep(0.5)
            assert nics.prepared == {"kept": 1}

    asyncio.run(work())
