"""Alert rules and dashboard: sound for Prometheus, and about series that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.daemonset.promtool import MONITORING, ROOT, documented, promtool

_NAME = re.compile(r"\bnodefabric_[a-z_]+")
_HELD = "nodefabric_allocation_info{instance='a', container='main', namespace='team', "
_COUNTED = "total{instance='a', pod='nodefabric-x', namespace='nodefabric', device='0000:18:00.1', pf='ens1', vf='0'}"


def podmonitor() -> dict[str, Any]:
    """Return the spec of the component's PodMonitor."""
    spec: dict[str, Any] = yaml.safe_load((ROOT / "daemonset/components/monitor/podmonitor.yaml").read_text())["spec"]
    return spec


def alerts() -> list[str]:
    """List the alerts' queries."""
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    """List the dashboard's queries."""
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def evaluate(expression: str, series: dict[str, str], labels: str, value: float, folder: Path) -> None:
    """Have Prometheus work out a query on series of a sample in 30 s, and expect one sample."""
    case = {
        "interval": "30s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f"round({expression}, 0.001)",
                "eval_time": "9m",
                "exp_samples": [{"labels": labels, "value": value}],
            }
        ],
    }
    (folder / "test.yaml").write_text(yaml.safe_dump({"rule_files": [], "tests": [case]}))
    assert "SUCCESS" in promtool("test", "rules", "test.yaml", folder=folder)


def test_the_alert_rules_do_what_their_tests_say() -> None:
    promtool("check", "rules", "alerts.yaml")
    assert "SUCCESS" in promtool("test", "rules", "alerts-test.yaml")


def test_every_alert_is_tested() -> None:
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
    tests = yaml.safe_load((MONITORING / "alerts-test.yaml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in rules}


def test_alerts_and_dashboard_ask_for_series_that_exist() -> None:
    asked = set(_NAME.findall(" ".join(alerts() + expressions())))
    assert len(asked) > 20
    assert asked <= documented()


def test_the_dashboards_queries_are_sound(tmp_path: Path) -> None:
    plain = [e.replace("$__rate_interval", "5m").replace("$instance", ".*") for e in expressions()]
    rules = [{"record": f"query:{number}", "expr": expression} for number, expression in enumerate(plain)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(plain)} rules found" in promtool("check", "rules", "rules.yaml", folder=tmp_path)


@pytest.mark.parametrize("where", ["docs/metrics.md", "dashboard"])
def test_traffic_of_vfs_is_told_by_pod_though_pods_have_shares_of_one_hca_too(tmp_path: Path, where: str) -> None:
    written = (ROOT / "docs/metrics.md").read_text()
    join = [" ".join(found.split()) for found in re.findall(r"\n\n((?:    .+\n)+)", written) if "group_left" in found]
    if where == "dashboard":
        join = [e.replace("$__rate_interval", "5m").replace("$instance", ".*") for e in expressions() if "pod)" in e]
    (expression,) = join
    series = {
        f"nodefabric_vf_receive_bytes_{_COUNTED}": "0+60x20",
        f"nodefabric_vf_transmit_bytes_{_COUNTED}": "0x20",
        f"{_HELD}pod='p', device='0000:18:00.1', unit='0000:18:00.1', resource='rdma/vf'}}": "1x20",
        f"{_HELD}pod='p', device='0000:18:00.0', unit='hca-0', resource='rdma/hca'}}": "1x20",
        f"{_HELD}pod='q', device='0000:18:00.0', unit='hca-1', resource='rdma/hca'}}": "1x20",
    }
    evaluate(f"sum by (namespace, pod) ({expression})", series, '{namespace="team", pod="p"}', 2, tmp_path)


def test_prometheus_keeps_the_names_of_pods_that_series_tell_of_and_an_update_makes_no_other_series() -> None:
    (endpoint,) = podmonitor()["podMetricsEndpoints"]
    assert endpoint["honorLabels"] is True
    assert [rule["regex"] for rule in endpoint["relabelings"] if rule.get("action") == "labeldrop"] == ["pod"]
    assert "node" in [rule.get("targetLabel") for rule in endpoint["relabelings"]]


def test_an_agent_that_is_away_is_told_of_whatever_the_release_is_called() -> None:
    pods = yaml.safe_load((ROOT / "daemonset/base/daemonset.yaml").read_text())["spec"]["template"]["metadata"]
    job = pods["labels"][podmonitor()["jobLabel"]]
    (expression,) = [e for e in alerts() if e.startswith("up{")]
    (wanted,) = re.findall(r'job=~"([^"]+)"', expression)
    assert re.fullmatch(wanted, job)
