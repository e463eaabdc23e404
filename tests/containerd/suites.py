"""The versions of containerd that tests run on."""

from __future__ import annotations

import pytest

RUNTIMES = pytest.mark.parametrize("suite", ["trixie", "forky"], indirect=True)
