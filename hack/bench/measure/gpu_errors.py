"""From an error that the NVIDIA driver tells of to kubelet's list: the agent as a process, over its real sockets.

The driver is the library that the tests compile (tests/nvml), with the real bindings on top. It looks for new errors
every 2 ms, and these are part of the figure.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from agent.hardware import recorded
from hack.sim import uevents
from hack.sim.stage import Stage, wait
from measure.figures import Figures, quantile
from measure.lists import Lists
from tests.nvml.fake import FakeDriver, as_recorded, compile_library, environment

NODE = "h100-8gpu"
RESOURCE = "nvidia.com/gpu"
FATAL_XID, HARMLESS_XID = 79, 13
SETTLE_SECONDS = (0.15, 0.35)


def measure(say: Callable[[str], None], events: int, relay: Path) -> Figures:
    """Measure how soon a GPU with a fatal error is unhealthy in the list. In a network namespace of its own only."""
    say(f"health: {events} fatal errors of GPUs, on {NODE}")
    with tempfile.TemporaryDirectory(prefix="nf-bench-", dir="/var/tmp") as folder:
        gpus = [as_recorded(gpu) for gpu in recorded.load(recorded.find(NODE)).gpus]
        driver = FakeDriver(Path(folder) / "driver").show(*gpus)
        env = environment(compile_library(Path(folder)), driver)
        stage = Stage(Path(folder) / "s", relay)
        try:
            stage.build_node(NODE, with_links=False)
            (stage.folder / "node/gpus.live").write_text(json.dumps({"apart": 0.1}))
            stage.start_kubelet()
            stage.write_config({"resources": [{"name": RESOURCE, "kind": "gpu"}]})
            stage.start_agent(env=env)
            stage.await_ready()
            wait("errors to be heard", lambda: _is_heard(stage, driver))
            lists = Lists(stage.folder / "kubelet/device-plugins", RESOURCE)
            try:
                sample = _sample(driver, lists, events)
            finally:
                lists.close()
        except BaseException:
            say(stage.log_ends())
            raise
        finally:
            stage.close()
    return {
        "health_gpu_error_to_list_ms": quantile(sample, 0.5),
        "health_gpu_error_to_list_p99_ms": quantile(sample, 0.99),
    }


def _is_heard(stage: Stage, driver: FakeDriver) -> bool | None:
    driver.xid(driver.gpus[0].uuid, HARMLESS_XID)
    return f'xid="{HARMLESS_XID}"' in stage.fetch("/metrics") or None


def _sample(driver: FakeDriver, lists: Lists, events: int) -> list[float]:
    chance = random.Random(7)
    sample: list[float] = []
    for number in range(events):
        gpu = driver.gpus[number % len(driver.gpus)]
        time.sleep(chance.uniform(*SETTLE_SECONDS))
        began = time.perf_counter()
        driver.xid(gpu.uuid, FATAL_XID)
        sample.append((lists.await_unhealthy(1) - began) * 1000)
        uevents.emit("bind", f"/devices/pci0000:00/{gpu.bus[4:].lower()}", "pci")  # as its driver does after a reset
        lists.await_unhealthy(0)
    return sample
