"""What is said of a configuration that is wrong."""

from __future__ import annotations

import pytest

from agent import config
from agent.errors import ConfigError


def problems_of(text: str | bytes) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        config.parse(text, "test.yaml")
    return caught.value.problems
