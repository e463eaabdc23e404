"""The JSON Schema says what the reader reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from agent.config import KINDS, parse
from agent.config.schema import json_schema
from agent.errors import ConfigError
from hack.config_table import keys, markdown

SCHEMA = json_schema()
REPOSITORY = Path(__file__).parents[3]
DOCUMENTS = yaml.safe_load(Path(__file__).with_name("schema_documents.yaml").read_text())


def is_read(document: dict[str, Any]) -> bool:
    try:
        parse(yaml.safe_dump(document), "x")
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("document", DOCUMENTS["read"], ids=str)
def test_what_is_read_is_valid(document: dict[str, Any]) -> None:
    assert is_read(document)
    assert [error.message for error in Draft202012Validator(SCHEMA).iter_errors(document)] == []


@pytest.mark.parametrize("document", DOCUMENTS["refused"], ids=str)
def test_what_is_refused_is_not_valid(document: dict[str, Any]) -> None:
    assert not is_read(document)
    assert not Draft202012Validator(SCHEMA).is_valid(document)


def test_it_is_a_schema_whose_every_key_says_what_it_means() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    kinds = SCHEMA["properties"]["resources"]["items"]["oneOf"]
    assert [kind["properties"]["kind"]["const"] for kind in kinds] == list(KINDS)
    assert [row.path for row in keys(SCHEMA) if not row.about] == []


def test_the_files_in_docs_are_up_to_date() -> None:
    table = markdown(keys(SCHEMA))
    assert table in (REPOSITORY / "docs/configuration.md").read_text()
    assert yaml.safe_load((REPOSITORY / "docs/config.schema.json").read_text()) == SCHEMA
