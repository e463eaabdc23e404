"""Alert rules and dashboard: sound for Prometheus, and about series that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from tests.daemonset.promtool import MONITORING, documented, promtool

_NAME = re.compile(r"\bnodefabric_[a-z_]+")


def expressions() -> list[str]:
    """List the dashboard's queries."""
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_alert_rules_do_what_their_tests_say() -> None:
    promtool("check", "rules", "alerts.yaml")
    assert "SUCCESS" in promtool("test", "rules", "alerts-test.yaml")


def test_every_alert_is_tested() -> None:
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
    tests = yaml.safe_load((MONITORING / "alerts-test.yaml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in rules}


def test_alerts_and_dashboard_ask_for_series_that_exist() -> None:
    text = (MONITORING / "alerts.yaml").read_text()
    queries = " ".join([rule["expr"] for group in yaml.safe_load(text)["groups"] for rule in group["rules"]])
    asked = set(_NAME.findall(queries + " ".join(expressions())))
    assert len(asked) > 20
    assert asked <= documented()


def test_the_dashboards_queries_are_sound(tmp_path: Path) -> None:
    plain = [e.replace("$__rate_interval", "5m").replace("$instance", ".*") for e in expressions()]
    rules = [{"record": f"query:{number}", "expr": expression} for number, expression in enumerate(plain)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(plain)} rules found" in promtool("check", "rules", "rules.yaml", folder=tmp_path)
