"""Measurements of the agent on simulated nodes, and of the CNI relay beside the plugin it replaces."""
