"""Metrics: what the agent counts itself, and the facts a scrape reads.

Owns the names, labels and units of all `nodefabric_*` series. Durations are in milliseconds: the
agent's promises are, and no reader has to multiply. Every label has a bounded set of values; pod
names occur in one info series only, which is bounded by the number of units.

Facts come from a supplier at scrape time, so nothing is counted twice and nothing goes stale.
"""

from __future__ import annotations

from agent.report.metrics.instruments import Metrics

__all__ = ["Metrics"]
