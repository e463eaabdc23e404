"""The section `restart`."""

from __future__ import annotations

import pytest

from agent.config import Restart, parse
from agent.errors import ConfigError


def test_nothing_is_done_about_a_restart_unless_it_is_asked_for() -> None:
    found = parse(b"{}", "c")
    assert found.restart == Restart(taint=False, wait_seconds=2.0)
    assert not found.needs_api


def test_who_taints_the_node_needs_the_api_server() -> None:
    found = parse(b"restart: {taint: true, waitSeconds: 5}", "c")
    assert found.restart == Restart(taint=True, wait_seconds=5.0)
    assert found.needs_api
    assert not found.topology.needs_api


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{taint: 2}", "restart.taint: must be true or false, is 2"),
        ("{waitSeconds: 9}", "restart.waitSeconds: must be a number of seconds from 0 to 5, is 9"),
        ("{wait: 1}", "restart.wait: is not a known key here; known are: taint, waitSeconds"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(f"restart: {text}".encode(), "c")
    assert refused.value.problems == (said,)
