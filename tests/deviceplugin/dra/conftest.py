"""Desks of nodes that prepare claims."""

from tests.deviceplugin.dra.preparing import desk, desks

__all__ = ["desk", "desks"]
