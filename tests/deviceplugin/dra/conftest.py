"""Desks of nodes that prepare claims, and folders of kubelet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deviceplugin.dra.preparing import desk, desks

__all__ = ["desk", "desks"]


@pytest.fixture
def kubelet_folder(short_folder: Path) -> Path:
    """Make it as kubelet does."""
    for name in ("plugins", "plugins_registry"):
        (short_folder / name).mkdir(mode=0o750)
    return short_folder
