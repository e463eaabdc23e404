"""Configurations as they are found on clusters, one file each, and what is read from them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from cni import netconf

FILES = sorted(Path(__file__).with_name("netconfs").glob("*.json"))
EMPTY = asdict(netconf.from_document({}))


def told(value: Any) -> Any:
    """Write a value as JSON holds it."""
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_configuration_is_read_as_it_is_meant(file: Path) -> None:
    case = json.loads(file.read_text())
    conf = asdict(netconf.parse(json.dumps(case["netconf"]).encode(), case.get("cni_args")))
    settings = {key: value for key, value in conf.pop("settings").items() if value is not None}
    differing = {key: value for key, value in conf.items() if value != EMPTY[key]}
    if settings:
        differing["settings"] = settings
    assert told(differing) == {key: v for key, v in case["expected"].items() if v != told(EMPTY.get(key))}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_file_says_what_it_is(file: Path) -> None:
    case = json.loads(file.read_text())
    assert case["what"].endswith(".")
    assert file.stem.startswith(case["expected"].get("kind", "nodefabric"))
