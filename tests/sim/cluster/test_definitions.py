from __future__ import annotations

from typing import Any

import pytest

from hack.sim.cluster import definitions

KNOWN = {definition.kind: definition for definition in definitions.load()}
ZONE = {"name": "node-0", "type": "Node"}


def test_the_definitions_are_those_that_schedulers_read() -> None:
    assert {(d.api_version, d.kind, d.plural) for d in KNOWN.values()} == {
        ("topology.node.k8s.io/v1alpha2", "NodeResourceTopology", "noderesourcetopologies"),
        ("nodeinfo.volcano.sh/v1alpha1", "Numatopology", "numatopologies"),
    }


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({}, ".zones: Required value"),
        ({"zones": {}}, ".zones: must be of type array"),
        ({"zones": [{"name": "node-0"}]}, ".zones[0].type: Required value"),
        ({"zones": [{**ZONE, "colour": "red"}]}, ".zones[0].colour: field not declared in schema"),
        ({"zones": [{**ZONE, "costs": [{"name": "a", "value": True}]}]}, ".zones[0].costs[0].value: must be of type"),
        (
            {"zones": [{**ZONE, "resources": [{"name": "cpu", "capacity": "x", "allocatable": 1, "available": 1}]}]},
            "'x' is not a quantity",
        ),
    ],
)
def test_what_does_not_keep_to_the_definition_is_listed_by_its_path(content: dict[str, Any], problem: str) -> None:
    found = KNOWN["NodeResourceTopology"].problems({"apiVersion": "v", "kind": "k", "metadata": {}, **content})
    assert len(found) == 1
    assert problem in found[0]


def test_an_older_definition_does_not_know_a_field() -> None:
    document: dict[str, Any] = {"spec": {"podAllocations": []}}
    assert KNOWN["Numatopology"].problems(document) == []
    older = KNOWN["Numatopology"].lacking("spec", "podAllocations")
    assert older.problems(document) == [".spec.podAllocations: field not declared in schema"]
