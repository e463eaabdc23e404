"""Configurations of other device plugins, read as they are."""
