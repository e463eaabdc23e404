"""Tests of agent.metrics."""
