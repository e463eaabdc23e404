"""Series of what adapters count."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import parser as classic
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from agent.config import Config
from agent.errors import HardwareError
from agent.model.counters import Counters, RdmaPortCounters
from agent.report.metrics import Metrics
from agent.report.series import OPENMETRICS
from agent.state import Latest
from tests.agent.report.golden import COUNTERS


def test_both_formats_say_the_same_and_strange_names_are_escaped() -> None:
    port = RdmaPortCounters("0000:18:00.0", 'a"b\\c\nd', 1, True, {"port_xmit_data": 1}, {})
    metrics = Metrics(CollectorRegistry())
    metrics.add_adapters(lambda: Counters((*COUNTERS.rdma, port), COUNTERS.vfs), Latest(Config()))
    read = []
    for accept, parse in (("", classic.text_string_to_metric_families), (OPENMETRICS, text_string_to_metric_families)):
        families = parse(metrics.render(accept)[1].decode())
        samples = (sample for family in families for sample in family.samples)
        read.append({(s.name, *sorted(s.labels.items())): s.value for s in samples if {"pf", "port"} & s.labels.keys()})
    assert read[0] == read[1]
    labels = {"device": port.device, "port": "1", "rdma_device": port.rdma_device}
    assert read[0]["nodefabric_rdma_port_transmit_bytes_total", *labels.items()] == 4


def test_counters_that_cannot_be_read_hide_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)

    def fail() -> Counters:
        raise HardwareError("netlink is closed")

    metrics.add_adapters(fail, Latest(Config()))
    for _ in range(3):
        assert "nodefabric_config_last_reload_success" in metrics.render()[1].decode()
    assert len([r for r in caplog.records if "left out" in r.message]) == 1


def test_openmetrics_ends_once() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.add_adapters(lambda: COUNTERS, Latest(Config()))
    content_type, text = metrics.render(OPENMETRICS)
    assert content_type.startswith(OPENMETRICS)
    assert text.count(b"# EOF") == 1
    assert text.endswith(b"# EOF\n")
    content_type, text = metrics.render("text/html")
    assert content_type.startswith("text/plain")
    assert b"# EOF" not in text
