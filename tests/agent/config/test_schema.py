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
EXAMPLES = """
- {}
- {resources: [{name: rdma/hca, kind: hca, shares: 10, management: true, select: {linkLayer: [InfiniBand]}}]}
- resources: [{name: a/b, kind: vf, binding: late, slots: 4, select: [{pf: ["a#0-3"]}, {isRdma: true}], network: n}]
  networks: [{name: n, mtu: 9000}]
- {resources: [{name: a/b, kind: gpu, mig: mixed, replicas: 2, passBy: [cdi], select: {vendors: ["10de"]}}]}
- resources:
  - {name: a/b, kind: rail, gpu: {drivers: [nvidia]}, nic: {kind: hca, shares: 2, select: {devices: ["1021"]}}}
  - {name: a/c, kind: hca, select: {pf: [a]}, environment: [nccl]}
- {resources: [{name: a/b, kind: rail, nic: {kind: nic}}, {name: a/c, kind: accelerator, excludeTopology: true}]}
- {endpoints: {address: "::", port: 0}, rescanSeconds: 1.5, stateDir: /s, netnsDirs: [/n], health: {link: ignore}}
- {endpoints: {address: 0.0.0.0, status: everywhere}}
- {topology: {publish: true, settleSeconds: 1, kubeletConfig: /k}}
- dra: {driver: dra.example.com, aliases: [], claimMay: [ifName, vlan], shares: devices}
  resources: [{name: rdma/hca, kind: hca, offer: dra, binding: late}]
  health: {evict: [DeviceGone]}
"""
WRONG = """
- {resourcs: []}
- {endpoints: {status: anywhere}}
- {resources: [{name: rdma/hca, kind: hcas}]}
- {resources: [{kind: hca}]}
- {resources: [{name: x.org/gpu, kind: gpu, binding: late}]}
- {resources: [{name: rdma/hca, kind: hca, shares: 0}]}
- {resources: [{name: RDMA, kind: hca}]}
- {resources: [{name: a/b, kind: gpu, select: {pf: [ens1f0]}}]}
- {resources: [{name: a/b, kind: rail, nic: {kind: vf, shares: 3}}]}
- {resources: [{name: a/b, kind: rail, nic: {kind: gpu}}]}
- {resources: [{name: a/b, kind: vf, environment: [mpi]}]}
- {rescanSeconds: 0}
- {kubeletDir: relative}
- {health: {link: watch}}
- {networks: [{mtu: 9000}]}
- {dra: {driver: Example.com}}
- {dra: {claimMay: [deviceID]}}
- {resources: [{name: a/b, kind: rail, offer: dra}]}
- {health: {evict: [Gone]}}
"""


def is_read(document: dict[str, Any]) -> bool:
    try:
        parse(yaml.safe_dump(document), "x")
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("document", yaml.safe_load(EXAMPLES), ids=str)
def test_what_is_read_is_valid(document: dict[str, Any]) -> None:
    assert is_read(document)
    assert [error.message for error in Draft202012Validator(SCHEMA).iter_errors(document)] == []


@pytest.mark.parametrize("document", yaml.safe_load(WRONG), ids=str)
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
