"""What networks hold as secrets is neither logged nor told in errors, and does reach IPAM plugins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from agent import config
from agent.config.schema import json_schema
from agent.model.printable import MASK, is_secret

NETWORKS = """
networks:
  - name: rails
    mode: vf
    ipam:
      type: infoblox
      server: https://admin:s3cret@grid.example/wapi
      credentials: {user: admin, password: s3cret}
      tokens: [s3cret]
"""
ADDITIONAL = {"resourceList": [{"resourceName": "vf", "additionalInfo": {"*": {"token": "s3cret", "rail": "a"}}}]}


def keys_of(schema: Any) -> Iterator[str]:
    """List the keys that a JSON Schema names, at any depth."""
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        for inner in schema.values():
            yield from keys_of(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from keys_of(inner)


def test_the_configuration_in_effect_is_told_without_secrets() -> None:
    read = config.parse(NETWORKS, "test.yaml")
    told = config.describe(read)
    assert "s3cret" not in told
    (network,) = json.loads(told)["networks"]
    assert network["ipam"] == {
        "type": "infoblox",
        "server": f"https://admin:{MASK}@grid.example/wapi",
        "credentials": MASK,
        "tokens": MASK,
    }
    ipam = read.networks[0].setup.ipam
    assert ipam is not None
    assert ipam["credentials"] == {"user": "admin", "password": "s3cret"}


def test_what_other_plugins_configurations_hold_as_secrets_is_not_told_either() -> None:
    told = config.describe(config.parse(json.dumps(ADDITIONAL), "config.json"))
    assert json.loads(told)["resources"][0]["compat"]["additional_info"] == {"*": {"token": MASK, "rail": "a"}}


def test_no_key_of_the_configuration_itself_is_taken_for_a_secret() -> None:
    keys = set(keys_of(json_schema()))
    assert len(keys) > 50
    assert {key for key in keys if is_secret(key)} == set()
