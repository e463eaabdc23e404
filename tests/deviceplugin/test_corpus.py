"""Configurations as they are found in the field, right and wrong, and what becomes of them on modelled nodes.

Each file in `corpus/` has a configuration of either device plugin that we stand in for, or of our own, with what is
expected: problems, or for each resource the devices that it gets.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent import config
from agent.errors import ConfigError
from agent.offer.explanation import Account, Explanation, explain_all
from agent.offer.selection import errors
from agent.offer.units import plain_offer
from tests.node import recorded_node

CORPUS = sorted(Path(__file__).with_name("corpus").glob("*.yaml"))
SHOWN = 3


def outcome(text: str, node: str) -> dict[str, Any]:
    """Say what becomes of a configuration, in the words of the corpus."""
    try:
        read = config.parse(text, "config")
    except ConfigError as error:
        return {"problems": list(error.problems)}
    account = explain_all(read.resources, plain_offer(read.resources, recorded_node(node)))
    found: dict[str, Any] = {}
    if read.warnings:
        found["warnings"] = list(read.warnings)
    if mistakes := errors(read.resources, account.overlaps):
        found["overlaps"] = [str(overlap) for overlap in mistakes]
    return {**found, "resources": {each.resource_name: summary(each, account) for each in account.resources}}


def summary(found: Explanation, account: Account) -> dict[str, Any]:
    rest = len(found.devices) - SHOWN
    said: dict[str, Any] = {
        "candidates": len(found.candidates),
        "devices": [*found.devices[:SHOWN], *([f"and {rest} more"] if rest > 0 else [])],
        "units": len(found.units),
    }
    if found.units:
        said["first"] = found.units[0]
    lost = Counter(each.owner for each in account.overlaps if each.loser == found.resource_name)
    return {**said, "lost": dict(lost)} if lost else said


@pytest.mark.parametrize("path", CORPUS, ids=lambda p: p.stem)
def test_a_configuration_comes_to_what_is_expected(path: Path) -> None:
    case = yaml.safe_load(path.read_text())
    expected = {key: value for key, value in case.items() if key not in ("about", "node", "config")}
    assert outcome(case["config"], case["node"]) == expected
