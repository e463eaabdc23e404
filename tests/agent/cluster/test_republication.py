"""Publications begin and end with the configuration that asks for them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from agent.cluster.publications import Republication
from agent.config import Config
from agent.config.topology import Fingerprint
from agent.kubelet.podresources import PodDevices
from agent.process.conditions import Conditions
from agent.report.metrics import Metrics
from agent.state import Latest
from tests.agent.cluster.publications import QUICK, FakeKubelet, Rig
from tests.awaiting import until


async def test_another_configuration_ends_one_and_begins_the_next(tmp_path: Path) -> None:
    rig = Rig(tmp_path, QUICK)
    rig.server.state.add_node("worker-1")
    topology = replace(QUICK, kubelet_config=tmp_path / "config.yaml")
    config, registry = Latest(Config(topology=topology)), CollectorRegistry()
    publishing = Republication(config, rig.node, rig.client, Metrics(registry), Conditions())
    running = asyncio.create_task(publishing.run())
    await until(rig.stored)
    config.set(Config(topology=replace(topology, publish=False, volcano=True)))
    await until(lambda: rig.stored("Numatopology"))
    asked = rig.kubelet.lists
    publishing.changed()
    await until(lambda: rig.kubelet.lists > asked)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not any(family.name.startswith("nodefabric_port_") for family in registry.collect())
    rig.client.close()
    rig.server.close()


async def test_an_error_that_nobody_expected_ends_them_and_they_may_be_run_again(tmp_path: Path) -> None:
    class Broken(FakeKubelet):
        async def list(self) -> tuple[PodDevices, ...]:
            raise ZeroDivisionError("a bug")

    rig = Rig(tmp_path, QUICK)
    rig.node = replace(rig.node, kubelet=Broken())
    topology = replace(QUICK, fingerprint=Fingerprint("podresources"))
    publishing = Republication(
        Latest(Config(topology=topology)), rig.node, rig.client, Metrics(CollectorRegistry()), Conditions()
    )
    for _ in range(2):
        with pytest.raises(ExceptionGroup):
            await publishing.run()
    rig.client.close()
    rig.server.close()
