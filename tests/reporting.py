"""An agent's accounts, for tests of what leaves word in them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from agent.config import HealthSettings
from agent.health_history import HealthHistory
from agent.process.conditions import Conditions
from agent.report.events import Events
from agent.report.metrics import Metrics
from agent.report.report import Report


def new_report() -> Report:
    """Make empty ones. What is wrong is among the events, too."""
    events = Events()
    conditions = Conditions(events.condition)
    return Report(Metrics(CollectorRegistry()), conditions, events, HealthHistory(HealthSettings()))
