"""Tests of agent.report.metrics."""
