from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from agent.config import HealthSettings
from agent.health_history import HealthHistory
from agent.model.device import Gpu
from agent.model.device_health import GpuEvent
from agent.model.health import unhealthy
from agent.report.events import Events
from agent.report.report import GpuErrors


def test_the_same_error_again_and_again_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    errors = GpuErrors(HealthHistory(), registry, Events())
    for at in range(120):
        errors.take(GpuEvent(79, float(at), "GPU-a"))
    errors.take(GpuEvent(79, 0.0, "GPU-b"))
    assert [r.getMessage() for r in caplog.records] == ["XID 79 (fatal): fallen off the bus"] * 3
    assert registry.get_sample_value("nodefabric_gpu_errors_total", {"xid": "79", "class": "fatal"}) == 121


def test_a_program_that_fails_on_all_gpus_leaves_other_events_in_memory() -> None:
    events = Events()
    errors = GpuErrors(HealthHistory(), CollectorRegistry(), events)
    events.note("grant", "0000:3b:02.1", "rdma/vf to default/trainer-0")
    for channel in range(50):
        for gpu in range(8):
            errors.take(GpuEvent(45, channel / 100, f"GPU-{gpu}"))
    assert [e.kind for e in events.listed()] == [*["health"] * 8, "grant"]


def test_errors_are_judged_counted_by_a_bounded_number_of_labels_and_noted() -> None:
    registry, events = CollectorRegistry(), Events()
    book = HealthHistory(HealthSettings(fatal_xids=frozenset({31})))
    errors = GpuErrors(book, registry, events)
    told = [GpuEvent(79, 1, "GPU-a"), GpuEvent(13, 2, "GPU-a"), GpuEvent(31, 3, "GPU-a", "MIG-1"), GpuEvent(4711, 4)]
    for event in (*told, GpuEvent(4712, 5)):
        errors.take(event)

    def count(xid: str, kind: str) -> float | None:
        return registry.get_sample_value("nodefabric_gpu_errors_total", {"xid": xid, "class": kind})

    assert (count("79", "fatal"), count("13", "application"), count("31", "fatal")) == (1, 1, 1)
    assert (count("other", "transient"), count("4711", "transient")) == (2, None)
    gpu = Gpu("GPU-a", 0, 0, "0000:1b:00.0", "H100", 1)
    assert book.policy().gpu(gpu, "") == unhealthy("XidFatal")
    noted = {(e.subject, e.text, e.warning) for e in events.listed()}
    assert ("GPU-a", "XID 79 (fatal): fallen off the bus", True) in noted
    assert ("GPU-a", "XID 13 (application): graphics engine exception", False) in noted
    assert ("MIG-1", "XID 31 (fatal): memory page fault", True) in noted
    assert any(subject.startswith("a GPU that the driver does not name") for subject, _, _ in noted)
