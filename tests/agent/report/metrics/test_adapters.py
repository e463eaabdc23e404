"""Series of what adapters count."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import parser as classic
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from agent.config import Config, Endpoints
from agent.errors import HardwareError
from agent.model.counters import Counters, RdmaPortCounters, VfCounters
from agent.report.metrics import Metrics
from agent.report.series import OPENMETRICS
from agent.state import Latest

PORT = {"device": "0000:18:00.0", "rdma_device": "mlx5_0", "port": "1"}
VF = {"device": "0000:18:00.2", "pf": "ens1f0np0", "vf": "1", "numa_node": "0"}
COUNTERS = Counters(
    rdma=(
        RdmaPortCounters(
            "0000:18:00.0", "mlx5_0", 1, True, {"port_xmit_data": 250, "symbol_error": 3}, {"out_of_sequence": 7}
        ),
    ),
    vfs=(VfCounters("0000:18:00.2", "ens1f0np0", 1, 0, {"rx_bytes": 1500, "tx_dropped": 4}),),
)


def config(*, exporter_names: bool) -> Latest[Config]:
    return Latest(Config(endpoints=Endpoints(exporter_names=exporter_names)))


def value_of(
    name: str, labels: dict[str, str], *, counters: Counters = COUNTERS, aliases: bool = False
) -> float | None:
    """Have the client library read a rendered series, in both formats."""
    metrics = Metrics(CollectorRegistry())
    metrics.add_adapters(lambda: counters, config(exporter_names=aliases))
    found = set()
    for accept, parse in (("", classic.text_string_to_metric_families), (OPENMETRICS, text_string_to_metric_families)):
        families = parse(metrics.render(accept)[1].decode())
        samples = [s for family in families for s in family.samples if (s.name, s.labels) == (name, labels)]
        found.add(samples[0].value if samples else None)
    (value,) = found
    return value


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("nodefabric_rdma_port_active", PORT, 1),
        ("nodefabric_rdma_port_transmit_bytes_total", PORT, 1000),
        ("nodefabric_rdma_port_receive_bytes_total", PORT, None),
        ("nodefabric_rdma_port_events_total", {**PORT, "event": "symbol_error"}, 3),
        ("nodefabric_rdma_port_events_total", {**PORT, "event": "port_xmit_data"}, None),
        ("nodefabric_rdma_hw_events_total", {**PORT, "event": "out_of_sequence"}, 7),
        ("nodefabric_vf_receive_bytes_total", VF, 1500),
        ("nodefabric_vf_transmit_dropped_packets_total", VF, 4),
        ("nodefabric_vf_transmit_bytes_total", VF, None),
    ],
)
def test_each_counter_has_its_series(name: str, labels: dict[str, str], value: float | None) -> None:
    assert value_of(name, labels) == value


def test_the_exporters_names_come_only_if_wanted() -> None:
    labels = {"pf": "ens1f0np0", "vf": "1", "pciAddr": "0000:18:00.2", "numa_node": "0"}
    assert value_of("sriov_vf_rx_bytes", labels) is None
    assert value_of("sriov_vf_rx_bytes", labels, aliases=True) == 1500


def test_strange_names_are_escaped() -> None:
    port = RdmaPortCounters("0000:18:00.0", 'a"b\\c\nd', 1, True, {}, {})
    labels = {**PORT, "rdma_device": 'a"b\\c\nd'}
    assert value_of("nodefabric_rdma_port_active", labels, counters=Counters((port,))) == 1


def test_counters_that_cannot_be_read_hide_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)

    def fail() -> Counters:
        raise HardwareError("netlink is closed")

    metrics.add_adapters(fail, config(exporter_names=False))
    for _ in range(3):
        assert "nodefabric_config_last_reload_success" in metrics.render()[1].decode()
    assert len([r for r in caplog.records if "left out" in r.message]) == 1


def test_openmetrics_ends_once() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.add_adapters(lambda: COUNTERS, config(exporter_names=True))
    content_type, text = metrics.render(OPENMETRICS)
    assert content_type.startswith(OPENMETRICS)
    assert text.count(b"# EOF") == 1
    assert text.endswith(b"# EOF\n")
    content_type, text = metrics.render("text/html")
    assert content_type.startswith("text/plain")
    assert b"# EOF" not in text
